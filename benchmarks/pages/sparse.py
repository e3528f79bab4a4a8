"""The section of block masks beside FlexAttention, which is there once they are recorded: ``h200_sparse.json``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import report
from benchmarks.pages.figures import Section, command_of, line_of
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.records import TIMES, geometric_mean, record_of

SPARSE = "h200_sparse.json"
OTHER_BLOCKS, A_QUARTER = "random blocks of ", ", 25 %"


def sparse_lines() -> list[str]:
    """Of a shape and direction a line: the efficiency of each mask, and FlexAttention's time over ours."""
    record = record_of(SPARSE)
    tables = list(dict.fromkeys(row.table for row in record.rows))
    masks = list(dict.fromkeys(row.label for row in record.rows))
    others = [mask for mask in masks if mask.startswith(OTHER_BLOCKS) and mask.endswith(A_QUARTER)]
    masks = [mask for mask in masks if mask not in others]
    lines = [
        f"Efficiency of block masks, 128 {TIMES} 128: the density of the mask times the dense call's time over the",
        "masked call's, in per cent. 100 says that hidden blocks cost nothing. The last column: FlexAttention's time,",
        "compiled, over flash-ext's with the same blocks, as a geometric mean over the row's masks, and the least.",
        "The band is one of whole blocks, the window one by `window_size`.",
        f"By `{command_of(record)}`,",
        f"in `benchmarks/results/{SPARSE}`. What bounds these calls, and what changed since the record:",
        "[block masks](kernels/block_sparse.md#how-fast-and-what-bounds-it).",
        "",
        *table_of(record, tables, masks, masks),
    ]
    if not others:
        return lines
    sizes = [mask.removeprefix(OTHER_BLOCKS).removesuffix(A_QUARTER) for mask in others]
    with_others = [row.table for row in record.rows if row.label in others]
    return [
        *lines,
        "",
        "Random blocks of other sizes, a quarter of them visible; the forward has lists for some of these sizes only",
        "([which kernel](kernels/block_sparse.md#which-kernel)):",
        "",
        *table_of(record, list(dict.fromkeys(with_others)), others, sizes),
    ]


def table_of(record: report.Record, tables: Sequence[str], masks: Sequence[str], titles: Sequence[str]) -> list[str]:
    lines = [["", *titles, "FlexAttention"], ["---"] * (len(masks) + 2)]
    lines += [[title, *cells_of_table(record, title, masks)] for title in tables]
    return [as_printed(line_of(line)) for line in lines]


def as_printed(line: str) -> str:
    return line.replace(" x ", f" {TIMES} ").replace("+-", "\N{PLUS-MINUS SIGN}")


def window_beside_flex() -> list[str]:
    """ms of forward and backward, ours and FlexAttention's, 1 x 8192 tokens, heads of 128."""
    rows = [row for row in record_of(SPARSE).rows if row.label == "window +-1024"]
    shape = "bfloat16, 1 x 8192 x 16 x 128"
    both = [next(r for r in rows if r.table == f"{way}, {shape}") for way in ("forward", "backward")]
    return [f"{row.measured[name]:.2f}" for name in ("flash_ext", "flex") for row in both]


def cells_of_table(record: report.Record, table: str, masks: Sequence[str]) -> list[str]:
    rows = {row.label: row for row in record.rows if row.table == table}
    efficiencies = [rows[mask].figures.get("efficiency") if mask in rows else None for mask in masks]
    shown = [rows[mask] for mask in masks if mask in rows]
    ratios = [ratio for row in shown if (ratio := row.ratios().get("flex")) is not None]
    beside = f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else ""
    return ["" if share is None else f"{100 * share:.0f}" for share in efficiencies] + [beside]


SPARSE_SECTION = Section(PERFORMANCE, "\n## Block masks\n", before="\n## Whole models\n", lines=sparse_lines)
