"""Each benchmark with sizes that take no time; what may be chosen, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    cpu,
    encoder,
    forward_backward,
    masks,
    options,
    report,
    timing,
)
from benchmarks.__main__ import main
from benchmarks.checks import WrongOutput
from benchmarks.comparison import Comparison
from benchmarks.forward_backward import Problem
from benchmarks.pages import records
from benchmarks.pages.modules import encoder_bounds, encoder_cells
from benchmarks.peers import OURS, Peer
from benchmarks.report import Row
from tests.build.benchmark_runs import COMMANDS, chosen, record, row, run

pytestmark = pytest.mark.usefixtures("small_ceilings")

PEER_OF = {"module": "torch", "encoder": "torch", "models": "torch"}


@pytest.mark.parametrize("benchmark", COMMANDS)
def test_each_runs_and_keeps_what_it_prints(benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert run(benchmark, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    kept = report.read(file)
    assert report.markdown(kept) == printed.rstrip("\n")
    assert kept.benchmark == benchmark and kept.rows
    for kept_row in kept.rows:
        assert benchmark in ("options", "shapes", "sparse") or kept_row.missing == {}
        assert all(value > 0 for value in (*kept_row.measured.values(), *kept_row.shown.values()))
        assert OURS in kept_row.measured
        if benchmark != "masks":  # nobody else builds them
            assert (PEER_OF.get(benchmark, "sdpa") in kept_row.measured) != ("sdpa" in kept_row.missing)
        assert set(kept_row.spread) == (set() if benchmark == "memory" else set(kept_row.measured))
        assert set(kept_row.ratio_spread) == (set() if benchmark == "memory" else set(kept_row.ratios()))
        assert all(spread["lower"] <= spread["upper"] for spread in kept_row.spread.values())
    if benchmark not in ("memory", "host", "masks", "module", "encoder", "models"):
        assert kept.ceilings["read_tbps"] > 0 and kept.ceilings["matmul_float32_tflops"] > 0


def test_costs_are_measured_from_the_call_without_the_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A deterministic call from the same one without it, be it causal, packed, or with grouped heads."""
    asked: list[tuple[bool, bool, int, bool]] = []
    add = options.add

    def recorded(comparison: Comparison, name: str, peer: Peer, variant: options.Variant, *rest: Any) -> None:
        if name in (options.PLAIN, OURS):
            of = variant.call
            causal, repeats = (bool(of.options.get(option)) for option in ("causal", "deterministic"))
            asked.append((causal, of.varlen, of.q.shape[-2] // of.k.shape[-2], repeats))
        add(comparison, name, peer, variant, *rest)

    monkeypatch.setattr(options, "add", recorded)
    file = tmp_path / "run.json"
    run("options", "--only", "deterministic", "--hidden", "64", "--json", str(file))
    rows = report.read(file).rows
    assert len(rows) == 4 and all("% cost" in row.figures for row in rows)
    of_variants = [(*of, repeats) for of in ((False, False, 1), (True, False, 1), (False, False, 4), (False, True, 1))
                   for repeats in (False, True)]  # fmt: skip
    assert asked == [(False, False, 1, False), (False, False, 1, False), *of_variants]


def test_inputs_of_zeros(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    run("backward", "--zeros", "--json", str(file))
    rows = report.read(file).rows
    assert rows and all(row.problem["zeros"] and row.table.endswith(", zeros") for row in rows)
    problem = dataclasses.replace(forward_backward.Problem(1, 8, 1, 1, 8, False, "float32"), zeros=True)
    call = forward_backward.make_call(problem, torch.device("cpu"), with_gradients=True)
    assert all(not tensor.any() for tensor in (call.q, call.k, call.v, call.grad_out))


def test_masks_are_timed_on_host_and_device(tmp_path: Path) -> None:
    """And counted: an operator of an eager builder is what the host spends its time on."""
    run("masks", "--json", str(tmp_path / "run.json"))
    rows = {kept_row.label: kept_row for kept_row in report.read(tmp_path / "run.json").rows}
    assert {"causal", "window", "documents", "from_blocks", "causal, transposed"} <= rows.keys()
    assert all(set(kept_row.figures) == {"device us", "operators", "blocks"} for kept_row in rows.values())
    assert rows["causal"].figures["blocks"] == 6 and rows["from_blocks"].figures["operators"] > 10


def test_a_mask_that_shows_other_pairs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(masks.CAUSAL, rule=lambda n: lambda i, j: j < i)
    monkeypatch.setattr(masks, "BUILDERS", [wrong])
    with pytest.raises(WrongOutput, match="causal shows other pairs"):
        run("masks")


def test_provenance_names_no_place_and_nobody(tmp_path: Path) -> None:
    run("host", "--json", str(tmp_path / "run.json"))
    text = (tmp_path / "run.json").read_text()
    assert not re.search(r"""["\s]/\w""", text) and str(Path.home()) not in text
    origin = json.loads(text)["provenance"]
    assert origin["command"].startswith("python -m benchmarks host --device cpu")
    assert origin["command"].endswith("--trial --calls 2 --json run.json")
    software = {"python", "torch", "torch_commit", "flash_ext", "peers", "peer_origins", "packages", "commit"}
    machine = {"device", "cpu", "isa", "threads", "gpu_state", "load_average"}
    how = {"command", "date", "environment", "float32_matmul_precision", "trial", "rounds", "sustained_s"}
    assert set(origin) == software | machine | how
    assert set(origin["peers"]) == {"sdpa", "math"} == set(origin["peer_origins"])
    assert origin["peer_origins"]["math"] == {"torch": torch.__version__, "commit": origin["torch_commit"]}
    assert origin["trial"] and origin["rounds"] == {"fewest": 2, "most": 2}


@pytest.mark.parametrize("benchmark", ["forward", "options", "host"])
def test_plot(benchmark: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(label, table, flash_ext=1.0, fa2=2.0) for table in "abcde" for label in "12"]
    del rows[0].measured["fa2"]
    report.plot(record(*rows, benchmark=benchmark), tmp_path / "run.svg")
    assert (tmp_path / "run.svg").stat().st_size > 0


def test_encoder_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages show the rows that have always been there, whatever else a record has."""
    torch._dynamo.reset()
    seen: list[tuple[bool, bool]] = []
    original = encoder.evaluation

    def evaluation(model: Any, x: Any, padding: Any, compiled: bool) -> Any:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return original(model, x, padding, compiled)

    monkeypatch.setattr(encoder, "evaluation", evaluation)
    with torch._dynamo.config.patch(suppress_errors=True):  # there may be no compiler: then it runs as it is
        assert run("encoder", "--compiled", "--json", str(tmp_path / "run.json")) == 0
    kept = report.read(tmp_path / "run.json")
    of_rows = [(row.problem["compiled"], row.problem["mode"]) for row in kept.rows]
    modes = ["inference_mode"] * 2 + ["no_grad"] * 2
    assert of_rows == [(compiled, mode) for compiled in (False, True) for mode in modes]
    assert seen == [(mode == "inference_mode", False) for _, mode in of_rows for _ in (OURS, "torch")]
    assert len({(row.table, row.label) for row in kept.rows}) == len(kept.rows)
    (tmp_path / "run.json").rename(tmp_path / "h200_encoder.json")
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    row, dtype = kept.rows[0], kept.rows[0].problem["dtype"]
    label = row.label.replace("x", records.TIMES)
    assert encoder_cells([], [label])[1:3] == [f"{row.measured[name]:.2f}" for name in (OURS, "torch")]
    assert encoder_bounds(dtype=dtype) == records.bounds_of_speed(kept.rows[:2], "torch")


def test_preset_of_the_cpu(tmp_path: Path) -> None:
    asked = ["--shapes", "1x16x1x16", "--trial", "--json", str(tmp_path / "run.json")]
    main(asked, preset=cpu.PRESET, module="benchmarks.cpu")
    kept = report.read(tmp_path / "run.json")
    assert kept.provenance["command"] == "python -m benchmarks.cpu --shapes 1x16x1x16 --trial --json run.json"
    assert [set(kept_row.measured) for kept_row in kept.rows] == [{OURS, "sdpa"}] * 4


# What is asked


def test_training_table_is_the_default() -> None:
    problems = forward_backward.problems(chosen("forward"))
    table = [p for p in problems if p.dtype == "bfloat16" and p.heads_q == p.heads_kv]
    assert len(table) == 3 * 2 * 6
    assert {p.batch * p.seqlen for p in problems} == {16384}
    assert {p.heads_q * p.head_dim for p in problems} == {2048}
    assert {(p.heads_q, p.heads_kv, p.seqlen) for p in problems if p.heads_q != p.heads_kv} == {
        (16, 4, 2048),
        (16, 4, 8192),
    }
    assert any(p.dtype == "float32" for p in problems)
    quick = forward_backward.problems(chosen("forward", "--quick"))
    assert 0 < len(quick) < len(problems) / 2


def test_the_backward_has_rows_with_few_key_heads_and_short_ones() -> None:
    table, problems = (forward_backward.problems(chosen(benchmark)) for benchmark in ("forward", "backward"))
    besides = [problem for problem in problems if problem not in table]
    assert Problem(1, 8192, 8, 1, 128, False, "bfloat16") in besides
    assert Problem(8, 1024, 40, 8, 128, True, "bfloat16") in besides
    assert {p.seqlen for p in besides if p.head_dim == 64 and p.heads_q == 16} == {64, 128, 197, 256, 384}
    full = forward_backward.problems(chosen("backward", "--full"))
    assert besides and not any(problem.causal for problem in full)


def test_selection() -> None:
    asked = ("forward", "--head-dim", "64", "--seqlen", "512", "1024", "--causal", "--dtype", "float16")
    assert forward_backward.problems(chosen(*asked)) == [
        Problem(32, 512, 32, 32, 64, True, "float16"),
        Problem(16, 1024, 32, 32, 64, True, "float16"),
    ]
    shapes = forward_backward.problems(chosen("backward", "--shapes", "3x100x8/2x96", "--full"))
    assert shapes == [Problem(3, 100, 8, 2, 96, False, "bfloat16")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["forward", "--shapes", "1x2x3"],
        ["forward", "--shapes", "1x2x4/3x16"],
        ["forward", "--seqlen", "0"],
        ["forward", "--device", "cpu", "--peers", "cudnn"],
        ["forward", "--device", "cpu", "--peers", "nobody"],
        ["forward", "--json", "/there/is/no/folder.json"],
        ["forward", "--plot", "picture.txt"],
        ["decode", "--contexts", "512"],
        ["module", "--sizes", "2x8x10/3"],
        ["encoder", "--shapes", "2x8x10/3p"],
        ["encoder", "--shapes", "2x8x10"],
        ["compare", "missing.json", "missing.json"],
    ],
)
def test_arguments_that_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_of:
        main(arguments)
    assert exit_of.value.code == 2
    assert "error: " in capsys.readouterr().err


class TestProgress:
    def test_lines_where_there_is_no_terminal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        now = 0.0
        monkeypatch.setattr(timing.time, "monotonic", lambda: now)
        progress = timing.Progress("forward")
        progress.say("ceilings")
        progress.expect(40)
        for _ in range(40):
            now += 1.0
            progress.update()
        progress.close()
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "forward: ceilings" and lines[1] == "forward: 10 of 40 rows, 10 s" and len(lines) == 5

    def test_the_tool_shows_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("forward")
        err = capsys.readouterr().err
        assert "forward: ceilings of the machine" in err and "forward: 4 of 4 rows" in err


def test_sustained_is_shown_beside_bursts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("forward", "--sustained", "0.001", "--json", str(tmp_path / "run.json"))
    assert "flash_ext, sustained | sdpa, sustained" in capsys.readouterr().out
    kept = report.read(tmp_path / "run.json")
    assert kept.provenance["sustained_s"] == 0.001
    assert all(set(kept_row.sustained) == set(kept_row.measured) for kept_row in kept.rows)
    rate = Row("t", "1", {}, {OURS: 2.0}, shown={OURS: 300.0}, sustained={OURS: 3.0})
    assert report.shown_sustained(rate, OURS) == pytest.approx(200)
