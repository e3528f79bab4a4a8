"""Two builds of the package in turns: who works when, and what is said of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from benchmarks import builds
from benchmarks.builds import ClockInTurns, Turns
from benchmarks.provenance import ROOT
from benchmarks.timing import Candidate, CpuClock
from tests.build.benchmark_runs import QUICK

FORWARD = ["forward", *QUICK, "--shapes", "1x33x2x16", "--full"]


def in_turns(calls: tuple[int, int]) -> str:
    """Two threads time so many calls each; each call leaves the letter of its thread."""
    (from_b, to_a), (from_a, to_b) = os.pipe(), os.pipe()
    os.write(to_a, b".")
    done: list[str] = []

    def work(name: str, count: int, inbox: int, outbox: int) -> None:
        turns = Turns(inbox, outbox)
        clock = ClockInTurns(CpuClock(), turns)
        turns.wait()
        done.append(name.upper())
        for _ in range(count):
            assert clock.time(Candidate(lambda: done.append(name)))() > 0
        turns.give()
        os.close(inbox), os.close(outbox)

    threads = [
        threading.Thread(target=work, args=("a", calls[0], from_b, to_b)),
        threading.Thread(target=work, args=("b", calls[1], from_a, to_a)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return "".join(done)


@pytest.mark.parametrize(
    ("calls", "order"), [((3, 3), "ABababab"), ((1, 3), "ABabbb"), ((4, 1), "ABabaaa"), ((0, 2), "ABbb")]
)
def test_calls_alternate(calls: tuple[int, int], order: str) -> None:
    """One that has ended is waited for no longer."""
    assert in_turns(calls) == order


def test_the_clock_passes_the_rest_on() -> None:
    clock = ClockInTurns(CpuClock(), Turns(-1, -1))
    assert clock.with_more_time() == clock
    candidate = Candidate(lambda: None)
    assert clock.repeatable(candidate) is candidate


def test_a_build_beside_itself(capfd: pytest.CaptureFixture[str]) -> None:
    assert builds.main([str(ROOT), str(ROOT), *FORWARD]) == 0
    assert "geometric mean" in capfd.readouterr().out
    assert builds.main(["--at-least", "1000", str(ROOT), str(ROOT), *FORWARD]) == 1


def test_a_build_that_fails_ends_the_comparison(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flash_ext").mkdir()
    (tmp_path / "flash_ext" / "__init__.py").write_text("raise ImportError('built for another torch')")
    assert builds.main([str(tmp_path), str(ROOT), *FORWARD]) == 1
    assert "built for another torch" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/", "/", "forward"], "must be a checkout of flash-ext, built in place, got /"),
        ([str(ROOT), str(ROOT), "sideways"], "invalid choice: 'sideways'"),
        ([str(ROOT), str(ROOT), *FORWARD, "--json", "run.json"], "two builds are compared, and keep no record"),
    ],
)
def test_what_makes_no_sense(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        builds.main(arguments)
    assert said in capsys.readouterr().err
