"""The measuring tool, with sizes that take no time: what it runs, counts, refuses, keeps and compares."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flash_ext
from benchmarks import ceilings, checks, counters, cpu, decode, forward_backward, peers, provenance, report, timing
from benchmarks.__main__ import main, make_parser
from benchmarks.checks import Expected, WrongOutput
from benchmarks.contest import Contest
from benchmarks.forward_backward import Problem
from benchmarks.peers import OURS, Peer, sdpa
from benchmarks.report import Record, Row
from benchmarks.timing import Contestant, CpuClock, Effort
from tests import oracle

ROOT = Path(__file__).resolve().parents[2]
FAST = ["--device", "cpu", "--rounds", "2"]
COMMANDS = {
    "forward": ["--shapes", "2x40x4/2x16", "--dtype", "float32", "bfloat16"],
    "backward": ["--head-dim", "16", "--seqlen", "16", "32", "--tokens", "64", "--hidden", "32", "--causal"],
    "training": ["--shapes", "1x33x2x16", "--full"],
    "decode": ["--heads", "4/2", "--contexts", "2x48", "--head-dim", "16"],
    "options": ["--seqlen", "32", "--tokens", "64", "--hidden", "32", "--head-dim", "16"],
    "memory": ["--seqlen", "64", "--heads", "1", "--head-dim", "16"],
    "host": ["--calls", "2"],
}


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.READ_BYTES, "cpu", 2**16)


def run(question: str, *more: str) -> int:
    return main([question, *FAST, *COMMANDS[question], *more])


def row(label: str = "1", table: str = "t", **measured: float) -> Row:
    return Row(table, label, {"seqlen": 1}, measured)


def record(*rows: Row, question: str = "forward") -> Record:
    origin = {
        "device": "cpu",
        "cpu": "c",
        "threads": 1,
        "isa": "i",
        "torch": "2",
        "commit": None,
        "date": "d",
        "peers": {},
    }
    return Record(question, "ms", "ms", "seqlen", {**origin, "command": "python"}, {}, list(rows))


@pytest.mark.parametrize("question", COMMANDS)
def test_question(question: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert run(question, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    kept = report.read(file)
    assert report.markdown(kept) == printed.rstrip("\n")
    assert kept.question == question and kept.rows
    for kept_row in kept.rows:
        assert kept_row.missing == {}
        assert all(value > 0 for value in (*kept_row.measured.values(), *kept_row.shown.values()))
        assert OURS in kept_row.measured
        assert question == "options" or "sdpa" in kept_row.measured
    if question not in ("memory", "host"):
        assert kept.ceilings["read_tbps"] > 0 and kept.ceilings["matmul_float32_tflops"] > 0


def test_provenance_names_no_place_and_nobody(tmp_path: Path) -> None:
    run("host", "--json", str(tmp_path / "run.json"))
    text = (tmp_path / "run.json").read_text()
    assert not re.search(r"""["\s]/\w""", text) and str(Path.home()) not in text
    origin = json.loads(text)["provenance"]
    assert origin["command"].startswith("python -m benchmarks host --device cpu")
    assert origin["command"].endswith("--json run.json")
    software = {"python", "torch", "float32_matmul_precision", "flash_ext", "peers", "packages", "commit"}
    assert set(origin) == {"command", "date", "device", "cpu", "isa", "threads"} | software


def test_command_is_printed_without_folders() -> None:
    command = ["benchmarks", "forward", "--json", "/home/me/a.json", "--plot=/home/me/b.png", "--causal"]
    assert provenance.printable_command(command) == "python -m benchmarks forward --json a.json --plot=b.png --causal"


def test_commit_outside_of_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == flash_ext.build_info()["git_commit"]
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == flash_ext.build_info()["git_commit"]


@pytest.mark.parametrize("question", ["forward", "options", "host"])
def test_plot(question: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(label, table, flash_ext=1.0, fa2=2.0) for table in "abcde" for label in "12"]
    del rows[0].measured["fa2"]
    report.plot(record(*rows, question=question), tmp_path / "run.svg")
    assert (tmp_path / "run.svg").stat().st_size > 0


def test_preset_of_the_cpu(tmp_path: Path) -> None:
    main(["--shapes", "1x16x1x16", "--json", str(tmp_path / "run.json")], preset=cpu.PRESET, module="benchmarks.cpu")
    kept = report.read(tmp_path / "run.json")
    assert kept.provenance["command"] == "python -m benchmarks.cpu --shapes 1x16x1x16 --json run.json"
    assert [set(kept_row.measured) for kept_row in kept.rows] == [{OURS, "sdpa"}] * 4


def test_recorded_runs_can_be_read() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    for path in results:
        assert report.read(path).rows


# What is asked


def chosen(*arguments: str, device: str = "cuda") -> argparse.Namespace:
    namespace = make_parser().parse_args(arguments)
    namespace.device = torch.device(device)
    return namespace


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
        ["compare", "missing.json", "missing.json"],
    ],
)
def test_arguments_that_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_of:
        main(arguments)
    assert exit_of.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_flops() -> None:
    full = Problem(2, 1024, 16, 4, 64, False, "bfloat16")
    assert full.flops("forward") == 4 * 2 * 16 * 1024 * 1024 * 64
    assert full.flops("backward") == 2.5 * full.flops("forward")
    causal = Problem(2, 1024, 16, 4, 64, True, "bfloat16")
    assert causal.flops("forward") == full.flops("forward") / 2
    measured = forward_backward.row_of(full, "forward", {OURS: 2.0}, {})
    assert measured.shown[OURS] == pytest.approx(full.flops("forward") / 2e-3 / 1e12)
    forward_backward.add_ceiling([measured], {"matmul_bfloat16_tflops": 2 * measured.shown[OURS]})
    assert measured.figures["% of matmul"] == pytest.approx(50)


def test_bytes_of_a_cache() -> None:
    problem = decode.Problem(3, 512, 16, 2, 128, "bfloat16")
    assert problem.kv_bytes == 2 * 3 * 512 * 2 * 128 * 2
    assert decode.row_of(problem, 16, {OURS: 0.5}, None, {}).figures["TB/s"] == pytest.approx(problem.kv_bytes / 5e8)


# What is right


def off_by_a_percent(*args: Tensor, **options: object) -> Tensor:
    out = original_attention(*args, **options)
    assert isinstance(out, Tensor)
    return out * 1.01


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 1.01


original_attention, original_decode = flash_ext.attention, flash_ext.decode


@pytest.mark.parametrize("question", ["forward", "backward", "training", "options", "memory", "host"])
def test_wrong_output_ends_the_run(question: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flash_ext, "attention", off_by_a_percent)
    with pytest.raises(WrongOutput, match="out is off by"):
        run(question, "--json", str(tmp_path / "run.json"))
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("question", ["backward", "options", "memory", "host"])
def test_wrong_gradient_ends_the_run(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(q: Tensor, *args: Tensor, **options: object) -> object:
        return original_attention(WrongGradient.apply(q), *args, **options)

    monkeypatch.setattr(flash_ext, "attention", attention)
    with pytest.raises(WrongOutput, match="dq is off by"):
        run(question)


def test_wrong_decode_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_ext, "decode", lambda *args, **options: original_decode(*args, **options) * 1.01)
    with pytest.raises(WrongOutput, match="out is off by"):
        run("decode")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_noticed_where_the_result_is_small(dtype: torch.dtype) -> None:
    call = oracle.Call(*(torch.randn(1, 2048, 1, 16, dtype=dtype) for _ in range(3)))
    with pytest.raises(WrongOutput):
        Expected(call).check("zeros", {"out": torch.zeros(1, 2048, 1, 16, dtype=dtype)})


def test_nan_in_a_head_that_is_not_compared() -> None:
    call = oracle.Call(*(torch.randn(1, 8, 3, 16) for _ in range(3)))
    out = original_attention(call.q, call.k, call.v)
    assert isinstance(out, Tensor)
    out[0, 3, 1] = torch.nan
    with pytest.raises(WrongOutput, match="not finite"):
        Expected(call).check("nan", {"out": out})


@pytest.mark.parametrize("causal", [False, True])
def test_reference_in_chunks(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad = (torch.randn(2, 50, 1, 16, dtype=torch.float64) for _ in range(4))
    call = oracle.Call(q, k, v, {"causal": causal}, grad_out=grad)
    whole = oracle.run_reference(call, torch.float64, ("q", "k", "v"))
    monkeypatch.setattr(checks, "CHUNK_SCORES", 2 * 50 * 7)
    chunked = checks._run_in_chunks(call, torch.float64, with_gradients=True)
    for name, value in chunked.items():
        torch.testing.assert_close(value, whole[name])


def test_wrong_peer_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Peer("wrong", lambda q, k, v, causal: sdpa(q, k, v, causal) * 1.01, sdpa)
    monkeypatch.setitem(peers.PEERS, "sdpa", lambda: wrong)
    assert run("forward") == 0
    captured = capsys.readouterr()
    assert "warning: sdpa: out is off by" in captured.err
    assert "- sdpa: not in forward" in captured.out and "math" in captured.out


def test_peer_that_cannot_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cannot(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        raise RuntimeError("no kernel for this\nand a long explanation")

    monkeypatch.setitem(peers.PEERS, "sdpa", lambda: Peer("cannot", cannot, cannot))
    assert run("decode") == 0
    assert "no kernel for this" in capsys.readouterr().out


@pytest.mark.parametrize("question", COMMANDS)
def test_peers_alone_where_ours_is_not_supported(
    question: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flash_ext, "supports", lambda *args, **options: (False, "not yet"))
    assert run(question, "--json", str(tmp_path / "run.json")) == 0
    assert "not yet" in capsys.readouterr().out
    for kept_row in report.read(tmp_path / "run.json").rows:
        assert kept_row.missing[OURS] == "not yet"
        assert not any(name.startswith(OURS) for name in kept_row.measured)


def test_ours_that_fails_ends_the_run() -> None:
    def fails() -> None:
        raise RuntimeError("broken")

    call = oracle.Call(*(torch.randn(1, 4, 1, 8) for _ in range(3)))
    with pytest.raises(RuntimeError, match="broken"):
        Contest().enter(OURS, Contestant(fails), Expected(call), required=True)


# How it is timed


class FakeClock(CpuClock):
    """Time is what the contestant returns."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def time(self, contestant: Contestant) -> timing.Reading:
        name, ms = contestant.call()
        self.order.append(name)
        return lambda: ms


def test_contestants_take_turns() -> None:
    clock = FakeClock()
    contestants = {name: Contestant(lambda name=name, ms=ms: (name, ms)) for name, ms in (("a", 1.0), ("b", 4.0))}
    found = timing.take_turns(clock, contestants, Effort(most=6, fewest=2, budget_ms=12.0))
    assert found == {"a": 1.0, "b": 4.0}
    assert "".join(clock.order) == "ab" + "ab" + "ba" + "ab" + "aaa"


def test_rounds_fit_the_budget() -> None:
    effort = Effort(most=30, fewest=5, budget_ms=100)
    assert [effort.rounds(ms) for ms in (0.0, 1.0, 10.0, 50.0)] == [30, 30, 10, 5]


# What is printed, kept, compared


def test_table_and_summary() -> None:
    text = report.markdown(record(row("1", flash_ext=2.0, fa2=3.0, cudnn=1.0), row("2", flash_ext=1.0, fa2=6.0)))
    assert "| seqlen | flash_ext | fa2 | cudnn | / best peer | / fa2 |" in text
    assert "| 1 | 2.00 | 3.00 | 1.00 | 0.50 | 1.50 |" in text
    assert "| 2 | 1.00 | 6.00 | - | 6.00 | 6.00 |" in text
    assert "| t | 3.00 (1.50) | 0.50 (0.50) | 1.73 (0.50) |" in text


def test_other_forms_of_ours_are_no_peers() -> None:
    assert row(flash_ext=2.0, **{"flash_ext paged": 1.0}).ratios() == {}


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    record(row("1", flash_ext=2.0, fa2=4.0), row("2", flash_ext=1.0), row("3", flash_ext=1.0)).write(before)
    record(row("1", flash_ext=1.0, fa2=3.2), row("2", flash_ext=1.25)).write(after)
    assert main(["compare", str(before), str(after)]) == 0
    printed = capsys.readouterr().out
    assert "| t | 1 | 2.00 | 1.00 | 2.00 | 1.25 | 1.60 |" in printed
    assert "| t | 2 | 1.00 | 1.25 | 0.80 | - | - |" in printed
    assert "geometric mean 1.265, smallest 0.800, 2 rows" in printed
    assert "1 rows are in one record only" in printed
    assert main(["compare", str(before), str(after), "--at-least", "0.75"]) == 0
    assert main(["compare", str(before), str(after), "--at-least", "0.97"]) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a record"),
        ('{"schema": "flash_ext.benchmarks/1"}', "has the fields"),
    ],
)
def test_what_is_no_record(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        report.read(tmp_path / "bad.json")


def test_records_of_different_questions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot compare forward with decode"):
        report.compare(record(), record(question="decode"))


def raw_page(*kernels: dict[str, str]) -> str:
    """As ncu prints it, with its notes around."""
    names = list(kernels[0])
    lines = [names, ["" for _ in names], *([kernel[name] for name in names] for kernel in kernels)]
    return "\n".join(["==PROF== Connected", *(",".join(f'"{word}"' for word in line) for line in lines)])


def test_counters_of_kernels() -> None:
    kernel = {
        "Kernel Name": "forward_kernel<a, b>(c)",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "91.5",
        "sm__cycles_active.avg": "1,900.00",
        "sm__cycles_elapsed.max": "2,000",
        "smsp__issue_active.avg.pct_of_peak_sustained_active": "38.4",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed": "4.2",
        "lts__throughput.avg.pct_of_peak_sustained_elapsed": "36",
        "gpu__time_duration.sum": "1,250",
        "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "1.5",
        "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": "0.5",
        "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "2.0",
    }
    other = {**kernel, "gpu__time_duration.sum": "2,000"}
    shown = counters.table(["128x512c"], ["ours", "theirs"], counters.read_kernels(raw_page(kernel, other)), False)
    first, second = shown.splitlines()[2:]
    assert first == "| 128 causal 512 | ours | 1 | 1.60 | 92 | 95 | 38 | 4 | 36 | barrier 50, wait 38, gmma 12 |"
    assert "| theirs | 2 | 1.00 |" in second
    with pytest.raises(ValueError, match="1 kernels were seen, 2 expected"):
        counters.table(["128x512c"], ["ours", "theirs"], counters.read_kernels(raw_page(kernel)), False)


def test_a_kernel_in_time() -> None:
    samples = {
        "active": "0; 5; 9; 9; 9; 9; 9; 4; 0",
        "tensor": "0; 0; 0; 3; 30; 60; 61; 9; 0",
        "read": "0; 0; 8; 9; 9; 9; 9; 9; 9",
    }
    kernel = {counters.SERIES[name]: f"1,000.5 ({values})" for name, values in samples.items()}
    (row,) = counters.read_kernels(raw_page(kernel))
    assert counters.timeline(row) == ["1.5", "4.5", "6.0", "1.5"]
    assert counters.timeline({name: "0 (0; 0)" for name in row}) == ["", "", "", ""]
