"""Two builds of the package in turns: who works when, and what is said of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import builds
from benchmarks.builds import ClockInTurns, Turns
from benchmarks.provenance import ROOT
from benchmarks.report import Record
from benchmarks.timing import Candidate, CpuClock, Effort, take_steady_turns
from tests.build.benchmark_runs import QUICK, record, row

FORWARD = ["forward", *QUICK, "--shapes", "1x33x2x16", "--full"]
Work = Callable[[Turns, Callable[[str], None]], None]  # gets its turns, and says what it does


def in_turns(first: Work, second: Work) -> list[str]:
    """What two threads say, the first one's in upper case."""
    (from_second, to_first), (from_first, to_second) = os.pipe(), os.pipe()
    os.write(to_first, Turns.GOES_ON)
    said: list[str] = []

    def start(work: Work, say: Callable[[str], None], inbox: int, outbox: int) -> None:
        turns = Turns(inbox, outbox)
        try:
            turns.wait()
            work(turns, say)
        finally:
            os.close(inbox)
            os.close(outbox)

    threads = [
        threading.Thread(target=start, args=arguments, daemon=True)
        for arguments in (
            (first, lambda word: said.append(word.upper()), from_second, to_second),
            (second, said.append, from_first, to_first),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), said
    return said


def rows_of(*counts: int) -> Work:
    """Rows with so many timed calls each."""

    def work(turns: Turns, say: Callable[[str], None]) -> None:
        clock = ClockInTurns(CpuClock(), turns)
        for number, count in enumerate(counts):
            turns.begin_row()
            say(f"row{number}")
            for _ in range(count):
                assert clock.time(Candidate(lambda: say("call")))() > 0
        turns.begin_row()

    return work


def test_calls_alternate() -> None:
    """Whoever is the last to come to a row begins it."""
    assert in_turns(rows_of(2, 1), rows_of(2, 1)) == [
        "row0", "call", "ROW0", "CALL", "call", "CALL", "ROW1", "CALL", "row1", "call"
    ]  # fmt: skip


@pytest.mark.parametrize("counts", [((1, 2), (4, 2)), ((4, 2), (1, 2)), ((0, 1), (2, 1)), ((2, 0, 1), (0, 3, 1))])
def test_rows_begin_together(counts: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """However often one of them calls: neither begins a row before the other has ended the one before."""
    said = in_turns(*(rows_of(*of_one) for of_one in counts))
    for number, of_row in enumerate(zip(*counts, strict=True)):
        begins = [said.index(f"row{number}"), said.index(f"ROW{number}")]
        ended = sum(sum(of_one[:number]) for of_one in counts)
        assert sum(word.lower() == "call" for word in said[: min(begins)]) == ended
        assert sum(of_row) == 0 or "call" in (word.lower() for word in said[max(begins) :])


@pytest.mark.parametrize("first_ends", [True, False])
def test_who_has_ended_is_waited_for_no_longer(first_ends: bool) -> None:
    short, long = rows_of(1), rows_of(2, 2)

    def fails(turns: Turns, say: Callable[[str], None]) -> None:
        turns.begin_row()

    for ends in (short, fails):
        said = in_turns(*((ends, long) if first_ends else (long, ends)))
        assert sum(word == ("call" if first_ends else "CALL") for word in said) == 4


def benchmark(rows: int, unsteady: int = -1) -> Work:
    """A piece of work of so many rows. In one of them readings differ widely."""

    def work(turns: Turns, say: Callable[[str], None]) -> None:
        clock = ClockInTurns(CpuClock(), turns)
        turns.begin_row()
        for number in range(rows):
            say(f"check{number}")
            calls = iter(range(100))

            def call(of: Iterator[int] = calls, slow: bool = number == unsteady) -> None:
                say("call")
                time.sleep(0.02 * (next(of) % 3) if slow else 0)

            take_steady_turns(clock, {"ours": Candidate(call)}, Effort(3, 3, 0.0))
        turns.begin_row()

    return work


def test_rows_of_a_benchmark_alternate() -> None:
    """A warm-up stands directly before the first reading of the same process; both time a row at the same time, also
    where one of them finds it unsteady."""
    warm_up_and_estimate = ["call"] * 3
    of_row = [*warm_up_and_estimate, *(word.upper() for word in warm_up_and_estimate), *["call", "CALL"] * 3]
    for unsteady in (-1, 0):
        said = in_turns(benchmark(2, unsteady), benchmark(2))
        calls = [word for word in said if "check" not in word.lower()]
        assert len(calls) == 2 * len(of_row)
        for begin in (0, len(of_row)):
            found = calls[begin : begin + len(of_row)]
            assert found in (of_row, [word.swapcase() for word in of_row])


def test_the_clock_passes_the_rest_on() -> None:
    clock = ClockInTurns(CpuClock(), Turns(-1, -1))
    assert clock.with_more_time() == clock
    candidate = Candidate(lambda: None)
    assert clock.repeatable(candidate) is candidate


def build_of(folder: Path, commit: str) -> Path:
    """The package of this checkout, as if built from another commit."""
    package = folder / "flash_ext"
    package.mkdir(parents=True)
    for file in (ROOT / "flash_ext").iterdir():
        (package / file.name).symlink_to(file)
    info = json.loads((ROOT / "flash_ext" / "_build_info.json").read_text())
    (package / "_build_info.json").unlink()
    (package / "_build_info.json").write_text(json.dumps({**info, "git_commit": commit}))
    return folder


def test_each_process_loads_its_own_build(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before, after = build_of(tmp_path / "old", "0" * 40), build_of(tmp_path / "new", "1" * 40 + "+dirty")
    assert builds.main([str(before), str(after), *FORWARD]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == [f"before is {before}", f"after is {after}"]
    assert lines[2].startswith("before: ") and "commit 000000000000," in lines[2]
    assert lines[3].startswith("after: ") and "commit 111111111111+dirty," in lines[3]
    assert any(line.startswith("geometric mean") and line.endswith("1 rows") for line in lines)


def test_the_wrong_package_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"after: expected the package of {tmp_path}, found {ROOT}/flash_ext"):
        builds.run_in_turn("after", tmp_path, Turns(-1, -1), tmp_path / "run.json", FORWARD)


def test_at_least(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_both(*_: object) -> list[Path]:
        files = [tmp_path / name for name in ("before.json", "after.json")]
        for file, ms in zip(files, (1.0, 1.1), strict=True):
            kept: Record = record(row(flash_ext=ms))
            kept.write(file)
        return files

    monkeypatch.setattr(builds, "run_both", run_both)
    asked = [build_of(tmp_path / "a", "0" * 40), "--at-least"]
    assert builds.main([*map(str, (asked[0], *asked)), "0.9", *FORWARD]) == 0
    assert builds.main([*map(str, (asked[0], *asked)), "0.95", *FORWARD]) == 1


def test_a_build_that_fails_ends_the_comparison(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = build_of(tmp_path / "broken", "0" * 40)
    (broken / "flash_ext" / "__init__.py").unlink()
    (broken / "flash_ext" / "__init__.py").write_text("raise ImportError('built for another torch')")
    began = time.monotonic()
    assert builds.main([str(broken), str(build_of(tmp_path / "whole", "1" * 40)), *FORWARD]) == builds.FAILED
    said = capfd.readouterr()
    assert "built for another torch" in said.err and f"before, {broken}, ended with 1" in said.err
    assert "geometric mean" not in said.out and time.monotonic() - began < 60


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "SECONDS_TO_END", 0.2)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    stubborn = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert stubborn.stdout is not None
    with stubborn.stdout as said:
        said.readline()
        builds.stop([stubborn])
    assert stubborn.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/", "/", "forward"], "must be a checkout of flash-ext, built in place, got /"),
        (["BUILD", "BUILD", "sideways"], "invalid choice: 'sideways'"),
        (["BUILD", "BUILD", "host"], "invalid choice: 'host'"),
        (["BUILD", "BUILD", *FORWARD, "--json", "run.json"], "a comparison of two builds is printed, not kept"),
    ],
)
def test_what_makes_no_sense(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = str(build_of(tmp_path, "0" * 40))
    with pytest.raises(SystemExit):
        builds.main([build if word == "BUILD" else word for word in arguments])
    assert said in capsys.readouterr().err
