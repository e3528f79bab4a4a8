"""Figures of options and of block masks: ``h200_options.json``, ``h200_options_sm80.json``, ``h200_masks.json``."""

from __future__ import annotations

from benchmarks.pages.records import NAMES, Cells, bounds, rows_of

# What the record calls them: forward, backward.
OPTIONS_IN_README = {
    "bias with gradient": ("bias (1, h, q, k)", "bias (1, h, q, k), its gradient"),
    "key padding": ("mask (b, 1, 1, k)", "mask (b, 1, 1, k)"),
}


def costs(label: str, direction: str, file: str = "h200_options.json") -> list[str]:
    """In percent, head_dim 64 and 128."""
    rows = [r for r in rows_of(file) if r["problem"]["direction"] == direction and r["label"] == label]
    return [f"{row['figures']['% cost']:.0f}" for row in sorted(rows, key=lambda row: int(row["problem"]["head_dim"]))]


def deterministic_costs() -> list[str]:
    """The same of the rows with `deterministic`: full, causal, with grouped heads, in packed sequences."""
    labels = ("", ", causal", ", 4 query heads a key head", ", varlen, uneven")
    return [cost for label in labels for cost in costs(f"deterministic{label}", "backward")]


def plain_of_all_gpus() -> list[str]:
    """The time of a plain call of the kernels for all GPUs over that of Hopper's, head_dim 64 and 128."""
    own, hopper = (
        {(row["problem"]["direction"], row["problem"]["head_dim"]): row["measured"]["flash_ext"] for row in plain}
        for file in ("h200_options_sm80.json", "h200_options.json")
        for plain in [[row for row in rows_of(file) if row["label"] == "plain"]]
    )
    return [f"{own[d, n] / hopper[d, n]:.1f}" for d in ("forward", "backward") for n in (64, 128)]


def mask_bounds(transposed: bool) -> list[str]:
    """Of masks of intervals, or of transposes: µs of host time, then of the device."""
    named = ("from_blocks", "causal & from_blocks")
    rows = [row for row in rows_of("h200_masks.json") if row["label"] not in named]
    rows = [row for row in rows if row["label"].endswith(", transposed") == transposed]
    host_times = bounds([row["measured"]["flash_ext"] for row in rows], 0)
    return [*host_times, *bounds([row["figures"]["device us"] for row in rows], 0)]


def option_times(file: str) -> Cells:
    """ms at head_dim 64 / 128."""

    def cells(header: list[str], line: list[str]) -> list[str]:
        rows = [row for row in rows_of(file) if row["problem"]["direction"] == line[0]]
        found = [[row["measured"]["flash_ext"] for row in rows if row["label"] == label] for label in header[1:]]
        return [line[0], *(" / ".join(f"{time:.2f}" for time in of_label) for of_label in found)]

    return cells


def bias_gradient_cells(header: list[str], line: list[str]) -> list[str]:
    """The backward in ms, without and with the gradient of a bias, at head_dim 64 / 128."""
    file = {"Hopper": "h200_options.json", "sm80": "h200_options_sm80.json"}[line[0]]
    _, *times = option_times(file)(["", "bias (1, h, q, k)", "bias (1, h, q, k), its gradient"], ["backward"])
    return [line[0], *times]


def mask_cells(header: list[str], line: list[str]) -> list[str]:
    """Building a block mask, behind the operators it took before: µs of host and device, operators."""
    (row,) = (row for row in rows_of("h200_masks.json") if row["label"] == line[0])
    found = (row["measured"]["flash_ext"], row["figures"]["device us"], row["figures"]["operators"])
    return [*line[:2], *(f"{figure:.0f}" for figure in found)]


def option_cells(file: str) -> Cells:
    def cells(header: list[str], line: list[str]) -> list[str]:
        rows = [row for row in rows_of(file) if row["problem"]["direction"] == line[0]]
        found = [[row["figures"]["% cost"] for row in rows if row["label"] == label] for label in header[1:]]
        return [line[0], *(" / ".join(f"{cost:.0f}" for cost in of_label) for of_label in found)]

    return cells


def readme_option_cells(header: list[str], line: list[str]) -> list[str]:
    """ms of forward + backward at head_dim 128; a header is who computes, as far as the record has it."""
    rows = [row for row in rows_of("h200_options.json") if row["problem"]["head_dim"] == 128]
    labels = OPTIONS_IN_README.get(line[0], (line[0], line[0]))
    both = [
        next(r["measured"] for r in rows if (r["problem"]["direction"], r["label"]) == wanted)
        for wanted in zip(("forward", "backward"), labels, strict=True)
    ]
    found = [[times.get(NAMES.get(name, name)) for times in both] for name in header[1:]]
    return [line[0], *("" if None in times else " + ".join(f"{time:.2f}" for time in times) for times in found)]
