"""The section of the shapes that users have, which is there once they are recorded: ``h200_shapes.json``."""

from __future__ import annotations

from benchmarks import report
from benchmarks.pages.figures import Section, command_of, line_of
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.records import geometric_mean, per_cent_less, record_of

SHAPES = "h200_shapes.json"


def shape_lines() -> list[str]:
    """Of a heading of the record a line: geometric mean and least of the best peer's time over ours, by direction."""
    record, ratios = record_of(SHAPES), dict[str, dict[str, list[float]]]()
    for row in record.rows:
        if (best := report.best_ratio(row)) is not None:
            direction, dtype = row.problem["direction"], row.problem["dtype"]
            of_shape = ratios.setdefault(row.table.replace(f", {direction}, {dtype}", ""), {})
            of_shape.setdefault(direction, []).append(best)
    lines = [
        "The time of the fastest peer over flash-ext's, as a geometric mean and in the worst row: short sequences,",
        "small batches, chunks of prompts over dense keys and over caches, cross-attention, packed sequences, wide",
        f"heads. By `{command_of(record)}`,",
        f"in `benchmarks/results/{SHAPES}`, which has each row and the kernel that runs it. [What the rows",
        "are](benchmarks.md#benchmarks).",
        "",
        line_of(["", "forward", "backward"]),
        line_of(["---"] * 3),
    ]
    for title, by_direction in ratios.items():
        found = [by_direction.get(direction) for direction in ("forward", "backward")]
        lines.append(line_of([title, *(f"{geometric_mean(r):.2f} ({min(r):.2f})" if r else "" for r in found)]))
    return lines


def most_behind() -> list[str]:
    """How much less time FlashAttention-3 and cuDNN take where they are furthest ahead: in per cent, rounded up."""
    rows = record_of(SHAPES).rows
    least = (min(row.ratios()[peer] for row in rows if peer in row.measured) for peer in ("fa3", "cudnn"))
    return [str(per_cent_less(ratio)) for ratio in least]


SHAPES_SECTION = Section(PERFORMANCE, "\n## Shapes that users have\n", before="\n## Grouped heads\n", lines=shape_lines)
