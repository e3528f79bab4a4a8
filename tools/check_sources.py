"""Fails where a source breaks a rule of the tree that no compiler enforces.

- Only csrc/api includes torch's headers, and nothing uses at:: or c10::, whose symbols are not stable.
- Only csrc/kernels/ptx holds inline assembly.
- Architectures do not know each other: csrc/kernels/sm90 includes nothing of csrc/kernels/sm80 and the reverse, and
  csrc/kernels/common includes neither.
- Rooms do not know each other: a file of csrc/kernels/sm90/backward includes that room and common ones alone.
- Every C++ and CUDA source is built: it lies where setup.py looks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}

_TORCH_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10)/')
_UNSTABLE_TORCH_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](?!torch/(csrc/stable|headeronly)/)(torch|ATen|c10)/')
_UNSTABLE_NAMESPACE = re.compile(r"(?<![\w:])(at|c10)::")
_INLINE_ASSEMBLY = re.compile(r"(?<!\w)(asm|__asm__)\s*(volatile|__volatile__)?\s*\(")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"kernels/(?P<architecture>sm\d+)/(?P<room>\w+)/')
_ROOM = re.compile(r"csrc/kernels/(?P<architecture>sm\d+|common|ptx)/(?P<room>\w+)?")
_BUILT = re.compile(r"csrc/(api|plan|kernels|kernels/cpu|kernels/common)/\w+\.cpp|csrc/kernels/\w+/\w+/inst/\w+\.cu")


def _without_comment(line: str) -> str:
    return line.partition("//")[0]


def problems_of(path: Path) -> Iterator[str]:
    place = path.relative_to(ROOT).as_posix()
    for number, text in enumerate(path.read_text().splitlines(), 1):
        line = _without_comment(text)
        if _TORCH_INCLUDE.match(line) and not place.startswith("csrc/api/"):
            yield f"{place}:{number}: includes a torch header outside csrc/api"
        if _UNSTABLE_TORCH_INCLUDE.match(line) or _UNSTABLE_NAMESPACE.search(line):
            yield f"{place}:{number}: uses torch outside its stable ABI"
        if room := _foreign_room(place, line):
            yield f"{place}:{number}: includes {room}, another room"
        if _INLINE_ASSEMBLY.search(line) and not place.startswith("csrc/kernels/ptx/"):
            yield f"{place}:{number}: inline assembly outside csrc/kernels/ptx"


def _foreign_room(place: str, line: str) -> str | None:
    """The room that a file of csrc/kernels includes and must not know."""
    included, own = _INCLUDE.match(line), _ROOM.match(place)
    if included is None or own is None:
        return None
    is_own_architecture = included["architecture"] == own["architecture"]
    is_known = is_own_architecture and included["room"] in ("common", own["room"])
    return None if is_known else f"{included['architecture']}/{included['room']}"


def unbuilt_sources(sources: list[Path]) -> Iterator[str]:
    present = (path.relative_to(ROOT).as_posix() for path in sources if path.suffix in {".cpp", ".cu"})
    yield from (f"{place}: setup.py does not look there" for place in present if not _BUILT.fullmatch(place))


def main() -> int:
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in SUFFIXES)
    problems = [problem for path in sources for problem in problems_of(path)]
    problems += unbuilt_sources(sources)
    for problem in problems:
        print(problem)
    print(f"{len(sources)} sources: {'FAILED' if problems else 'ok'}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
