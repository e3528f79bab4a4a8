"""Few query tiles at head dims up to 128: on Hopper tiles of 128 queries where they fill the SMs better than larger
ones. Over caches: tests/decode/test_prompts.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle import HALF, Call, assert_matches_oracle, explained_on_hopper, make_call, run_library

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (700, 90)},
}
TILE = ("sm90/forward", 128, 128)


def few_tiles(device: str, dtype: torch.dtype, queries: int = 512, keys: int = 1100, **options: Any) -> Call:
    """A tile for nearly each of 132 SMs."""
    heads = 2 if device == "cpu" else 32
    call = make_call(1, queries, keys, heads, heads // 2, 128, dtype=dtype, device=device, **options)
    if explained := explained_on_hopper(call):
        assert (explained.plan.kernel, explained.plan.block_m, explained.plan.block_n) == TILE
    return call


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("queries", "keys"), [(512, 1100), (500, 1024), (449, 2049)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_lengths(device: str, dtype: torch.dtype, queries: int, keys: int, mask: dict[str, Any]) -> None:
    call = few_tiles(device, dtype, queries, keys, **mask)
    first, again = assert_matches_oracle(call, gradients_of=()), run_library(call)
    assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])


@pytest.mark.parametrize("place", [3, 1000])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scores_that_overflow(device: str, dtype: torch.dtype, place: int) -> None:
    call = few_tiles(device, dtype)
    call.k[0, place] = 80.0
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_hidden_values(device: str, dtype: torch.dtype) -> None:
    """Those that nobody sees change no bit."""
    call = few_tiles(device, dtype, window_size=(200, 0))
    expected = run_library(call)
    call.k[:, :380] = call.v[:, :380] = torch.nan
    found = run_library(call)
    assert torch.equal(found["out"], expected["out"]) and torch.equal(found["lse"], expected["lse"])
