"""The benchmark over several ranks makes a record that can be relied on, and the page has its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import arguments, context_parallel, provenance, report
from benchmarks.pages import records
from benchmarks.pages.all_pages import FIGURES
from benchmarks.pages.several_gpus import figures_of_several_gpus
from benchmarks.peers import OURS
from benchmarks.timing import Sample

SMALL = ["--device", "cpu", "--ranks", "2", "--heads", "2", "--head-dim", "16", "--dtype", "float32"]


def test_a_run_is_a_record(tmp_path: Path) -> None:
    """But for what is committed here: rounds and quartiles are those that a record needs."""
    file = tmp_path / "run.json"
    sizes = ["--seqlen", "64", "128", "--alone-up-to", "64"]
    assert context_parallel.main([*SMALL, *sizes, "--methods", "ring", "gather", "--json", str(file), "--trial"]) == 0
    found = report.read(file)
    assert found.provenance["rounds"] == {"fewest": 12, "most": 12} and found.provenance["ranks"] == 2
    assert found.provenance["backend"] == "gloo" and "--json run.json" in found.provenance["command"]
    both, ours = found.rows
    assert set(both.measured) == {OURS, f"{OURS}, gather", context_parallel.ALONE} == set(both.spread)
    assert all(spread["calls"] >= provenance.RECORD_ROUNDS for row in found.rows for spread in row.spread.values())
    assert both.spread[OURS]["lower"] <= both.measured[OURS] <= both.spread[OURS]["upper"]
    assert both.figures["x one, lower"] <= both.figures["x one"]
    assert context_parallel.ALONE not in ours.measured and "x one" not in ours.figures
    assert ours.missing == {context_parallel.ALONE: "longer than 64 tokens (--alone-up-to)"}
    assert ours.figures["x one at 64"] == pytest.approx(ours.shown[OURS] / both.shown[context_parallel.ALONE])


def test_the_default_is_long_enough_for_a_record() -> None:
    chosen = context_parallel.make_parser().parse_args([])
    assert context_parallel.effort_of(chosen).fewest >= provenance.RECORD_ROUNDS
    assert chosen.alone_up_to is None and not chosen.trial


def test_what_is_no_record_is_kept_as_a_trial_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "why_no_record", lambda effort: f"{effort.fewest} rounds, for example")
    with pytest.raises(SystemExit):
        context_parallel.main([*SMALL, "--rounds", "3", "--json", str(tmp_path / "run.json")])
    assert "this would be no record: 3 rounds, for example (--trial keeps it" in capsys.readouterr().err


def test_rounds_go_back_and_forth() -> None:
    order: list[str] = []

    def step(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = context_parallel.take_turns({name: lambda name=name: step(name) for name in "ab"}, 2)  # type: ignore[misc]
    assert "".join(order) == "abbaabba"
    assert found == {"a": Sample((5.0, 8.0)), "b": Sample((6.0, 7.0))}


PAGE = """
On two, in `benchmarks/results/h200_context_parallel.json`. The GPUs of this section are NVIDIA H200, with torch 2.11.

| tokens | one | two | | TFLOP/s | over one at 131072 |
| --- | --- | --- | --- | --- | --- |
| 131072 | 1 | 1 | 1 | 1 | 1 |
| 524288 | 1 | 1 | 1 | 1 | 1 |
"""


def test_figures_of_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A length at which one GPU was not asked has none of its figures."""
    assert set(map(str, figures_of_several_gpus())) <= set(map(str, FIGURES))
    rows = [
        report.Row("t", "131072", {"seqlen": 131072}, {OURS: 250.0, context_parallel.ALONE: 450.0}, {OURS: 985.0}),
        report.Row("t", "524288", {"seqlen": 524288}, {OURS: 3600.0}, {OURS: 1094.6}),
    ]
    rows[0].figures.update({"x one": 1.804, "x one at 131072": 1.8})
    rows[1].figures["x one at 131072"] = 2.0
    origin = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.13.0"}
    file = tmp_path / "h200_context_parallel.json"
    report.Record("context_parallel", "ms", "TFLOP/s", "seqlen", origin, {}, rows).write(file)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    text = PAGE
    figures = list(figures_of_several_gpus())
    assert len(figures) == 2
    for figure in figures:
        text = figure.apply(text)
    assert "are NVIDIA H100 80GB HBM3, with torch 2.13." in text
    text = text.replace(records.TIMES, "x")
    assert "| 131072 | 450 | 250 | 1.80x | 985 | 1.80x |" in text
    assert "| 524288 | | 3600 | | 1095 | 2.00x |" in text
