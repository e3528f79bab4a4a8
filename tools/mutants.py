"""Plants bugs one at a time and sees that the tests catch them.

    python tools/mutants.py                 # all bugs of Python, plan, api and CPU kernels
    python tools/mutants.py --quick         # eleven that take seconds each
    python tools/mutants.py --cuda          # those of the CUDA kernels, on a machine with a GPU
    python tools/mutants.py --cuda --build  # whether they compile, on any machine with nvcc
    python tools/mutants.py --only softcap  # whose file or text matches a regular expression
    python tools/mutants.py --list          # whether each can still be planted; nothing is run

Each bug is planted in a copy of the tree, never in the checkout. What depends on it is compiled anew, without
optimisation that takes long, and linked with the checkout's other objects: build in the tree first. Then the tests
that are expected to catch it run. At the end the tests that caught one run without any bug: they have to pass.

The list amx.txt is of the CPU's matrix units and is left out on a machine without them.

A CUDA bug is planted in the few objects that its tests reach; the others are as they were. With --jobs 16 on 16 cores
and one GPU the list takes two minutes.

The lists are in tools/planted. "= file" names the file of the bugs that follow. Of each bug, lines that begin with "- "
are the text as it is, those with "+ " the text with the bug, and "? " the arguments of pytest, with stars in names of
files; "! " says that it is one of the quick ones, and "* " which of the CUDA objects that see the file are compiled, as
a regular expression. A bug that changes no result that the contract speaks of does not belong there.

Fails where a bug survives, where its text is gone from the sources (then the list
has to follow), where it does not compile, and where its tests do not exist.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build_support import toolchain  # noqa: E402

TEST_SECONDS = 120  # a bug that makes a test wait for ever is caught, too
SEED = str(random.SystemRandom().randrange(2**31))
NINJA = toolchain.ninja()


@dataclass(frozen=True)
class Bug:
    file: str
    before: str
    after: str
    tests: str  # arguments of pytest
    quick: bool = False
    objects: str = ""  # CUDA: which of the objects that see the file are compiled, as a regular expression
    isa: str = ""  # of the CPU kernels that tests run

    @property
    def name(self) -> str:
        change = " ".join(self.before.split()), " ".join(self.after.split())
        return f"{self.file}: {change[0][:70]} -> {change[1][:70]}"

    @property
    def cuda(self) -> bool:
        return bool(self.objects)

    def obstacle(self) -> str:
        """Why it cannot be planted; empty if it can."""
        path = ROOT / self.file
        if not path.exists():
            return "no such file"
        count = path.read_text().count(self.before)
        return "" if count == 1 else f"its text is there {count} times, expected once"


@dataclass(frozen=True)
class Verdict:
    bug: Bug
    outcome: str  # "killed", "builds", or what is wrong
    by: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome in ("killed", "builds")


# ---- What is built from what ----------------------------------------------------------------------------------------


@dataclass
class Build:
    """The checkout's build folder, as ninja knows it."""

    folder: Path
    commands: dict[str, str] = field(default_factory=dict)  # of each object and library
    sources: dict[str, set[str]] = field(default_factory=dict)  # that an object depends on, relative to the checkout

    @classmethod
    def of_checkout(cls) -> Build:
        folders = sorted((ROOT / "build").glob(f"temp.*{sys.implementation.cache_tag}"))
        if not folders:
            raise SystemExit("mutants: no build in this tree: run python setup.py build_ext --inplace")
        build = cls(folders[0])
        pending = build._ninja("-n").stdout
        if "no work to do" not in pending:
            raise SystemExit("mutants: the build is older than the sources: run python setup.py build_ext --inplace")
        rules = ("cxx", "link", "nvcc", "nvcc_cxx", "nvcc_link")
        for entry in json.loads(build._ninja("-t", "compdb", *rules).stdout):
            build.commands[entry["output"]] = entry["command"]
        build._read_dependencies(build._ninja("-t", "deps").stdout)
        return build

    def _ninja(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [NINJA, "-f", str(self.folder / "build.ninja"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True)

    def _read_dependencies(self, text: str) -> None:
        target = ""
        for line in text.splitlines():
            if line.startswith(" "):
                path = ROOT / line.strip()  # ccache makes them relative
                if path.is_relative_to(ROOT):
                    self.sources[target].add(path.relative_to(ROOT).as_posix())
            elif line:
                target = line.partition(": #deps")[0]
                self.sources[target] = set()

    def objects_of(self, bug: Bug) -> list[str]:
        """Those that see the file. Of the CPU kernels' instruction sets one will do: tests run that one."""
        seen = [name for name, sources in self.sources.items() if bug.file in sources and name in self.commands]
        if bug.objects:
            return [name for name in seen if re.search(bug.objects, name)]
        host = self._linked_for_the_host()
        return [name for name in seen if name in host and ("/isa_" not in name or f"/isa_{bug.isa}." in name)]

    def _linked_for_the_host(self) -> set[str]:
        """Objects of all libraries but CUDA's. Those that both use lie in the folder of one of them."""
        links = (c for name, c in self.commands.items() if name.endswith(".so") and "libflash_ext_cuda" not in name)
        return {word for command in links for word in command.split()}

    def libraries_of(self, bug: Bug, objects: Iterable[str]) -> list[str]:
        """Those that hold the objects; the CUDA library, which takes long to link, for bugs of CUDA kernels alone."""
        wanted = set(objects)
        found = [n for n, command in self.commands.items() if n.endswith(".so") and wanted & {*command.split()}]
        return [name for name in found if bug.objects or "libflash_ext_cuda" not in name]


def cpu_has(flag: str) -> bool:
    flags = Path("/proc/cpuinfo")
    return flags.exists() and f" {flag} " in flags.read_text()


def common_isa() -> str:
    """Of the CPU kernels. AVX2 compiles quickly, and most machines have it."""
    return "avx2" if cpu_has("avx2") else "baseline"


def sources() -> list[Path]:
    """What is no output of a build; of an unpacked archive, what its folders hold."""
    if not (ROOT / ".git").exists():
        folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in ("build", ".git")]
        return [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*") if path.suffix != ".pyc")]
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


# ---- A copy of the tree ---------------------------------------------------------------------------------------------


class Copy:
    """A copy of the tree with what is built, in which bugs are planted one after the other."""

    def __init__(self, root: Path, build: Build | None, compilers: threading.Semaphore) -> None:
        self.root, self.build, self._compilers = root, build, compilers
        built = [path for name in ("*.so", "lib/*.so", "_build_info.json") for path in (ROOT / "flash_ext").glob(name)]
        for path in filter(Path.is_file, [*sources(), *built]):
            self._copy(path)
        if build is not None:
            shutil.copytree(ROOT / "build", root / "build", dirs_exist_ok=True)

    def _copy(self, path: Path) -> None:
        target = self.root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)

    def try_out(self, bug: Bug, tests: bool = True) -> Verdict:
        start = time.monotonic()
        path = self.root / bug.file
        path.write_text((ROOT / bug.file).read_text().replace(bug.before, bug.after))
        changed = [ROOT / bug.file]
        try:
            if bug.file.startswith("csrc/"):
                assert self.build is not None
                objects = self.build.objects_of(bug)
                libraries = self.build.libraries_of(bug, objects)
                changed += map(Path, [*objects, *libraries])
                if error := self._compile(objects) or self._compile(libraries):
                    return Verdict(bug, "does not build", error, time.monotonic() - start)
            if not tests:
                return Verdict(bug, "builds", "", time.monotonic() - start)
            found = judge(bug, run_tests(self.root, ["-x", *tests_of(bug)], bug, TEST_SECONDS))
            return Verdict(bug, *found, time.monotonic() - start)
        finally:
            for original in changed:
                self._copy(original)

    def _compile(self, outputs: list[str]) -> str:
        """The first complaint of a compiler or linker, or nothing. What does not depend on another runs beside it."""
        if not outputs:
            return "nothing is built of that file"
        with ThreadPoolExecutor(len(outputs)) as pool:
            return next(filter(None, pool.map(self._make, outputs)), "")

    def _make(self, output: str) -> str:
        assert self.build is not None
        command = self.build.commands[output].replace(str(ROOT), str(self.root)).replace(" -O3 ", " -O1 ")
        command = command.partition(".o.ptxas ")[2] or command  # what a bug costs in registers is beside the point
        with self._compilers:
            result = subprocess.run(command, shell=True, cwd=self.root, capture_output=True, text=True)
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        return "" if not result.returncode else errors[0] if errors else f"exit status {result.returncode}"


# ---- Tests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TestRun:
    status: int | None  # pytest's; None: it was stopped after TEST_SECONDS
    failed: tuple[str, ...]


def tests_of(bug: Bug) -> Iterator[str]:
    """Arguments of pytest, names of files spelled out."""
    for word in shlex.split(bug.tests):
        if "*" not in word:
            yield word
        elif files := sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(word)):
            yield from files
        else:
            raise SystemExit(f"mutants: {bug.name}: no file is called {word}")


def run_tests(root: Path, arguments: Iterable[str], bug: Bug, seconds: float | None = None) -> TestRun:
    """In a process of its own. All runs draw by the same seed: what a test saw beside a bug it sees without, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    settings = {
        "OMP_NUM_THREADS": "1",
        "FLASH_EXT_CPU_ISA": bug.isa,
        "FLASH_EXT_REQUIRE_CUDA": str(int(bug.cuda)),
        "FLASH_EXT_TEST_SEED": SEED,
        "HYPOTHESIS_STORAGE_DIRECTORY": str(root / ".hypothesis"),
    }
    environment = {**os.environ, **settings}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return TestRun(None, ())
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return TestRun(done.returncode, tuple(failed))


def judge(bug: Bug, run: TestRun) -> tuple[str, str]:
    """(outcome, which test)."""
    if run.status is None:
        return "killed", f"still running after {TEST_SECONDS} s"
    if run.status == 0:
        return "SURVIVED", bug.tests
    if run.status in (3, 4, 5):  # pytest's own errors: it ran no test
        return "has no tests", bug.tests
    return "killed", run.failed[0] if run.failed else f"exit status {run.status}"


def without_bugs(verdicts: list[Verdict]) -> list[Verdict]:
    """Those whose test fails even where no bug is planted: it proves nothing."""
    found = []
    for isa in sorted({verdict.bug.isa for verdict in verdicts}):
        some = [verdict for verdict in verdicts if verdict.bug.isa == isa and verdict.ok and "::" in verdict.by]
        failed = run_tests(ROOT, sorted({verdict.by for verdict in some}), some[0].bug).failed if some else ()
        found += [replace(verdict, outcome="fails anyway") for verdict in some if verdict.by in failed]
    return found


# ---- All of them ----------------------------------------------------------------------------------------------------


def planted(arguments: argparse.Namespace) -> list[Bug]:
    isa_of = dict.fromkeys(("cuda",) if arguments.cuda else ("python", "plan", "common", "api", "cpu"), common_isa())
    if not arguments.cuda and cpu_has("amx_bf16"):
        isa_of["amx"] = "amx"
    bugs = [bug for name, isa in isa_of.items() for bug in read_list(ROOT / "tools" / "planted" / f"{name}.txt", isa)]
    bugs = [bug for bug in bugs if bug.quick or not arguments.quick]
    return [bug for bug in bugs if re.search(arguments.only, f"{bug.file}: {bug.before} -> {bug.after}")]


def read_list(path: Path, isa: str) -> Iterator[Bug]:
    file = ""
    for paragraph in path.read_text().split("\n\n"):
        lines: dict[str, list[str]] = {mark: [] for mark in "=-+?!*"}
        for line in paragraph.strip("\n").splitlines():
            lines[line[0]].append(line[2:])
        file = lines["="][0] if lines["="] else file
        if lines["-"]:
            before, after, objects = ("\n".join(lines[mark]) for mark in "-+*")
            yield Bug(file, before, after, " ".join(lines["?"] + lines["!"]), bool(lines["!"]), objects, isa)


def try_all(bugs: list[Bug], jobs: int, tests: bool) -> Iterator[Verdict]:
    build = Build.of_checkout() if any(bug.file.startswith("csrc/") for bug in bugs) else None
    with tempfile.TemporaryDirectory(prefix="mutants.") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        compilers = threading.Semaphore(jobs)
        for n in range(jobs):
            copies.put(Copy(Path(folder) / str(n), build, compilers))

        def one(bug: Bug) -> Verdict:
            copy = copies.get()
            try:
                return copy.try_out(bug, tests)
            finally:
                copies.put(copy)

        for tried in as_completed([pool.submit(one, bug) for bug in bugs]):
            yield tried.result()


def report(verdict: Verdict) -> None:
    print(f"{verdict.outcome:>14} {verdict.seconds:5.0f} s  {verdict.bug.name}\n{'':>24}{verdict.by}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eleven that take seconds each")
    parser.add_argument("--cuda", action="store_true", help="those of the CUDA kernels, where there is a GPU")
    parser.add_argument("--only", metavar="PATTERN", default="", help="regular expression over file and text")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies of the tree to work in")
    parser.add_argument("--build", action="store_true", help="say whether each compiles, and run no tests")
    parser.add_argument("--list", action="store_true", help="say whether each can be planted, and build nothing")
    arguments = parser.parse_args()
    bugs = planted(arguments)
    wrong = [Verdict(bug, "does not apply", obstacle) for bug in bugs if (obstacle := bug.obstacle())]
    for verdict in wrong:
        report(verdict)
    bugs = [bug for bug in bugs if not bug.obstacle()]
    if arguments.list:
        print(f"{len(bugs)} bugs apply")
        return 1 if wrong or not bugs else 0
    verdicts = []
    for verdict in try_all(bugs, arguments.jobs, tests=not arguments.build):
        report(verdict)
        verdicts.append(verdict)
    unfounded = without_bugs(verdicts)
    for verdict in unfounded:
        report(verdict)
    wrong += [*unfounded, *(verdict for verdict in verdicts if not verdict.ok)]
    print(f"{len(bugs)} bugs, {len(wrong)} of them not {'built' if arguments.build else 'killed'}")
    return 1 if wrong or not bugs else 0


if __name__ == "__main__":
    sys.exit(main())
