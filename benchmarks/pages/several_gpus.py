"""Figures of several GPUs, which are there once a machine has recorded them."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.figures import Sentence, Table
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.records import SEVERAL_GPUS, TIMES, Cells, find, record_of, recorded, rows_of


def several_gpu_cells(file: str) -> Cells:
    """ms on one GPU and on several, the gain, TFLOP/s, and their ratio to one GPU's at 131072 tokens."""

    def cells(header: list[str], line: list[str]) -> list[str]:
        row = find(rows_of(file), seqlen=int(line[0]))
        one, several = (row["measured"].get(name) for name in ("flash_ext, one", "flash_ext"))
        alone = ["", ""] if one is None else [f"{one:.0f}", f"{row['figures']['x one']:.2f}{TIMES}"]
        rate = f"{row['figures']['x one at 131072']:.2f}{TIMES}"
        return [line[0], alone[0], f"{several:.0f}", alone[1], f"{row['shown']['flash_ext']:.0f}", rate]

    return cells


def several_gpus(file: str) -> list[str]:
    """Which, and torch."""
    origin = record_of(file).provenance
    return [origin["gpu"], origin["torch"][:4]]


def figures_of_several_gpus() -> Iterator[Table | Sentence]:
    """None before there is a record: it needs a machine with two GPUs."""
    for file in recorded(SEVERAL_GPUS):
        yield Table(PERFORMANCE, file, several_gpu_cells(file))
        yield Sentence(
            PERFORMANCE,
            r"GPUs of this section are ([\w ]+), with torch ([\d.]+)\.",
            lambda file=file: several_gpus(file),  # type: ignore[misc]
        )
