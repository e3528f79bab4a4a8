"""The pages that have figures."""

from __future__ import annotations

README, PERFORMANCE = "README.md", "docs/performance.md"
KERNELS, TUNING = "docs/kernels", "docs/tuning"
