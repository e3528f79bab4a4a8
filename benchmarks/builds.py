"""Two builds of flash-ext on one machine, in turns: what a change did to the speed of a benchmark's rows.

python -m benchmarks.builds BEFORE AFTER backward --head-dim 128 --causal

BEFORE and AFTER are checkouts, each with its libraries built in place. Each build runs the benchmark in a process of
its own, since one process holds one library of a name. The processes hand the machine to each other before every timed
call. So a clock that drifts drifts for both, which two records do not have. Both run the benchmarks of this checkout,
by default without peers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import flash_ext
from benchmarks import report
from benchmarks.__main__ import BENCHMARKS, make_parser, run
from benchmarks.arguments import settle
from benchmarks.origins import COMMIT_DIGITS
from benchmarks.provenance import ROOT
from benchmarks.timing import Candidate, Clock, Reading

MODULE = "benchmarks.builds"
IN_TURN = "in-turn"  # the first argument of a process that the command starts


class Turns:
    """Whose turn it is, of two processes. A byte through a pipe hands the turn over. A closed pipe says that the other
    process has ended: then the turn stays here."""

    def __init__(self, inbox: int, outbox: int) -> None:
        self._inbox, self._outbox, self._alone = inbox, outbox, False

    def wait(self) -> None:
        self._alone = self._alone or os.read(self._inbox, 1) == b""

    def give(self) -> None:
        try:
            os.write(self._outbox, b".")
        except BrokenPipeError:
            self._alone = True

    def hand_over(self) -> None:
        """Lets the other process go on, until it hands the turn back."""
        if not self._alone:
            self.give()
            self.wait()


@dataclass(frozen=True)
class ClockInTurns:
    """A clock that hands the machine over before each call that it times, and has none under way when it does."""

    clock: Clock
    turns: Turns

    def time(self, candidate: Candidate) -> Reading:
        self.turns.hand_over()
        return self._finished(self.clock.time(candidate))

    def time_loop(self, candidate: Candidate, calls: int) -> Reading:
        self.turns.hand_over()
        return self._finished(self.clock.time_loop(candidate, calls))

    def _finished(self, reading: Reading) -> Reading:
        self.clock.wait()
        elapsed = reading()
        return lambda: elapsed

    def wait(self) -> None:
        self.clock.wait()

    def repeatable(self, candidate: Candidate) -> Candidate:
        return self.clock.repeatable(candidate)

    def with_more_time(self) -> ClockInTurns:
        return ClockInTurns(self.clock.with_more_time(), self.turns)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == [IN_TURN]:
        inbox, outbox, file = arguments[1:4]
        return run_in_turn(inbox, outbox, file, arguments[4:])
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=build)
    parser.add_argument("after", type=build)
    parser.add_argument("--at-least", type=float, metavar="RATIO", help="exit with 1 if a row is below, e.g. 0.97")
    parser.add_argument("benchmark", choices=tuple(BENCHMARKS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    chosen = parser.parse_args(arguments)
    asked = [chosen.benchmark, *chosen.arguments]
    check(parser, asked)
    with tempfile.TemporaryDirectory() as folder:
        files = run_both([chosen.before, chosen.after], asked, Path(folder))
        if files is None:
            return 1
        text, smallest = report.compare(*(report.read(file) for file in files))
    print(text)
    return int(chosen.at_least is not None and (smallest is None or smallest < chosen.at_least))


def build(argument: str) -> Path:
    """A folder with a package."""
    path = Path(argument).resolve()
    if not (path / "flash_ext" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"must be a checkout of flash-ext, built in place, got {argument}")
    return path


def check(parser: argparse.ArgumentParser, asked: Sequence[str]) -> None:
    """Ends with an error for what the processes could not do."""
    chosen = make_parser().parse_args(asked)
    for option in ("json", "plot"):
        if getattr(chosen, option) is not None:
            parser.error(f"argument --{option}: two builds are compared, and keep no record")


def run_both(builds: Sequence[Path], asked: Sequence[str], folder: Path) -> list[Path] | None:
    """The files that the two processes write; None: one of them has failed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Threads that are idle on a CPU sleep, or they would spin into the other process' turn.
    environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    (from_second, to_first), (from_first, to_second) = os.pipe(), os.pipe()
    ends = [(from_second, to_second), (from_first, to_first)]
    os.write(to_first, b".")
    files, processes = [], []
    for number, (path, (inbox, outbox)) in enumerate(zip(builds, ends, strict=True)):
        place = folder / str(number)
        place.mkdir()
        (place / "flash_ext").symlink_to(path / "flash_ext")  # python -m imports what lies in its folder first
        files.append(folder / f"{number}.json")
        command = [sys.executable, "-m", MODULE, IN_TURN, str(inbox), str(outbox), str(files[-1]), *asked]
        processes.append(subprocess.Popen(command, cwd=place, env=environment, pass_fds=(inbox, outbox)))
    for end in (from_second, to_first, from_first, to_second):
        os.close(end)  # or nobody would notice that a process has ended
    codes = [process.wait() for process in processes]
    return files if codes == [0, 0] else None


def run_in_turn(inbox: str, outbox: str, file: str, asked: Sequence[str]) -> int:
    """One of the two processes."""
    parser = make_parser()
    chosen = parser.parse_args(asked)
    if "peers" in chosen and chosen.peers is None:
        chosen.peers = []
    turns = Turns(int(inbox), int(outbox))
    turns.wait()
    settle(parser, chosen, BENCHMARKS[chosen.benchmark].also_peers)
    record = run(chosen, [MODULE, *asked], lambda clock: ClockInTurns(clock, turns))
    built_from = flash_ext.build_info()["git_commit"]
    record.provenance |= {"trial": True, "commit": None if built_from is None else str(built_from)[:COMMIT_DIGITS]}
    record.write(Path(file))
    turns.give()
    return 0


if __name__ == "__main__":
    sys.exit(main())
