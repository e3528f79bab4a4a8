"""Figures of CPUs: ``cpu_xeon.json`` and ``cpu_epyc_encoder.json``."""

from __future__ import annotations

from benchmarks.pages.modules import encoder_rows
from benchmarks.pages.records import TIMES, find, record_of, rows_of, times_as_fast


def cpu_bounds(dtype: str) -> list[str]:
    """At head_dim 128."""
    shapes = [{"direction": direction, "dtype": dtype, "head_dim": 128} for direction in ("forward", "backward")]
    return [bound for shape in shapes for bound in times_as_fast("cpu_xeon.json", "sdpa", **shape)]


def cpu_software() -> list[str]:
    return [record_of("cpu_xeon.json").provenance["torch"][:4]]


def cpu_encoder_cells(header: list[str], line: list[str]) -> list[str]:
    found = [line[0]]
    for dtype in ("bfloat16", "float32"):
        rows = [row for row in encoder_rows("cpu_epyc_encoder.json") if row["problem"]["dtype"] == dtype]
        (measured,) = (row["measured"] for row in rows if row["label"] == line[0].replace(TIMES, "x"))
        ours, theirs = measured["flash_ext"], measured["torch"]
        found += [f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}{TIMES}"]
    return found


def cpu_cells(header: list[str], line: list[str]) -> list[str]:
    dtype, size, mask = line[:3]
    batch, seqlen, heads, head_dim = map(int, size.split(f" {TIMES} "))
    shape = {"batch": batch, "seqlen": seqlen, "heads_q": heads, "head_dim": head_dim, "dtype": dtype}
    found = [dtype, size, mask]
    for direction in ("forward", "backward"):
        rows = rows_of("cpu_xeon.json")
        measured = find(rows, **shape, causal=mask == "causal", direction=direction)["measured"]
        ours, theirs = measured["flash_ext"], measured["sdpa"]
        found += [f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}{TIMES}"]
    return found
