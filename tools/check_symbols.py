"""Fails where a library imports more than the stable C interface of torch, or carries a path of this machine.

One build serves every torch from 2.10 on only as long as it imports no C++ symbol of torch: those change with every
release. What may be undefined in a library is C and C++ runtime, and torch's versioned C interface.

    python tools/check_symbols.py [LIBRARY ...]      default: the libraries in flash_ext/lib
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_TORCH_C = re.compile(r"(aoti_torch_|torch_)[A-Za-z0-9_]+")
_RUNTIME_VERSION = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC|OMP|GOMP)_")
_LINKER = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_thread_atexit_impl"}
_ALLOWED_LIBRARIES = re.compile(
    r"(libtorch|libstdc\+\+|libm|libgcc_s|libc|libdl|librt|libpthread|ld-linux[\w-]*)\.so.*"
)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def foreign_symbols(library: Path) -> list[str]:
    """Undefined symbols that belong neither to the C and C++ runtime nor to torch's C interface."""
    names = [line.split()[-1] for line in _output("nm", "-D", "--undefined-only", str(library)).splitlines() if line]
    return [
        name
        for name in names
        if name not in _LINKER and not _RUNTIME_VERSION.search(name) and not _TORCH_C.fullmatch(name)
    ]


def dynamic_problems(library: Path) -> list[str]:
    """Libraries that are needed and should not be, and search paths."""
    problems = []
    for line in _output("readelf", "-d", str(library)).splitlines():
        value = line.partition("[")[2].partition("]")[0]
        if "(NEEDED)" in line and not _ALLOWED_LIBRARIES.fullmatch(value):
            problems.append(f"needs {value}")
        if "(RPATH)" in line or "(RUNPATH)" in line:
            problems.append(f"has the search path {value}")
    return problems


def main(arguments: list[str]) -> int:
    libraries = [Path(argument) for argument in arguments] or sorted((ROOT / "flash_ext" / "lib").glob("*.so"))
    if not libraries:
        print("no library to check: build first")
        return 1
    failed = False
    for library in libraries:
        problems = [f"imports {name}" for name in foreign_symbols(library)] + dynamic_problems(library)
        for problem in problems:
            print(f"{library.name}: {problem}")
        print(f"{library.name}: {'FAILED' if problems else 'ok'}")
        failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
