"""The section that says when, and from which commit, each record was made."""

from __future__ import annotations

from benchmarks.pages.figures import Section, line_of
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.records import record_of, recorded


def origin_lines() -> list[str]:
    """The newest record first."""
    origins = sorted(((record_of(file).provenance, file) for file in recorded("*.json")), key=lambda of: of[0]["date"])
    lines = [
        "In `benchmarks/results/`, the newest first. The load is that of the machine before the run; older records",
        "lack it. A record is of its commit: what it measures may have become faster or slower since.",
        "",
        line_of(["record", "day", "commit", "load"]),
        line_of(["---"] * 4),
    ]
    for origin, file in reversed(origins):
        load = origin.get("load_average")
        day, commit = origin["date"].partition("T")[0], origin["commit"][:12]
        lines.append(line_of([file.removesuffix(".json"), day, commit, "" if load is None else f"{load:.1f}"]))
    return lines


ORIGINS_SECTION = Section(PERFORMANCE, "\n## Records\n", before="\n## Measure it yourself\n", lines=origin_lines)
