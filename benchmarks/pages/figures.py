"""Where figures stand on a page: in the cells of a table, in a sentence, beside the name of a record."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.pages.records import Cells, record_of
from benchmarks.report import Record

PAIR = r"(\d+) / (\d+)"
NUMBER = r"([\d.]+) times\s+"
COMMAND = r"`[^`]*?(python -m benchmarks[^`]*)`,\s+(?:in\s+)?`benchmarks/results/([\w.]+)`"


class Gone(ValueError):
    """What a figure stands in is not on the page any more."""


@dataclass(frozen=True)
class Table:
    """The first table behind a mention."""

    page: str
    behind: str
    cells: Cells

    def __str__(self) -> str:
        return f"{self.page}: the table behind {self.behind.strip()!r}"

    def place(self, text: str) -> tuple[int, int]:
        found = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE).search(text, max(0, text.find(self.behind)))
        if self.behind not in text or found is None:
            raise Gone(f"{self} is not there")
        return found.span()

    def apply(self, text: str) -> str:
        start, end = self.place(text)
        header, rule, *lines = text[start:end].splitlines()
        titles = cells_of(header)
        filled = [line_of(self.cells(titles, cells_of(line))) for line in lines]
        return text[:start] + "\n".join([header, rule, *filled]) + "\n" * text[start:end].endswith("\n") + text[end:]


@dataclass(frozen=True)
class Section(Table):
    """A section whose lines are all the record's, ``behind`` its heading; without one, it is put before ``before``."""

    cells: Cells = lambda header, line: line  # as the lines have them
    before: str = ""
    lines: Callable[[], list[str]] = list

    def apply(self, text: str) -> str:
        start = text.find(self.behind)
        end = text.find("\n## ", start + 1) if start >= 0 else text.find(self.before)
        if end < 0:
            raise Gone(f"{self.page} has no place for {self.behind.strip()!r}")
        return text[: start if start >= 0 else end] + self.behind + "\n".join(["", *self.lines(), ""]) + text[end:]


@dataclass(frozen=True)
class Sentence:
    """Words with figures in them, a group for each. A line may end at any space of the pattern."""

    page: str
    pattern: str
    values: Callable[[], list[str]]
    behind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", self.pattern.replace(" ", r"\s+"))

    def __str__(self) -> str:
        return f"{self.page}: {self.pattern}"

    def apply(self, text: str) -> str:
        found = re.compile(self.pattern).search(text, max(0, text.find(self.behind)))
        if self.behind not in text or found is None:
            raise Gone(f"{self.page} does not say {self.pattern!r} any more")
        return substituted(text, found, self.values())


@dataclass(frozen=True)
class Commands:
    """Beside a file, the command that recorded it, behind the environment in which it ran."""

    page: str

    def __str__(self) -> str:
        return f"{self.page}: commands"

    def apply(self, text: str) -> str:
        for found in reversed(list(re.finditer(COMMAND, text))):
            text = substituted(text, found, [command_of(record_of(found[2])), found[2]])
        return text


def command_of(record: Record) -> str:
    """Without the name of its file, which stands beside it."""
    return re.sub(r" --json \S+", "", record.provenance["command"])


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def line_of(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def substituted(text: str, found: re.Match[str], values: Sequence[str]) -> str:
    """The groups replaced, from the last to the first."""
    assert len(values) == len(found.groups()), (found.re.pattern, values)
    for n in range(len(values), 0, -1):
        text = text[: found.start(n)] + values[n - 1] + text[found.end(n) :]
    return text
