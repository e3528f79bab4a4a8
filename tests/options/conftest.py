"""Options run by the kernels of every family that a GPU has: its own, and those for all GPUs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def each_family(kernel_family: str) -> None:
    """Makes every test of this folder one of ``kernel_family``."""
