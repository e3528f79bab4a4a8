"""How long calls take. Candidates take turns, so that a clock that drifts drifts for all of them alike.

On a GPU a call is timed by events on the stream, after a buffer larger than the L2 cache was written (what
triton.testing.do_bench does): the call finds its inputs in memory, as it would in a model, and the host runs ahead of
the GPU. On a CPU it is timed by the wall clock. The figure is the median; quartiles tell how far readings spread.

These are bursts: between them the GPU writes a buffer, and cools. ``sustain`` measures what is left of their speed when
a call is repeated without pause, until power and temperature limit the clock.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tqdm import tqdm

WARM_UP_CALLS = 2
FLUSH_BYTES = 512 * 2**20  # at least; writing them also takes longer than the host takes to launch a call
SECONDS_BETWEEN_LINES = 10  # of progress
MOST_SPREAD = 0.25  # of a median that its quartiles may be apart: beyond it, who was busy decides the figure
MOST_REPEATS = 3  # of a row that was not steady
ROUNDS_IN_FLIGHT = 16  # the launch queue of a stream holds about a thousand entries

Reading = Callable[[], float]  # milliseconds, once the clock has waited


@dataclass(frozen=True)
class Candidate:
    """A call that is timed; ``around`` is entered before the clock starts and left after it stopped. On a GPU it is
    entered before the flush: what entering takes of the host's time must not delay the call."""

    call: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self) -> Any:
        with self.around():
            return self.call()


@dataclass(frozen=True)
class Effort:
    """Timed calls of each candidate: ``most``, or as many as fit in ``budget_ms``, but ``fewest`` in any case."""

    most: int
    fewest: int
    budget_ms: float

    def rounds(self, call_ms: float) -> int:
        return max(self.fewest, min(self.most, int(self.budget_ms / max(call_ms, 1e-6))))


@dataclass(frozen=True)
class Sample:
    """What a candidate needed in each round, in the order of the rounds; in any unit."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper one: half of the readings lie between them."""
        if len(self.values) < 2:
            return self.median, self.median
        lower, _, upper = statistics.quantiles(self.values, n=4, method="inclusive")
        return lower, upper

    @property
    def is_steady(self) -> bool:
        lower, upper = self.quartiles
        return upper - lower <= MOST_SPREAD * self.median

    def scaled(self, factor: float) -> Sample:
        return Sample(tuple(factor * value for value in self.values))

    def over(self, other: Sample) -> Sample:
        """Ratios round by round, of the rounds that both took part in: a clock that drifts is in both readings."""
        return Sample(tuple(mine / theirs for mine, theirs in zip(self.values, other.values, strict=False)))


@dataclass(frozen=True)
class Timings:
    """What was measured of the candidates, by name."""

    bursts: Mapping[str, Sample]
    sustained: Mapping[str, float] = field(default_factory=dict)  # of a call, repeated without pause; often not asked

    def medians(self) -> dict[str, float]:
        return {name: sample.median for name, sample in self.bursts.items()}

    def scaled(self, factor: float) -> Timings:
        bursts = {name: sample.scaled(factor) for name, sample in self.bursts.items()}
        return Timings(bursts, {name: factor * value for name, value in self.sustained.items()})

    def without(self, name: str) -> Timings:
        bursts = {kept: sample for kept, sample in self.bursts.items() if kept != name}
        return Timings(bursts, {kept: value for kept, value in self.sustained.items() if kept != name})


class Clock(Protocol):
    def time(self, candidate: Candidate) -> Reading:
        """Runs the candidate, or puts it on the stream."""

    def time_loop(self, candidate: Candidate, calls: int) -> Reading:
        """Runs the candidate ``calls`` times without pause, or puts that on the stream; milliseconds of them all."""

    def wait(self) -> None:
        """Until all readings can be read."""

    def repeatable(self, candidate: Candidate) -> Candidate:
        """The same work with as little of the host in it as there can be."""

    def with_more_time(self) -> Clock:
        """A clock that leaves a GPU's host twice as long before each call; on a CPU the same clock."""

    def begin(self) -> None:
        """Called before candidates take turns."""

    @property
    def most_repeats(self) -> int:
        """Of a row that was not steady."""


class CpuClock:
    most_repeats = MOST_REPEATS

    def begin(self) -> None:
        pass

    def time(self, candidate: Candidate) -> Reading:
        return self.time_loop(candidate, 1)

    def time_loop(self, candidate: Candidate, calls: int) -> Reading:
        with candidate.around():
            start = time.perf_counter()
            for _ in range(calls):
                candidate.call()
            elapsed = 1e3 * (time.perf_counter() - start)
        return lambda: elapsed

    def wait(self) -> None:
        pass

    def repeatable(self, candidate: Candidate) -> Candidate:
        return candidate

    def with_more_time(self) -> CpuClock:
        return self


@dataclass(frozen=True)
class Replay:
    """A captured call. Its graph knows no more than addresses: tensors that only the call holds live as long as it."""

    graph: torch.cuda.CUDAGraph
    captured: Candidate
    out: Any

    def __call__(self) -> Any:
        self.graph.replay()
        return self.out


class CudaClock:
    most_repeats = MOST_REPEATS

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self._flush = torch.empty(max(2 * l2_bytes, FLUSH_BYTES), dtype=torch.int8, device="cuda")
        self._flushes = 1  # writes of the buffer: more of them leave a slow host more time to launch a call

    def begin(self) -> None:
        pass

    def time(self, candidate: Candidate) -> Reading:
        with candidate.around():
            for _ in range(self._flushes):
                self._flush.zero_()
            return self.time_loop(Candidate(candidate.call), 1)

    def time_loop(self, candidate: Candidate, calls: int) -> Reading:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with candidate.around():
            start.record()
            for _ in range(calls):
                candidate.call()
            end.record()
        return lambda: start.elapsed_time(end)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def repeatable(self, candidate: Candidate) -> Candidate:
        """A CUDA graph of the call, to be replayed."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                candidate()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = candidate()
        return Candidate(Replay(graph, candidate, out))

    def with_more_time(self) -> CudaClock:
        clock = copy(self)
        clock._flushes = 2 * self._flushes
        return clock


def make_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()


def take_steady_turns(clock: Clock, candidates: Mapping[str, Candidate], effort: Effort) -> dict[str, Sample]:
    """``take_turns``, all of them again while somebody's quartiles are too far apart, but not for ever.

    Whether a run is kept is judged by how steady it was, never by who was faster. Each time the host has twice as long
    to get ahead of a GPU: on a slow one, short calls are not steady for want of it.
    """
    samples = take_turns(clock, candidates, effort)
    for _ in range(clock.most_repeats):
        if all(sample.is_steady for sample in samples.values()):
            break
        clock = clock.with_more_time()
        samples = take_turns(clock, candidates, effort)
    return samples


def take_turns(clock: Clock, candidates: Mapping[str, Candidate], effort: Effort) -> dict[str, Sample]:
    """Milliseconds of each. Every other round goes backwards, so that nobody always follows the same one."""
    clock.begin()
    for candidate in candidates.values():
        for _ in range(WARM_UP_CALLS):
            candidate()
    clock.wait()
    estimates = {name: clock.time(candidate) for name, candidate in candidates.items()}
    clock.wait()
    rounds = {name: effort.rounds(reading()) for name, reading in estimates.items()}
    readings: dict[str, list[Reading]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(max(rounds.values(), default=0)):
        for name in names if turn % 2 == 0 else reversed(names):
            if turn < rounds[name]:
                readings[name].append(clock.time(candidates[name]))
        if turn % ROUNDS_IN_FLIGHT == ROUNDS_IN_FLIGHT - 1:
            clock.wait()
    clock.wait()
    return {name: Sample(tuple(reading() for reading in taken)) for name, taken in readings.items()}


def sustain(
    clock: Clock, candidates: Mapping[str, Candidate], call_ms: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Mean milliseconds of a call in a loop of ``seconds``, each candidate's alone, there and back through the list.

    ``call_ms``: about how long a call takes, by name.
    """
    calls = {name: max(1, math.ceil(1e3 * seconds / call_ms[name])) for name in candidates}
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for name in (*candidates, *reversed(list(candidates))):
        reading = clock.time_loop(candidates[name], calls[name])
        clock.wait()
        found[name].append(reading() / calls[name])
    return {name: statistics.fmean(means) for name, means in found.items()}


def host_microseconds(device: torch.device, candidate: Candidate, calls: int) -> float:
    """Mean wall-clock time of the host for one of ``calls`` calls in a row, GPU work left unfinished."""
    with candidate.around():
        finish(device)
        start = time.perf_counter()
        for _ in range(calls):
            candidate.call()
        elapsed = time.perf_counter() - start
        finish(device)
    return 1e6 * elapsed / calls


def finish(device: torch.device) -> None:
    """Waits for what is on the device's streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Progress:
    """How many rows are done, on stderr: a bar in a terminal, elsewhere a line now and then."""

    def __init__(self, title: str) -> None:
        self._bar = tqdm(total=0, desc=title, unit="row", dynamic_ncols=True, disable=None)
        self._title, self._total, self._done = title, 0, 0
        self._start = self._said = time.monotonic()

    def expect(self, total: int) -> None:
        self._total = self._bar.total = total
        self._bar.set_postfix_str("")

    def say(self, what: str) -> None:
        """What is going on before the first row and behind the last one."""
        if self._bar.disable:
            print(f"{self._title}: {what}", file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(what)

    def update(self) -> None:
        self._done += 1
        self._bar.set_postfix_str("", refresh=False)
        self._bar.update()
        now = time.monotonic()
        if self._bar.disable and (now - self._said >= SECONDS_BETWEEN_LINES or self._done == self._total):
            self._said = now
            self.say(f"{self._done} of {self._total} rows, {now - self._start:.0f} s")

    def close(self) -> None:
        self._bar.close()
