"""Who takes part in a row: what is not supported stays out and says why, what is wrong stops the run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.checks import Checker, Result, WrongOutput
from benchmarks.peers import Peer
from benchmarks.report import Row
from benchmarks.timing import Candidate, Clock, Effort, Timings, sustain, take_steady_turns

Work = Callable[[], list[Row]]


@dataclass(frozen=True)
class Setting:
    """What all rows of a run share."""

    device: torch.device
    clock: Clock
    effort: Effort
    peers: Mapping[str, Peer]
    ceilings: Mapping[str, float]  # as measured before the first row; ceilings.measure_ceilings
    sustained_s: float | None = None  # of the loops that are measured beside the bursts, if they are


@dataclass
class Comparison:
    """The candidates of one row or more, by name, and why others are missing."""

    candidates: dict[str, Candidate] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        candidate: Candidate,
        expected: Checker,
        result: Callable[[], Result] | None = None,
        repeated_by: Clock | None = None,
        required: bool = False,
    ) -> None:
        """Checks what the candidate returns; one that is wrong, or that cannot, is left out unless it is required.

        Args:
            result: runs the candidate's work once; None: the candidate itself returns "out".
            repeated_by: time not the call but its ``Clock.repeatable`` form, whose output is checked as well.

        Raises:
            WrongOutput: what is required is wrong.
            Exception: what is required cannot, and this is what it raises.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SDPA's, about every backend that it does not use
                expected.check(name, {"out": candidate()} if result is None else result())
                if repeated_by is not None:
                    candidate = repeated_by.repeatable(candidate)
                    for _ in range(2):  # what the first call leaves behind must not spoil the second
                        out = candidate()
                        expected.check(name, {"out": out})
                        out.fill_(torch.nan)
        except Exception as error:  # whatever a peer raises, it is the peer that is left out
            if required:
                raise
            if isinstance(error, WrongOutput):
                print(f"warning: {error}; it is left out", file=sys.stderr)
            self.missing[name] = first_line(error)
            return
        self.candidates[name] = candidate

    def leave_out(self, name: str, reason: str) -> None:
        self.missing[name] = reason

    def measure(self, setting: Setting) -> Timings:
        """Milliseconds of each."""
        bursts = take_steady_turns(setting.clock, self.candidates, setting.effort)
        if setting.sustained_s is None:
            return Timings(bursts)
        call_ms = Timings(bursts).medians()
        return Timings(bursts, sustain(setting.clock, self.candidates, call_ms, setting.sustained_s))


def first_line(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
