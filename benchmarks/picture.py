"""The picture of README.md: TFLOP/s of causal training shapes, forward and backward, from two recorded runs.

python -m benchmarks.picture benchmarks/results/h200_forward.json benchmarks/results/h200_backward.json \\
    benchmarks/results/h200_training.svg
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Record, Row, read

HEAD_DIMS = (64, 128, 256)
HIDDEN = 2048
LINES = {
    "flash_ext": ("flash-ext", "#0072b2", 2.4),
    "fa3": ("FlashAttention-3", "#d55e00", 1.4),
    "cudnn": ("cuDNN", "#009e73", 1.4),
    "fa2": ("FlashAttention-2", "#999999", 1.4),
}


def rows_of(record: Record, head_dim: int) -> list[Row]:
    """Causal rows of bfloat16 without grouped heads, by length."""
    wanted = {"dtype": "bfloat16", "causal": True, "head_dim": head_dim, "heads_kv": HIDDEN // head_dim}
    rows = [row for row in record.rows if wanted.items() <= row.problem.items()]
    return sorted(rows, key=lambda row: int(row.problem["seqlen"]))


def draw(axes: Any, rows: Sequence[Row]) -> None:
    for name, (title, color, width) in LINES.items():
        values = [row.shown.get(name, math.nan) for row in rows]
        axes.plot(range(len(rows)), values, "o-", label=title, color=color, linewidth=width, markersize=3)
    axes.set_xticks(range(len(rows)), [_thousands(int(row.problem["seqlen"])) for row in rows])
    axes.set_ylim(0, 900)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def picture(forward: Record, backward: Record, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flash-ext", "font.size": 9}):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        panels = figure.subplots(2, len(HEAD_DIMS), sharex=True, sharey=True)
        for record, direction, line in zip((forward, backward), ("forward", "backward"), panels, strict=True):
            for axes, head_dim in zip(line, HEAD_DIMS, strict=True):
                draw(axes, rows_of(record, head_dim))
                axes.set_title(f"{direction}, head_dim {head_dim}, causal", fontsize=9)
            line[0].set_ylabel("TFLOP/s")
        for axes in panels[1]:
            axes.set_xlabel("tokens a sequence, 16384 in all")
        panels[0][0].legend(fontsize=8, frameon=False, loc="upper left")
        figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    parser.add_argument("forward", type=Path, help="a record of python -m benchmarks forward")
    parser.add_argument("backward", type=Path, help="a record of python -m benchmarks backward")
    parser.add_argument("picture", type=Path, help="where it goes: .svg, .png or .pdf")
    chosen = parser.parse_args(arguments)
    picture(read(chosen.forward), read(chosen.backward), chosen.picture)


if __name__ == "__main__":
    main()
