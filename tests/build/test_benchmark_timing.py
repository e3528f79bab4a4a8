"""How benchmarks time, count and tabulate: rounds, quartiles, FLOPs, bytes, counters of kernels."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from benchmarks import (
    counters,
    decode,
    forward_backward,
    report,
    timing,
)
from benchmarks.forward_backward import Problem
from benchmarks.peers import OURS
from benchmarks.report import Row
from benchmarks.timing import Candidate, CpuClock, CudaClock, Effort, Sample
from tests.build.benchmark_runs import record, row, timings

pytestmark = pytest.mark.usefixtures("small_ceilings")


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
        self.asked_for_time = 0

    def with_more_time(self) -> FakeClock:
        self.asked_for_time += 1
        return self

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


@pytest.mark.parametrize("hiccups", [0, 1, 9])
def test_a_row_that_is_not_steady_is_measured_again(hiccups: int) -> None:
    clock, effort = FakeClock(), Effort(most=4, fewest=4, budget_ms=12.0)
    calls = timing.WARM_UP_CALLS + 1 + effort.most  # of a candidate in one measurement
    disturbed = [("b", 1.0), ("b", 5.0)] * (calls // 2) + [("b", 1.0)] * (calls % 2)
    of_b = iter(disturbed * min(hiccups, 1 + timing.MOST_REPEATS) + [("b", 1.0)] * calls)
    found = timing.take_steady_turns(
        clock, {"a": Candidate(lambda: ("a", 1.0)), "b": Candidate(lambda: next(of_b))}, effort
    )
    measurements = 1 + min(hiccups, timing.MOST_REPEATS)
    assert len(clock.order) == 2 * (1 + effort.most) * measurements
    assert clock.asked_for_time == measurements - 1
    assert found["a"].is_steady and found["b"].is_steady == (hiccups <= timing.MOST_REPEATS)


def test_more_time_is_more_flushes() -> None:
    clock = object.__new__(timing.CudaClock)  # without a GPU
    clock._flush, clock._flushes = torch.empty(1), 3
    patient = clock.with_more_time()
    assert (patient._flushes, clock._flushes) == (6, 3) and patient._flush is clock._flush
    cpu = CpuClock()
    assert cpu.with_more_time() is cpu


def test_what_is_around_a_call_comes_before_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes of the host's time, a GPU would otherwise wait for: the flush lets the host run ahead."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

    class Flush:
        def zero_(self) -> None:
            order.append("flush")

    @contextmanager
    def around() -> Iterator[None]:
        order.append("enter")
        yield
        order.append("leave")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = object.__new__(timing.CudaClock)  # without a GPU
    clock._flushes, clock._flush = 2, cast(torch.Tensor, Flush())
    clock.time(Candidate(lambda: order.append("call"), around))
    assert order == ["enter", "flush", "flush", "event", "call", "event", "leave"]


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


def test_a_graph_keeps_what_its_call_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads addresses: memory that is given back becomes another tensor's, and the graph reads that one's values."""
    stream, graph = SimpleNamespace(wait_stream=lambda other: None), SimpleNamespace(replay=lambda: None)
    for name, fake in {"Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": lambda: graph}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda of: nullcontext())
    metadata = torch.arange(3)
    held = weakref.ref(metadata)
    replay = CudaClock.repeatable(CudaClock.__new__(CudaClock), Candidate(lambda metadata=metadata: metadata + 1))
    del metadata
    gc.collect()
    assert held() is not None
    assert replay().tolist() == [1, 2, 3]


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


def test_other_forms_of_ours_are_no_peers() -> None:
    assert row(flash_ext=2.0, **{"flash_ext paged": 1.0}).ratios() == {}


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
