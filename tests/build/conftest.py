"""What tests of benchmarks have in common."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import ceilings  # here, for tests that run beside an installed package have no benchmarks

    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.READ_BYTES, "cpu", 2**16)
