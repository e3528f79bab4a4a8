"""What tests of modules have in common."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, str], Any]]:
    """(ranks, device) -> their processes, which live as long as the tests of a file."""
    from tests.integration.rank_pool import Pool  # torch.distributed is not for the other tests

    open_pools: dict[tuple[int, str], Pool] = {}

    def get(world: int, device: str) -> Pool:
        if device == "cuda" and torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} GPUs")
        if (world, device) not in open_pools:
            open_pools[world, device] = Pool(world, device, tmp_path_factory.mktemp("group"))
        return open_pools[world, device]

    yield get
    for pool in open_pools.values():
        pool.close()
