"""What tests of benchmarks have in common."""

from __future__ import annotations

import pytest

from benchmarks import ceilings


@pytest.fixture
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.READ_BYTES, "cpu", 2**16)
