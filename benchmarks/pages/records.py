"""Records as the pages read them: rows, ratios, where they come from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TIMES = "\N{MULTIPLICATION SIGN}"
NAMES = {
    "flash-ext": "flash_ext",
    "FlashAttention-3": "fa3",
    "FA3": "fa3",
    "FA3 with metadata": "fa3 metadata",
    "FA2": "fa2",
    "cuDNN": "cudnn",
    "torch, efficient": "efficient",
    "FlexAttention": "flex",
}
FOUR = ("flash_ext", "fa3", "cudnn", "fa2")
SEVERAL_GPUS = "*_context_parallel.json"

Row = dict[str, Any]
Cells = Callable[[list[str], list[str]], list[str]]  # (header, cells of a line) -> the cells as recorded


def record_of(file: str) -> report.Record:
    return report.read(RESULTS / file)


def recorded(pattern: str) -> list[str]:
    """Names of the records that are like the pattern."""
    return sorted(path.name for path in RESULTS.glob(pattern))


def rows_of(file: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / file).read_text())["rows"]
    return rows


def find(rows: Iterable[Row], **problem: Any) -> Row:
    (row,) = (r for r in rows if all(r["problem"].get(name) == value for name, value in problem.items()))
    return row


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def bounds(ratios: Sequence[float], digits: int) -> list[str]:
    return [f"{value:.{digits}f}" for value in (min(ratios), max(ratios))]


def per_cent_less(ratio: float) -> int:
    """How much less time a peer takes whose time over ours is ``ratio``, rounded up."""
    return math.ceil(100 * (1 - ratio))


def times_as_fast(file: str, peer: str, **problem: Any) -> list[str]:
    return bounds_of_speed((r for r in record_of(file).rows if problem.items() <= r.problem.items()), peer)


def bounds_of_speed(rows: Iterable[report.Row], peer: str) -> list[str]:
    """ "a to b times as fast as the peer", over all rows that have it, those that it wins too. The least is the lower
    quartile of the rounds' ratios: who says "faster" by it is right in three rounds of four. The most is a median."""
    rows = [row for row in rows if peer in row.measured]
    least, most = min(row.lower_ratios()[peer] for row in rows), max(row.ratios()[peer] for row in rows)
    return bounds((least, most), 2)


def software() -> list[str]:
    """Of all records of one H200 alike, as far as a sentence names them: torch, cuDNN, CUDA."""
    of_one = set(recorded("h200_*.json")) - set(recorded(SEVERAL_GPUS))
    origins = [record_of(file).provenance for file in of_one]
    (found,) = {(o["torch"][:4], ".".join(o["cudnn"].split(".")[:2]), o["cuda"]) for o in origins}
    return list(found)


def commit_of_fa3() -> list[str]:
    """Version and commit, the same in all records that have them; the others have a checksum alone."""
    origins = [record_of(file).provenance["peer_origins"].get("fa3") or {} for file in recorded("h200_*.json")]
    return [value for name in ("version", "commit") for value in {of[name] for of in origins if name in of}]
