"""The figures of all pages."""

from __future__ import annotations

from benchmarks.pages import kernel_pages, performance, readme
from benchmarks.pages.figures import Commands, Sentence, Table
from benchmarks.pages.records import ROOT

FIGURES: tuple[Table | Sentence | Commands, ...] = (
    *readme.FIGURES,
    *performance.FIGURES,
    *(Commands(str(page.relative_to(ROOT))) for page in sorted((ROOT / "docs").rglob("*.md"))),
    *kernel_pages.FIGURES,
)
