"""The section of block masks: what it says is the record's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.pages import records
from benchmarks.pages.all_pages import FIGURES
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.sparse import SPARSE, SPARSE_SECTION
from tests.build.benchmark_runs import record

SIZES = {"64 x 64": 0.52, "256 x 128": 0.81}


def masked(label: str, efficiency: float, flex: float | None) -> report.Row:
    times = {"flash_ext": 1.0} | ({} if flex is None else {"flex": flex})
    return report.Row("forward, bfloat16, 1 x 512 x 2 x 64", label, {}, times, figures={"efficiency": efficiency})


def printed(line: str) -> str:
    return "\n" + line.replace(" x ", f" {records.TIMES} ") + "\n"


def test_the_section_comes_with_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (records.ROOT / PERFORMANCE).read_text()
    behind = SPARSE_SECTION.behind
    assert (SPARSE_SECTION in FIGURES) == (records.RESULTS / SPARSE).exists() == (behind in page)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    kept = record(masked("10 %", 0.654, 2.0), masked("50 %", 0.8, 4.5), masked("window", 0.9, None), benchmark="sparse")
    kept.provenance["command"] = "python -m benchmarks sparse --rounds 12 --json h200_sparse.json"
    kept.write(tmp_path / SPARSE)
    written = SPARSE_SECTION.apply(page)
    assert written == SPARSE_SECTION.apply(written) and written.count(behind) == 1
    assert "\n| | 10 % | 50 % | window | FlexAttention |\n" in written
    assert printed("| forward, bfloat16, 1 x 512 x 2 x 64 | 65 | 80 | 90 | 3.00 (2.00) |") in written
    assert "\nBy `python -m benchmarks sparse --rounds 12`,\n" in written


def test_blocks_of_other_sizes_have_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (records.ROOT / PERFORMANCE).read_text()
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    others = [masked(f"random blocks of {size}, 25 %", efficiency, 1.25) for size, efficiency in SIZES.items()]
    kept = record(masked("10 %", 0.654, 2.0), *others, benchmark="sparse")
    kept.provenance["command"] = "python -m benchmarks sparse --json h200_sparse.json"
    kept.write(tmp_path / SPARSE)
    written = SPARSE_SECTION.apply(page)
    assert "\n| | 10 % | FlexAttention |\n" in written
    assert printed("| forward, bfloat16, 1 x 512 x 2 x 64 | 65 | 2.00 (2.00) |") in written
    assert printed("| | 64 x 64 | 256 x 128 | FlexAttention |") in written
    assert printed("| forward, bfloat16, 1 x 512 x 2 x 64 | 52 | 81 | 1.25 (1.25) |") in written
