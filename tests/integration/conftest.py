"""What tests of modules have in common."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flash_ext import modules


@pytest.fixture
def exact_dtype(device: str) -> Iterator[torch.dtype]:
    """Makes every tensor of the test on the device; the dtype in which results are compared tightly."""
    with torch.device(device):
        yield torch.float64 if device == "cpu" else torch.float32


@pytest.fixture
def attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call that our modules make of the attention function."""
    calls: list[dict[str, Any]] = []
    attention = modules.attention

    def recorded(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return attention(*args, **options)

    monkeypatch.setattr(modules, "attention", recorded)
    return calls


@pytest.fixture
def inductor() -> Iterator[None]:
    """Inductor takes CXX for a program; as the build reads it, a launcher may stand before it and options behind."""
    words = [word for word in shlex.split(os.environ.get("CXX", "")) if not word.startswith("-")]
    if len(words) < 2:
        yield
        return
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, words[-1])}):
        yield
