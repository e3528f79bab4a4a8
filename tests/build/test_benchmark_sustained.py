"""Speeds without pause: ``--sustained`` keeps them, reports and the page show them where they were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.pages import records
from benchmarks.pages.all_pages import FIGURES
from benchmarks.pages.figures import Gone
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.sustained import SUSTAINED_SECTION, is_sustained
from benchmarks.peers import OURS
from tests.build.benchmark_runs import record, run

pytestmark = pytest.mark.usefixtures("small_ceilings")


@pytest.mark.parametrize("benchmark", ["forward", "backward", "training"])
def test_loops_are_kept_beside_bursts(benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert run(benchmark, "--sustained", "0.001", "--json", str(file)) == 0
    kept = report.read(file)
    assert kept.provenance["sustained_s"] == 0.001 and kept.rows
    for row in kept.rows:
        assert set(row.sustained) == set(row.measured) >= {OURS, "sdpa"}
        assert row.sustained_ratios() == {
            name: time / row.sustained[OURS] for name, time in row.sustained.items() if name != OURS
        }
    printed = capsys.readouterr().out
    assert " | flash_ext, sustained | sdpa, sustained | math, sustained | / best peer, sustained |" in printed
    assert "**the same without pause: geometric mean (smallest)**" in printed


def test_nothing_is_said_of_loops_that_nobody_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    run("forward", "--json", str(file))
    assert all(row.sustained_ratios() == {} for row in report.read(file).rows)
    printed = capsys.readouterr().out
    assert "sustained" not in printed and "without pause" not in printed


def test_ratios_of_loops_are_their_own() -> None:
    row = report.Row("t", "1", {}, {OURS: 2.0, "fa3": 3.0}, sustained={OURS: 4.0, f"{OURS} paged": 1.0, "fa3": 5.0})
    assert row.ratios() == {"fa3": 1.5} and row.sustained_ratios() == {"fa3": 1.25}
    without_ours = report.Row("t", "2", {}, {"fa3": 3.0}, sustained={"fa3": 5.0})
    assert without_ours.sustained_ratios() == {}
    text = report.markdown(record(row, without_ours))
    assert "| 1 | 2.00 | 3.00 | 1.50 | 4.00 | 5.00 | 1.25 |" in text
    assert "| t | 1.25 (1.25) | 1.25 (1.25) |" in text


# On the page


def test_the_page_has_a_section_where_a_record_has_loops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (records.ROOT / PERFORMANCE).read_text()
    assert (SUSTAINED_SECTION in FIGURES) == is_sustained() == (SUSTAINED_SECTION.behind in page)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert not is_sustained()
    write(tmp_path, "h200_forward.json", training_row(2048, {OURS: 1.0, "fa3": 2.0}))
    assert not is_sustained()
    loops = training_row(2048, {OURS: 1.0, "fa3": 2.0}, {OURS: 2.0, "fa3": 2.2})
    short = training_row(4096, {OURS: 1.0, "fa3": 2.0}, {OURS: 1.25, "fa3": 1.0})
    few_heads = training_row(2048, {OURS: 1.0, "fa3": 2.0}, {OURS: 9.0, "fa3": 9.0}, heads_kv=4)
    write(tmp_path, "h200_forward.json", loops, short, few_heads)
    assert is_sustained()
    first = SUSTAINED_SECTION.apply(page)
    assert first == SUSTAINED_SECTION.apply(first) and first.count(SUSTAINED_SECTION.behind) == 1
    assert first.index(SUSTAINED_SECTION.behind) < first.index(SUSTAINED_SECTION.before)
    section = first[first.index(SUSTAINED_SECTION.behind) :].partition(SUSTAINED_SECTION.before)[0]
    assert "TFLOP/s of flash-ext / FlashAttention-3;" in section
    assert "By `python -m benchmarks h200_forward`, in `benchmarks/results/h200_forward.json`." in section
    assert "| | 2048 | / best peer | % of bursts |\n" in section
    # 600 and 300 TFLOP/s in bursts; ratios 1.1 and 0.8, and 50 and 80 % of bursts.
    assert "| forward, 128 causal | 300 / 273 | 0.94 (0.80) | 63 |\n" in section
    with pytest.raises(Gone):
        SUSTAINED_SECTION.apply("nothing of the kind")


def test_a_record_of_loops_alone_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    page = (records.ROOT / PERFORMANCE).read_text()
    times = {OURS: 1.0, "fa3": 2.0}
    write(tmp_path, "h200_backward.json", training_row(512, times, {OURS: 2.0, "fa3": 2.2}, direction="backward"))
    assert "| backward, 128 causal | 300 / 273 | 1.10 (1.10) | 50 |" in SUSTAINED_SECTION.apply(page)
    alone = training_row(512, times, {OURS: 3.0, "fa3": 6.0}, direction="backward")
    write(tmp_path, "h200_backward_sustained.json", alone)
    text = SUSTAINED_SECTION.apply(page)
    assert "`benchmarks/results/h200_backward_sustained.json`" in text
    assert "| backward, 128 causal | 200 / 100 | 2.00 (2.00) | 33 |" in text
    assert "zeros" not in text.partition(SUSTAINED_SECTION.before)[0].partition(SUSTAINED_SECTION.behind)[2]


def test_loops_over_zeros_stand_beside_those_over_random_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    times = {OURS: 1.0, "fa3": 2.0}
    loops = training_row(512, times, {OURS: 2.0, "fa3": 4.0}, direction="backward")
    zeros = training_row(512, times, {OURS: 1.0, "fa3": 1.5}, direction="backward")
    zeros.problem["zeros"] = True
    write(tmp_path, "h200_backward_sustained.json", loops)
    write(tmp_path, "h200_backward_sustained_zeros.json", zeros)
    text = SUSTAINED_SECTION.apply((records.ROOT / PERFORMANCE).read_text())
    assert "| backward, 128 causal | 300 / 150 | 2.00 (2.00) | 50 |" in text
    assert "| backward, 128 causal, zeros | 600 / 400 | 1.50 (1.50) | 100 |" in text
    assert "`benchmarks/results/h200_backward_sustained_zeros.json`" in text and "so the clock stays high" in text


def training_row(
    seqlen: int,
    measured: dict[str, float],
    sustained: dict[str, float] | None = None,
    direction: str = "forward",
    heads_kv: int = 16,
) -> report.Row:
    """Of 16384 tokens and 16 heads of 128, causal; 600 TFLOP/s are 1 ms."""
    problem = {
        "batch": 16384 // seqlen, "seqlen": seqlen, "heads_q": 16, "heads_kv": heads_kv, "head_dim": 128,
        "causal": True, "dtype": "bfloat16", "direction": direction,
    }  # fmt: skip
    shown = {name: 600 / time for name, time in measured.items()}
    return report.Row(direction, f"{seqlen}", problem, measured, shown, sustained=sustained or {})


def write(folder: Path, name: str, *rows: report.Row) -> None:
    kept = record(*rows)
    kept.provenance["command"] = f"python -m benchmarks {Path(name).stem} --json {name}"
    kept.write(folder / name)
