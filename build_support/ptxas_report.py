"""Runs nvcc, keeps what ptxas says of each kernel beside the object, and fails on what must not happen silently.

    python ptxas_report.py REPORT nvcc ...      compile, write REPORT, check it
    python ptxas_report.py --check FOLDER       check every *.ptxas below FOLDER and print one line per kernel

A kernel fails on register spills, on local memory, and on wgmma instructions that ptxas serialised.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_COMPILING = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass
class Kernel:
    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    spills: int = 0

    def __str__(self) -> str:
        return (
            f"{self.arch:8} {self.registers:4} registers {self.stack:4} B stack {self.spills:4} B spilled  {self.name}"
        )


def parse(report: str) -> tuple[list[Kernel], list[str]]:
    """The kernels of a report, and what is wrong with them."""
    kernels: list[Kernel] = []
    problems: list[str] = []
    for line in report.splitlines():
        if match := _COMPILING.search(line):
            kernels.append(Kernel(match["name"], match["arch"]))
        elif kernels and (match := _FRAME.search(line)):
            kernels[-1].stack = max(kernels[-1].stack, int(match[1]))
            kernels[-1].spills += int(match[2]) + int(match[3])
        elif kernels and (match := _REGISTERS.search(line)):
            kernels[-1].registers = int(match[1])
        if "wgmma" in line and "serialized" in line:
            problems.append(line.strip())
    problems += [f"spills registers: {kernel}" for kernel in kernels if kernel.spills]
    problems += [f"uses local memory: {kernel}" for kernel in kernels if kernel.stack and not kernel.spills]
    return kernels, problems


def compile_with_report(report_path: Path, command: list[str]) -> int:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    report_path.write_text(result.stdout)
    # What ptxas says of each kernel stays in the report; warnings and errors are for the reader of the build.
    chatter = () if result.returncode else ("ptxas info", "    ")
    for line in result.stdout.splitlines():
        if line.strip() and not line.startswith(chatter):
            print(line)
    _, problems = parse(result.stdout)
    for problem in problems:
        print(f"{report_path}: {problem}")
    return result.returncode or int(bool(problems))


def check_folder(folder: Path) -> int:
    reports = sorted(folder.rglob("*.ptxas"))
    if not reports:
        print(f"no ptxas report below {folder}: no kernel was built")
        return 0
    failed = False
    for path in reports:
        kernels, problems = parse(path.read_text())
        for line in [*map(str, kernels), *(f"ERROR {problem}" for problem in problems)]:
            print(line)
        failed |= bool(problems)
    return int(failed)


def main(arguments: list[str]) -> int:
    if arguments[0] == "--check":
        return check_folder(Path(arguments[1]))
    return compile_with_report(Path(arguments[0]), arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
