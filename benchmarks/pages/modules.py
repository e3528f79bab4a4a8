"""Figures of modules, encoders and models: ``h200_module.json``, ``h200_encoder.json``, ``h200_models.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.pages import records
from benchmarks.pages.records import NAMES, TIMES, Row, record_of, rows_of


def is_shown_encoder(problem: Mapping[str, Any]) -> bool:
    """Those of inference_mode without torch.compile, where a record has others too; older records have no mode."""
    shown = {"compiled": False, "mode": "inference_mode"}
    return shown.items() <= {**shown, **problem}.items()


def encoder_rows(file: str) -> list[Row]:
    return [row for row in rows_of(file) if is_shown_encoder(row["problem"])]


def encoder_bounds(file: str = "h200_encoder.json", dtype: str = "bfloat16") -> list[str]:
    shown = (row for row in record_of(file).rows if is_shown_encoder(row.problem))
    return records.bounds_of_speed((row for row in shown if row.problem["dtype"] == dtype), "torch")


def module_cells(header: list[str], line: list[str]) -> list[str]:
    """ms of flash-ext / torch; a header is the situation."""
    rows = [r for r in rows_of("h200_module.json") if r["problem"]["seqlen"] == 4096 and r["label"] == line[0]]
    measured = {row["problem"]["situation"]: row["measured"] for row in rows}
    found = [measured.get(situation) for situation in header[1:]]
    return [line[0], *("" if times is None else f"{times['flash_ext']:.2f} / {times['torch']:.2f}" for times in found)]


def models_beside_torch() -> list[str]:
    """The least and the largest of torch's step time over that under ``activate()``, torch's own choice of backend."""
    return records.bounds([row.ratios()["torch"] for row in record_of("h200_models.json").rows], 2)


def encoder_cells(header: list[str], line: list[str]) -> list[str]:
    (row,) = (row for row in encoder_rows("h200_encoder.json") if row["label"] == line[0].replace(TIMES, "x"))
    ours, theirs = row["measured"]["flash_ext"], row["measured"]["torch"]
    return [line[0], f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}{TIMES}"]


def model_cells(header: list[str], line: list[str]) -> list[str]:
    """ms of a step; behind ours the quartiles of its calls."""
    (row,) = (row for row in record_of("h200_models.json").rows if row.label == line[0].replace(TIMES, "x"))
    times = [
        None if name not in row.measured else f"{row.measured[name]:.1f}" for name in map(names_in_models, header[1:])
    ]
    quartiles = row.spread["flash_ext"]
    times[0] = f"{times[0]} ({quartiles['lower']:.0f}-{quartiles['upper']:.0f})"
    return [line[0], *(time or "" for time in times)]


def names_in_models(title: str) -> str:
    return NAMES.get(title.partition(" (")[0], title)
