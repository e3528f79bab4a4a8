"""Figures of host time and memory: ``h200_host.json`` and ``h200_memory.json``."""

from __future__ import annotations

from benchmarks.pages.records import find, rows_of


def host(call: str, *names: str) -> list[str]:
    (row,) = (row for row in rows_of("h200_host.json") if row["label"] == call)
    return [f"{row['measured'][name]:.0f}" for name in names]


def host_in_readme() -> list[str]:
    ways = ("flash_ext.activate", "sdpa")
    return [host(call, way)[0] for call in ("forward and backward", "without grad") for way in ways]


def peak_memory() -> list[str]:
    peak = find(rows_of("h200_memory.json"), seqlen=65536, direction="forward and backward")["measured"]
    return [f"{round(peak[name])}" for name in ("flash_ext", "fa2")]


def host_cells(header: list[str], line: list[str]) -> list[str]:
    return [line[0], *(cell for call in header[1:] for cell in host(call, line[0]))]
