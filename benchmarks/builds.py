"""Two builds of flash-ext on one machine, in turns: what a change did to the speed of a benchmark's rows.

python -m benchmarks.builds BEFORE AFTER backward --head-dim 128 --causal
python -m benchmarks.builds BEFORE AFTER --at-least 0.97 forward

BEFORE and AFTER are checkouts, each with its libraries built in place. Each build runs the benchmark in a process of
its own, since one process holds one library of a name. The processes hand the machine to each other after every timed
call, and begin to time each row together. So a clock that drifts drifts for both, which two records do not have. Both
run the benchmarks of this checkout, without peers unless --peers names some; module, encoder and models bring their
own. The host does not run ahead of a GPU as far as it does for a record: compare these figures with each other only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import flash_ext
from benchmarks import report
from benchmarks.__main__ import BENCHMARKS, Pace, make_parser, run
from benchmarks.arguments import settle
from benchmarks.origins import COMMIT_DIGITS
from benchmarks.provenance import RECORD_ROUNDS, ROOT
from benchmarks.timing import Candidate, Clock, Effort, Reading

MODULE = "benchmarks.builds"
IN_TURN = "in-turn"  # the first argument of a process that the command starts
# In the others nobody would hand over: their rows are not timed by a clock.
TIMED = tuple(name for name in BENCHMARKS if name not in ("host", "masks", "memory"))
DIRTY = "+dirty"  # behind the commit of a build with changes
QUICK_ROUNDS = 3
SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_TO_END = 10
FAILED = 2  # exit code


class Turns:
    """Whose turn it is, of two processes. A byte through a pipe hands the turn over and says whether its sender goes on
    (GOES_ON) or waits until the other one begins the next row, too (AT_ROW). A closed pipe says that the other process
    has ended: then the turn stays here."""

    GOES_ON, AT_ROW = b".", b"|"

    def __init__(self, inbox: int, outbox: int) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._alone = self._other_is_at_row = False

    def wait(self) -> None:
        """Until it is this process' turn."""
        received = os.read(self._inbox, 1)
        self._alone, self._other_is_at_row = received == b"", received == self.AT_ROW

    def hand_over(self) -> None:
        """Lets the other process go on, until it hands the turn back, unless it waits for this one's next row."""
        if not self._other_is_at_row:
            self._give(self.GOES_ON)

    def begin_row(self) -> None:
        """Waits until both processes are here."""
        if self._other_is_at_row:
            self._other_is_at_row = False  # it goes on when it gets the turn
        else:
            self._give(self.AT_ROW)

    def _give(self, message: bytes) -> None:
        if self._alone:
            return
        try:
            os.write(self._outbox, message)
        except BrokenPipeError:
            self._alone = True
        else:
            self.wait()


@dataclass(frozen=True)
class ClockInTurns:
    """A clock that hands the machine over behind each call that it times, when nothing is under way."""

    clock: Clock
    turns: Turns
    most_repeats = 0  # by one of them, alone

    def begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the other process may need what this one only keeps
        self.turns.begin_row()

    def time(self, candidate: Candidate) -> Reading:
        return self._finished(self.clock.time(candidate))

    def time_loop(self, candidate: Candidate, calls: int) -> Reading:
        return self._finished(self.clock.time_loop(candidate, calls))

    def _finished(self, reading: Reading) -> Reading:
        self.clock.wait()
        elapsed = reading()
        self.turns.hand_over()
        return lambda: elapsed

    def wait(self) -> None:
        self.clock.wait()

    def repeatable(self, candidate: Candidate) -> Candidate:
        return self.clock.repeatable(candidate)

    def with_more_time(self) -> ClockInTurns:
        return ClockInTurns(self.clock.with_more_time(), self.turns)


@dataclass(frozen=True, kw_only=True)
class PaceInTurns(Pace):
    """As many rounds for both builds, in turns."""

    turns: Turns

    def clock_of(self, clock: Clock) -> Clock:
        # A host that has just got its turn is not ahead of the GPU: it needs longer to launch a call.
        return ClockInTurns(clock.with_more_time().with_more_time(), self.turns)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == [IN_TURN]:
        title, folder, inbox, outbox, file = arguments[1:6]
        return run_in_turn(title, Path(folder), Turns(int(inbox), int(outbox)), Path(file), arguments[6:])
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=checkout)
    parser.add_argument("after", type=checkout)
    parser.add_argument("--at-least", type=float, metavar="RATIO", help="exit with 1 if a row is below, e.g. 0.97")
    parser.add_argument("benchmark", choices=TIMED)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    chosen = parser.parse_args(arguments)
    asked = [chosen.benchmark, *chosen.arguments]
    refuse_files(parser, asked)
    builds = {"before": chosen.before, "after": chosen.after}
    with tempfile.TemporaryDirectory() as folder:
        files = run_both(builds, asked, Path(folder))
        if files is None:
            return FAILED
        text, smallest = report.compare(*(report.read(file) for file in files))
    print("\n".join(f"{title} is {path}" for title, path in builds.items()), text, sep="\n")
    return int(chosen.at_least is not None and (smallest is None or smallest < chosen.at_least))


def checkout(argument: str) -> Path:
    """A folder with a package that has been built."""
    path = Path(argument).resolve()
    if not all((path / "flash_ext" / name).is_file() for name in ("__init__.py", "_build_info.json")):
        raise argparse.ArgumentTypeError(f"must be a checkout of flash-ext, built in place, got {argument}")
    return path


def refuse_files(parser: argparse.ArgumentParser, asked: Sequence[str]) -> None:
    chosen = make_parser().parse_args(asked)
    for option in ("json", "plot"):
        if getattr(chosen, option) is not None:
            parser.error(f"argument --{option}: a comparison of two builds is printed, not kept or drawn")


def run_both(builds: dict[str, Path], asked: Sequence[str], folder: Path) -> list[Path] | None:
    """The files that the two processes write; None: one of them has failed, and the other one was stopped."""
    files = [folder / f"{title}.json" for title in builds]
    with started(builds, asked, folder, files) as processes:
        while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
            time.sleep(SECONDS_BETWEEN_LOOKS)
        failed = [(title, p.poll()) for title, p in zip(builds, processes, strict=True) if p.poll()]
    for title, code in failed:
        print(f"{title}, {builds[title]}, ended with {code}", file=sys.stderr)
    return None if failed else files


@contextmanager
def started(
    builds: dict[str, Path], asked: Sequence[str], folder: Path, files: Sequence[Path]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process for each build. The first one has the first turn. On leaving, none of them goes on."""
    (from_second, to_first), (from_first, to_second) = os.pipe(), os.pipe()
    ends = [(from_second, to_second), (from_first, to_first)]
    os.write(to_first, Turns.GOES_ON)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for (title, path), (inbox, outbox), file in zip(builds.items(), ends, files, strict=True):
            place = folder / title
            place.mkdir()
            (place / "flash_ext").symlink_to(path / "flash_ext")
            command = [sys.executable, "-m", MODULE, IN_TURN, title, path, inbox, outbox, file, *asked]
            processes.append(
                subprocess.Popen(
                    [str(word) for word in command], cwd=place, env=environment_of(place), pass_fds=(inbox, outbox)
                )
            )
        for end in (from_second, to_first, from_first, to_second):
            os.close(end)  # or nobody would notice that a process has ended
        yield processes
    finally:
        stop(processes)


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()  # it waits for a kernel that hangs, say
            process.wait()


def environment_of(place: Path) -> dict[str, str]:
    """The package lies in ``place``, all else in this checkout."""
    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [place, ROOT, *(Path(path).resolve() for path in before)]
    # Threads that are idle on a CPU sleep, or they would spin into the other process' turn.
    return {"OMP_WAIT_POLICY": "passive"} | os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def run_in_turn(title: str, folder: Path, turns: Turns, file: Path, asked: Sequence[str]) -> int:
    """One of the two processes."""
    found = Path(flash_ext.__file__).parent.resolve()
    if found != (folder / "flash_ext").resolve():
        raise RuntimeError(f"{title}: expected the package of {folder}, found {found}")
    parser = make_parser()
    chosen = parser.parse_args(asked)
    turns.wait()
    turns.begin_row()  # the other process has imported everything, too
    if "peers" in chosen and chosen.peers is None:
        chosen.peers = []
    settle(parser, chosen)
    rounds = chosen.rounds or (QUICK_ROUNDS if chosen.quick else RECORD_ROUNDS)
    record = run(
        chosen, [MODULE, *asked], PaceInTurns(title=f"{title}: ", effort=Effort(rounds, rounds, 0.0), turns=turns)
    )
    record.provenance |= {"trial": True, "commit": commit_of_build()}
    record.write(file)
    turns.begin_row()  # the other process has timed its last call
    return 0


def commit_of_build() -> str | None:
    built_from = flash_ext.build_info()["git_commit"]
    if built_from is None:
        return None
    return str(built_from)[:COMMIT_DIGITS] + (DIRTY if str(built_from).endswith(DIRTY) else "")


if __name__ == "__main__":
    if sys.argv[1:2] != [IN_TURN]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of finally
    sys.exit(main())
