"""The measuring tool, with sizes that take no time: what it runs, counts, refuses, keeps and compares."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

import flash_ext
from benchmarks import (
    arguments,
    ceilings,
    counters,
    cpu,
    decode,
    forward_backward,
    gpu_state,
    masks,
    origins,
    provenance,
    report,
    timing,
)
from benchmarks.__main__ import main, make_parser
from benchmarks.checks import WrongOutput
from benchmarks.forward_backward import Problem
from benchmarks.peers import OURS
from benchmarks.report import Record, Row
from benchmarks.timing import Candidate, CpuClock, Effort, Sample, Timings

ROOT = Path(__file__).resolve().parents[2]
PEER_OF = {"module": "torch", "encoder": "torch"}
FAST = ["--device", "cpu", "--rounds", "2", "--trial"]
COMMANDS = {
    "forward": ["--shapes", "2x40x4/2x16", "--dtype", "float32", "bfloat16"],
    "backward": ["--head-dim", "16", "--seqlen", "16", "32", "--tokens", "64", "--hidden", "32", "--causal"],
    "training": ["--shapes", "1x33x2x16", "--full"],
    "decode": ["--heads", "4/2", "--contexts", "2x48", "--head-dim", "16"],
    "options": ["--seqlen", "32", "--tokens", "64", "--hidden", "32", "--head-dim", "16"],
    "sparse": ["--heads", "1", "--densities", "0.3", "1"],
    "masks": ["--seqlen", "300", "--calls", "1"],
    "module": ["--sizes", "2x24x32/4"],
    "encoder": ["--shapes", "2x8x16/2", "2x8x16/2p", "--layers", "1"],
    "memory": ["--seqlen", "64", "--heads", "1", "--head-dim", "16"],
    "host": ["--calls", "2"],
}


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.READ_BYTES, "cpu", 2**16)


def run(benchmark: str, *more: str) -> int:
    return main([benchmark, *FAST, *COMMANDS[benchmark], *more])


def row(label: str = "1", table: str = "t", **measured: float) -> Row:
    return Row(table, label, {"seqlen": 1}, measured)


def timings(**values: list[float]) -> Timings:
    return Timings({name: Sample(tuple(taken)) for name, taken in values.items()})


def record(*rows: Row, benchmark: str = "forward") -> Record:
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
    return Record(benchmark, "ms", "ms", "seqlen", {**origin, "command": "python"}, {}, list(rows))


@pytest.mark.parametrize("benchmark", COMMANDS)
def test_question(benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert run(benchmark, "--json", str(file)) == 0
    printed = capsys.readouterr().out
    kept = report.read(file)
    assert report.markdown(kept) == printed.rstrip("\n")
    assert kept.benchmark == benchmark and kept.rows
    for kept_row in kept.rows:
        assert benchmark in ("options", "sparse") or kept_row.missing == {}
        assert all(value > 0 for value in (*kept_row.measured.values(), *kept_row.shown.values()))
        assert OURS in kept_row.measured
        if benchmark != "masks":  # nobody else builds them
            assert (PEER_OF.get(benchmark, "sdpa") in kept_row.measured) != ("sdpa" in kept_row.missing)
        assert set(kept_row.spread) == (set() if benchmark == "memory" else set(kept_row.measured))
        assert set(kept_row.ratio_spread) == (set() if benchmark == "memory" else set(kept_row.ratios()))
        assert all(spread["lower"] <= spread["upper"] for spread in kept_row.spread.values())
    if benchmark not in ("memory", "host", "masks", "module", "encoder"):
        assert kept.ceilings["read_tbps"] > 0 and kept.ceilings["matmul_float32_tflops"] > 0


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
    machine = {"device", "cpu", "isa", "threads", "gpu_state"}
    how = {"command", "date", "environment", "float32_matmul_precision", "trial", "rounds", "sustained_s"}
    assert set(origin) == software | machine | how
    assert set(origin["peers"]) == {"sdpa", "math"} == set(origin["peer_origins"])
    assert origin["peer_origins"]["math"] == {"torch": torch.__version__, "commit": origin["torch_commit"]}
    assert origin["trial"] and origin["rounds"] == {"fewest": 2, "most": 2}


def test_command_is_printed_without_folders() -> None:
    command = ["benchmarks", "options", "--json", "/home/me/a.json", "--plot=/home/me/b.png", "--only", "bias (1, h"]
    printed = provenance.printable_command(command)
    assert printed == "python -m benchmarks options --json a.json --plot=b.png --only 'bias (1, h'"


def test_commit_outside_of_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == flash_ext.build_info()["git_commit"]
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == flash_ext.build_info()["git_commit"]


@pytest.mark.parametrize("benchmark", ["forward", "options", "host"])
def test_plot(benchmark: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(label, table, flash_ext=1.0, fa2=2.0) for table in "abcde" for label in "12"]
    del rows[0].measured["fa2"]
    report.plot(record(*rows, benchmark=benchmark), tmp_path / "run.svg")
    assert (tmp_path / "run.svg").stat().st_size > 0


def test_encoder_compiled(tmp_path: Path) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=True):  # there may be no compiler: then it runs as it is
        assert run("encoder", "--compiled", "--json", str(tmp_path / "run.json")) == 0
    assert [kept_row.problem["compiled"] for kept_row in report.read(tmp_path / "run.json").rows] == [False] * 2 + [
        True
    ] * 2


def test_preset_of_the_cpu(tmp_path: Path) -> None:
    asked = ["--shapes", "1x16x1x16", "--trial", "--json", str(tmp_path / "run.json")]
    main(asked, preset=cpu.PRESET, module="benchmarks.cpu")
    kept = report.read(tmp_path / "run.json")
    assert kept.provenance["command"] == "python -m benchmarks.cpu --shapes 1x16x1x16 --trial --json run.json"
    assert [set(kept_row.measured) for kept_row in kept.rows] == [{OURS, "sdpa"}] * 4


RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_recorded_runs_can_be_read() -> None:
    assert RESULTS
    for path in RESULTS:
        assert report.read(path).rows


def test_recorded_runs_can_be_relied_on() -> None:
    """But for those of the first schema, which did not say."""
    for kept in (report.read(path) for path in RESULTS):
        if kept.schema != report.SCHEMA:
            continue
        origin = kept.provenance
        assert not origin["trial"] and not origin["commit"].endswith("dirty")
        assert origin["rounds"]["fewest"] >= provenance.RECORD_ROUNDS
        for kept_row in kept.rows:
            assert all(s["calls"] >= provenance.RECORD_ROUNDS for s in kept_row.spread.values())


# What is a record


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with a kernel and a page, whose libraries are built."""
    for file in ("csrc/kernel.cpp", "docs/page.md"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("first")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    built_from = git(tmp_path, "rev-parse", "HEAD").strip()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(flash_ext, "build_info", lambda: {"git_commit": built_from})
    return tmp_path


ENOUGH = Effort(most=30, fewest=12, budget_ms=1)


def test_what_is_committed_and_built_is_a_record(checkout: Path) -> None:
    assert provenance.why_no_record(ENOUGH) is None
    (checkout / "docs" / "page.md").write_text("second")
    git(checkout, "commit", "-am", "second")
    assert provenance.why_no_record(ENOUGH) is None


def test_few_rounds_are_no_record(checkout: Path) -> None:
    assert provenance.why_no_record(Effort(most=11, fewest=11, budget_ms=1)) == "11 rounds are fewer than 12"
    assert arguments.EFFORT.fewest >= 12 > arguments.QUICK_EFFORT.fewest


def test_a_changed_checkout_is_no_record(checkout: Path) -> None:
    (checkout / "csrc" / "other.cpp").write_text("untracked")
    assert provenance.why_no_record(ENOUGH) == "no commit holds csrc/other.cpp"
    (checkout / "docs" / "page.md").write_text("changed")
    assert "the sources differ from their commit" in (provenance.why_no_record(ENOUGH) or "")


def test_libraries_of_other_sources_are_no_record(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "csrc" / "kernel.cpp").write_text("second")
    git(checkout, "commit", "-am", "second")
    assert (provenance.why_no_record(ENOUGH) or "").endswith("whose sources are others: build again")
    for built_from, reason in (
        (None, "nobody knows which commit the libraries are from"),
        ("1+dirty", "the libraries"),
    ):
        monkeypatch.setattr(flash_ext, "build_info", lambda built_from=built_from: {"git_commit": built_from})
        assert reason in (provenance.why_no_record(ENOUGH) or "")


def test_what_is_no_record_is_kept_as_a_trial_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "why_no_record", lambda effort: "for some reason")
    asked = ["host", "--device", "cpu", "--calls", "1", "--json", str(tmp_path / "run.json")]
    with pytest.raises(SystemExit):
        main(asked)
    assert "this would be no record: for some reason (--trial keeps it" in capsys.readouterr().err
    assert main([*asked, "--trial"]) == 0
    assert report.read(tmp_path / "run.json").provenance["trial"]


def test_environment_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_EXT_HOPPER", "0")
    monkeypatch.setenv("FLASH_EXT_CACHE", "/home/me/cache")
    found = provenance.environment()
    assert found["FLASH_EXT_HOPPER"] == "0" and found["FLASH_EXT_CACHE"] == "cache"
    assert all(name.startswith("FLASH_EXT_") for name in found)


def test_origin_of_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert origins.package_origin("attention-of-somebody", None) == {}
    info = tmp_path / "attention_of_somebody-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attention-of-somebody\nVersion: 1.2\n")
    (info / "direct_url.json").write_text('{"vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}')
    found = origins.package_origin("attention-of-somebody", report)
    assert found["version"] == "1.2" and found["commit"] == "0123456789ab" and len(found["sha256"]) == 12


def test_state_of_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        gpu_state, "_command", lambda fields: ["sh", "-c", "printf '1980, 3201, 600.5, 50\n1755, 32'; :"]
    )
    with gpu_state.GpuState(torch.device("cuda")) as state:
        assert state._process is not None
        state._process.wait()
    summary = state.summary()
    assert summary["readings"] == 1 and summary["sm_clock_mhz"] == [1980, 1980, 1980] and summary["power_w"][1] == 600.5
    monkeypatch.setattr(gpu_state, "_command", lambda fields: ["there-is-no-such-program"])
    for device in ("cuda", "cpu"):
        with gpu_state.GpuState(torch.device(device)) as state:
            pass
        assert state.summary() == {}


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
    measured = forward_backward.row_of(full, "forward", timings(flash_ext=[2.0]), {})
    assert measured.shown[OURS] == pytest.approx(full.flops("forward") / 2e-3 / 1e12)
    forward_backward.add_ceiling([measured], {"matmul_bfloat16_tflops": 2 * measured.shown[OURS]})
    assert measured.figures["% of matmul"] == pytest.approx(50)


@pytest.mark.parametrize(
    ("kind", "dtype", "share", "marked"),
    [
        ("cpu", "float32", 112, True),
        ("cpu", "float32", 99, False),
        ("cuda", "float32", 180, False),
        ("cuda", "bfloat16", 101, True),
    ],
)
def test_more_than_the_ceiling_is_marked(kind: str, dtype: str, share: float, marked: bool) -> None:
    measured = row(flash_ext=1.0)
    measured.problem["dtype"] = dtype
    measured.figures[report.OF_MATMUL] = share
    kept = record(measured)
    gpu = {"gpu": "g", "driver": "1", "cuda": "1", "cudnn": "1"}
    kept.provenance |= {"device": kind} | gpu
    text = report.markdown(kept)
    assert (f"{share:.0f}* |" in text) == ("* the machine was busy" in text) == marked


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


def test_bytes_of_a_cache() -> None:
    problem = decode.Problem(3, 512, 16, 2, 128, "bfloat16")
    assert problem.kv_bytes == 2 * 3 * 512 * 2 * 128 * 2
    measured = decode.row_of(problem, 16, timings(flash_ext=[0.5]), None, {})
    assert measured.figures["TB/s"] == pytest.approx(problem.kv_bytes / 5e8)
    assert "workload" not in measured.problem
    ragged = dataclasses.replace(problem, workload="ragged")
    assert ragged.lengths == [64, 288, 512] and ragged.kv_bytes == problem.kv_bytes * (64 + 288 + 512) // (3 * 512)


# How it is timed


class FakeClock(CpuClock):
    """Time is what the candidate returns."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def time(self, candidate: Candidate) -> timing.Reading:
        name, ms = candidate.call()
        self.order.append(name)
        return lambda: ms


def test_candidates_take_turns() -> None:
    clock = FakeClock()
    candidates = {name: Candidate(lambda name=name, ms=ms: (name, ms)) for name, ms in (("a", 1.0), ("b", 4.0))}
    found = timing.take_turns(clock, candidates, Effort(most=6, fewest=2, budget_ms=12.0))
    assert found == {"a": Sample((1.0,) * 6), "b": Sample((4.0,) * 3)}
    assert "".join(clock.order) == "ab" + "ab" + "ba" + "ab" + "aaa"


def test_sustained_loops() -> None:
    class LoopClock(CpuClock):
        def __init__(self) -> None:
            self.loops: list[tuple[str, int]] = []

        def time_loop(self, candidate: Candidate, calls: int) -> timing.Reading:
            name, ms = candidate.call()
            self.loops.append((name, calls))
            return lambda: calls * ms

    clock = LoopClock()
    candidates = {name: Candidate(lambda name=name, ms=ms: (name, ms)) for name, ms in (("a", 2.0), ("b", 500.0))}
    found = timing.sustain(clock, candidates, {"a": 1.0, "b": 400.0}, seconds=0.1)
    assert found == {"a": 2.0, "b": 500.0}
    assert clock.loops == [("a", 100), ("b", 1), ("b", 1), ("a", 100)]


def test_sustained_is_shown_beside_bursts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("forward", "--sustained", "0.001", "--json", str(tmp_path / "run.json"))
    assert "flash_ext, sustained | sdpa, sustained" in capsys.readouterr().out
    kept = report.read(tmp_path / "run.json")
    assert kept.provenance["sustained_s"] == 0.001
    assert all(set(kept_row.sustained) == set(kept_row.measured) for kept_row in kept.rows)
    rate = Row("t", "1", {}, {OURS: 2.0}, shown={OURS: 300.0}, sustained={OURS: 3.0})
    assert report.shown_sustained(rate, OURS) == pytest.approx(200)


def test_quartiles() -> None:
    sample = Sample((5.0, 1.0, 2.0, 3.0, 4.0))
    assert sample.median == 3.0 and sample.quartiles == (2.0, 4.0)
    assert Sample((7.0,)).quartiles == (7.0, 7.0)
    assert Sample((6.0, 4.0, 9.0)).over(Sample((2.0, 4.0))) == Sample((3.0, 1.0))


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


def test_spread_of_a_row() -> None:
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0]
    kept = Row.timed(
        timings(flash_ext=drifting, fa2=[1.5 * ms for ms in drifting], cudnn=[1.1, 1.9, 4.4, 8.8, 15.0]),
        table="t", label="1", problem={},
    )  # fmt: skip
    assert kept.measured == {"flash_ext": 4.0, "fa2": 6.0, "cudnn": 4.4}
    assert kept.spread["flash_ext"] == {"lower": 2.0, "upper": 8.0, "calls": 5}
    assert kept.ratio_spread["fa2"] == {"lower": 1.5, "upper": 1.5, "calls": 5}
    assert kept.lower_ratios() == {"fa2": 1.5, "cudnn": pytest.approx(0.95)}
    assert report.none_faster([kept]) == "no peer is faster in 1 of 1 rows, in 0 by the lower quartile too"
    assert report.none_faster([row(flash_ext=1.0, fa2=2.0)]) == "no peer is faster in 1 of 1 rows"


def test_compare_tells_what_moved_from_what_scatters() -> None:
    def one(name: str, scale: float = 1.0, machine: float = 1.0) -> Row:
        ours = [machine * scale * ms for ms in (0.98, 1.0, 1.0, 1.02)]
        return Row.timed(timings(flash_ext=ours, fa2=[machine] * 4), table="t", label=name, problem={})

    before = record(one("same"), one("faster"), one("slower"))
    after = record(one("same", 1.005, 1.1), one("faster", 0.9, 1.1), one("slower", 1.1, 1.1))
    text, smallest = report.compare(before, after)
    assert [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| t ")] == [
        "", "faster", "slower",
    ]  # fmt: skip
    assert "more than their spread: 1 faster, 1 slower" in text and smallest == pytest.approx(1 / 1.21)


def test_other_forms_of_ours_are_no_peers() -> None:
    assert row(flash_ext=2.0, **{"flash_ext paged": 1.0}).ratios() == {}


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    record(row("1", flash_ext=2.0, fa2=4.0), row("2", flash_ext=1.0), row("3", flash_ext=1.0)).write(before)
    record(row("1", flash_ext=1.0, fa2=3.2), row("2", flash_ext=1.25)).write(after)
    assert main(["compare", str(before), str(after)]) == 0
    printed = capsys.readouterr().out
    assert "| t | 1 | 2.00 | 1.00 | 2.00 | 1.25 | 1.60 | - |" in printed
    assert "| t | 2 | 1.00 | 1.25 | 0.80 | - | - | - |" in printed
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


def test_record_of_the_first_schema(tmp_path: Path) -> None:
    content = json.loads(json.dumps(dataclasses.asdict(record(row(flash_ext=1.0)))))
    content["schema"] = "flash_ext.benchmarks/1"
    for name in ("spread", "ratio_spread", "sustained"):
        del content["rows"][0][name]
    (tmp_path / "old.json").write_text(json.dumps(content))
    (kept,) = report.read(tmp_path / "old.json").rows
    assert kept == row(flash_ext=1.0)
    content["rows"][0]["surprise"] = 1
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="row 0 has the fields"):
        report.read(tmp_path / "other.json")


def test_records_of_different_questions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot compare forward with decode"):
        report.compare(record(), record(benchmark="decode"))


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
