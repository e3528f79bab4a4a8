"""Fails where README.md, CONTRIBUTING.md or a page of docs names or links to what is not there, or is too long.

- A name of a file in backticks is one in the tree: from its root, or the end of a path (`ops.cpp`, `forward/config.h`).
  Braces and stars are spelled out: `sm90/{forward,backward}/*.cuh`. Built libraries do not count, nor does what
  docs/architecture.md would add in its worked examples.
- A link leads to a file, and to a heading where it says which. `python -m benchmarks.x` is a module.
- A table has a header, and as many columns in each line.
- README.md has 1400 words at most, a page of docs/tuning 150 lines; every page there is about a kernel that has a page
  in docs/kernels, and every room of csrc/kernels/sm80 and sm90 is named by one of those.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS, MOST_LINES = 1400, 150
SUFFIXES = ("c", "cpp", "cu", "cuh", "h", "json", "md", "py", "pyi", "sh", "svg", "toml", "txt")

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MODULE = re.compile(r"python -m (benchmarks[.\w]*)")
_FILE = re.compile(rf"[\w./*{{}},<>-]+\.(?:{'|'.join(SUFFIXES)})")
_FOLDER = re.compile(r"(?:csrc|docs|tests|benchmarks|tools|flash_ext|build_support)/[\w./*{},-]*|sm\d+/[\w/]+")
_OF_EXAMPLES = re.compile(r"sm100/|forward_fp8")
_BRACES = re.compile(r"\{([^{}]*)\}")
_CELL_END = re.compile(r"(?<!\\)\|")


def files_of_tree() -> list[str]:
    """What git tracks or would track; of an archive without git, all files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    return [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]


def spelled_out(name: str) -> Iterator[str]:
    """``a/{b,c}`` as ``a/b`` and ``a/c``."""
    parts = _BRACES.split(name)
    choices = [part.split(",") if n % 2 else [part] for n, part in enumerate(parts)]
    yield from ("".join(choice) for choice in itertools.product(*choices))


def with_folders(files: Iterable[str]) -> set[str]:
    return {place for name in files for place in (name, *(f"{p.as_posix()}/" for p in Path(name).parents))}


def exists(name: str, places: set[str]) -> bool:
    """Whether a path of the tree is ``name`` or ends with it, the name of a folder with or without its slash."""
    wanted = {name, f"{name.rstrip('/')}/"}
    return any(fnmatchcase(f"/{place}", f"*/{want}") for want in wanted for place in places)


def names_of(text: str) -> Iterator[str]:
    """Names of files and folders in backticks."""
    for code in _CODE.findall(text):
        for name in code.split():
            if _FILE.fullmatch(name) or _FOLDER.fullmatch(name):
                yield from spelled_out(name)


def headings_of(page: Path) -> set[str]:
    """As GitHub makes anchors of them."""
    titles = re.findall(r"^#+ +(.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in _LINK.findall(text):
        path, _, heading = target.partition("#")
        if ":" in path:
            continue
        file = page.parent / path if path else page
        if not file.exists():
            yield f"links to {target}, which is not there"
        elif heading and heading not in headings_of(file):
            yield f"links to {target}, a heading that is not there"


def broken_tables(text: str) -> Iterator[str]:
    """No rule below the first line, as in what a blank line cuts off, or a line with another number of columns."""
    for table in re.findall(r"(?:^\|.*\n?)+", _FENCE.sub("", text), re.MULTILINE):
        header, *lines = table.splitlines()
        if not lines or not re.fullmatch(r"\|(?: *:?-+:? *\|)+", lines[0]):
            yield f"has a table without a header: {header[:60]}"
        for line in lines:
            if len(_CELL_END.findall(line)) != len(_CELL_END.findall(header)):
                yield f"has a table with a line of other columns: {line[:60]}"


def problems_of(page: Path, places: set[str]) -> Iterator[str]:
    text = page.read_text()
    for name in names_of(text):
        if not (exists(name, places) or name.endswith(".so") or _OF_EXAMPLES.search(name)):
            yield f"names {name}, which is not in the tree"
    yield from broken_links(page, text)
    yield from broken_tables(text)
    for module in _MODULE.findall(text):
        if not exists(module.replace(".", "/") + ".py", places) and not exists(f"{module.replace('.', '/')}/", places):
            yield f"names {module}, which is no module"
    if page.name == "README.md" and len(text.split()) > MOST_WORDS:
        yield f"has {len(text.split())} words, at most {MOST_WORDS}"
    if page.parent.name == "tuning" and text.count("\n") > MOST_LINES:
        yield f"has {text.count(chr(10))} lines, at most {MOST_LINES}"


def kernels_without_a_page(places: set[str]) -> Iterator[str]:
    pages = {path.stem for path in (ROOT / "docs" / "kernels").glob("*.md")}
    rooms = {match[0] for place in places if (match := re.search(r"(?<=csrc/kernels/)sm\d+/\w+(?=/inst/$)", place))}
    for room in sorted(rooms):
        architecture, operation = room.split("/")
        if f"{operation}_{architecture}" not in pages:
            yield f"docs/kernels: {room} has no page {operation}_{architecture}.md"
    for page in sorted((ROOT / "docs" / "tuning").glob("*_sm*.md")):
        operation, architecture = page.stem.rsplit("_", 1)
        kernels = (name.removesuffix(f"_{architecture}") for name in pages if name.endswith(f"_{architecture}"))
        if not any(f"{operation}_".startswith(f"{kernel}_") for kernel in kernels):
            yield f"docs/tuning/{page.name}: its kernel has no page in docs/kernels"


def main() -> int:
    places = with_folders(files_of_tree())
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    problems = [f"{page.relative_to(ROOT)}: {problem}" for page in pages for problem in problems_of(page, places)]
    problems += kernels_without_a_page(places)
    for problem in problems:
        print(problem)
    print(f"{len(pages)} pages: {'FAILED' if problems else 'ok'}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
