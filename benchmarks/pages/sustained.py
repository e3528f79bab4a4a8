"""The section of sustained speeds, which is there once somebody recorded them with ``--sustained``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.pages.figures import Section, command_of, line_of
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.records import FOUR, geometric_mean, record_of, recorded
from benchmarks.pages.training import is_training_row

DIRECTIONS = ("forward", "backward")
SHOWN_SEQLENS = (512, 2048, 16384)  # of those that are recorded; the others count in the means alone
OF_ZEROS = "Inputs of zeros take little power, so the clock stays high."
TITLES = {"flash_ext": "flash-ext", "fa3": "FlashAttention-3", "cudnn": "cuDNN", "fa2": "FA2"}


def files_of(direction: str) -> list[str]:
    """A record of loops alone, else the one of bursts if it has loops too; and one of loops over zeros."""
    names = [f"h200_{direction}_sustained.json", f"h200_{direction}.json"]
    found = [file for file in names if recorded(file) and rows_of_file(file)][:1]
    zeros = f"h200_{direction}_sustained_zeros.json"
    return [*found, zeros] if recorded(zeros) else found


def rows_of_file(file: str) -> list[report.Row]:
    return [row for row in record_of(file).rows if row.sustained_ratios() and is_training_row(row.problem)]


def is_sustained() -> bool:
    return any(files_of(direction) for direction in DIRECTIONS)


def sustained_lines() -> list[str]:
    """Of each direction, head dim and mask: TFLOP/s, the best peer's time over ours, and ours in % of bursts."""
    rows = {file: rows_of_file(file) for direction in DIRECTIONS for file in files_of(direction)}
    everything = [row for of_file in rows.values() for row in of_file]
    names = [name for name in FOUR if any(name in row.sustained for row in everything)]
    found = {row.problem["seqlen"] for row in everything}
    seqlens = [n for n in SHOWN_SEQLENS if n in found] or sorted(found)
    lines = [
        "Each call is repeated for a second without pause: power and temperature limit the clock, and inputs may",
        "stay in L2. The other tables have pauses between calls (bursts).",
        f"TFLOP/s of {' / '.join(TITLES[name] for name in names)}; then the time of the fastest peer over",
        "flash-ext's, as a geometric mean and in the worst row of all lengths; then flash-ext's sustained speed in %",
        "of its speed in bursts in the same run.",
        *([OF_ZEROS] if any(row.problem.get("zeros") for row in everything) else []),
        *(f"By `{command_of(record_of(file))}`, in `benchmarks/results/{file}`." for file in rows),
        "",
        line_of(["", *map(str, seqlens), "/ best peer", "% of bursts"]),
        line_of(["---"] * (len(seqlens) + 3)),
    ]
    for of_file in rows.values():
        for of_line in rows_of_lines(of_file):
            lines.append(line_of([title_of(of_line[0].problem), *cells_of_rows(of_line, seqlens, names)]))
    return lines


def rows_of_lines(rows: Sequence[report.Row]) -> list[list[report.Row]]:
    """Those that differ in their length alone make a line."""
    lines: dict[tuple[int, bool], list[report.Row]] = {}
    for row in rows:
        lines.setdefault((row.problem["head_dim"], row.problem["causal"]), []).append(row)
    return list(lines.values())


def title_of(problem: Mapping[str, Any]) -> str:
    mask, zeros = "causal" if problem["causal"] else "full", ", zeros" if problem.get("zeros") else ""
    return f"{problem['direction']}, {problem['head_dim']} {mask}{zeros}"


def cells_of_rows(rows: Sequence[report.Row], seqlens: Sequence[int], names: Sequence[str]) -> list[str]:
    by_seqlen = {row.problem["seqlen"]: row for row in rows}
    speeds = [speeds_of(by_seqlen[n], names) if n in by_seqlen else "" for n in seqlens]
    ratios = [min(row.sustained_ratios().values()) for row in rows]
    kept = geometric_mean([row.measured["flash_ext"] / row.sustained["flash_ext"] for row in rows])
    return [*speeds, f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})", f"{100 * kept:.0f}"]


def speeds_of(row: report.Row, names: Sequence[str]) -> str:
    shown = [report.shown_sustained(row, name) for name in names]
    return " / ".join("-" if speed is None else f"{speed:.0f}" for speed in shown)


SUSTAINED_SECTION = Section(PERFORMANCE, "\n## Sustained speed\n", before="\n## Grouped heads\n", lines=sustained_lines)
