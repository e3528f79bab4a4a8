"""The forward where query tiles are too few for the SMs: CTAs share a tile along its keys, and parts are combined.
On a CPU these are problems like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_ext
from tests.oracle import Call, assert_matches_oracle, make_call, random, run_library

HALF = [torch.bfloat16, torch.float16]
HEAD_DIMS = [(64, 64), (80, 72), (96, 96), (128, 128), (104, 40), (192, 128), (192, 192), (256, 256)]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (5000, 30)},
    "window to the left": {"window_size": (4000, -1)},
}


def keys_for(device: str, keys: int) -> int:
    """Enough of them on a GPU; few on a CPU, which splits no tile."""
    return keys if device == "cuda" else keys // 20


def long_call(device: str, queries: int, keys: int, heads: int, heads_kv: int, *dims: int, **options: Any) -> Call:
    """One that asks for split keys on Hopper: what ``explain`` says of it."""
    call = make_call(1, queries, keys_for(device, keys), heads, heads_kv, *dims, device=device, **options)
    plan = flash_ext.explain(call.q, call.k, call.v, **call.options).plan
    assert (plan.kernel == "sm90/forward") == (plan.key_splits.tiles > 0)
    assert plan.key_splits.tiles == 0 or any("split-KV" in reason for reason in plan.reasons)
    return call


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_few_query_tiles(device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, mask: dict[str, Any]) -> None:
    call = long_call(device, 200, 9000, 6, 2, head_dim, head_dim_v, dtype=dtype, **mask)
    first = assert_matches_oracle(call, gradients_of=())
    again = run_library(call)
    assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("queries", [1, 64, 130, 192, 320, 512, 900])
def test_numbers_of_queries(device: str, queries: int, mask: dict[str, Any]) -> None:
    """Whole tiles, the rest of a sequence, and 96 tiles, the small ones of which stay whole."""
    heads = 4 if device == "cpu" else 32
    call = long_call(device, queries, 8200, heads, heads // 4, 128, dtype=torch.bfloat16, **mask)
    assert_matches_oracle(call, gradients_of=())


def test_waves_before_the_split_ones(device: str) -> None:
    heads = 4 if device == "cpu" else 90
    call = long_call(device, 300, 8200, heads, heads // 2, 128, dtype=torch.bfloat16, causal=True)
    assert_matches_oracle(call, gradients_of=())


def test_sink(device: str) -> None:
    call = long_call(device, 100, 9000, 4, 1, 128, dtype=torch.bfloat16, causal=True)
    assert_matches_oracle(call.with_options(sink=random(4, device=device)), gradients_of=())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("place", [0, 0.3, 0.99])
def test_scores_that_overflow_in_one_part(device: str, dtype: torch.dtype, head_dim: int, place: float) -> None:
    call = long_call(device, 150, 9000, 4, 2, head_dim, dtype=dtype, causal=True)
    call.k[:, int(place * call.k.shape[1])] = 60.0
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_values_that_only_later_rows_see(device: str, head_dim: int, poison: float) -> None:
    """They reach those rows, and no other."""
    call = long_call(device, 200, 9000, 4, 2, head_dim, dtype=torch.bfloat16, causal=True)
    before = run_library(call)["out"]
    call.v[:, -40, :, 5] = poison
    after = run_library(call)["out"]
    assert not after[:, 160:, :, 5].isfinite().any()
    torch.testing.assert_close(after[:, :160], before[:, :160])
    torch.testing.assert_close(after[..., 6:], before[..., 6:])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_hidden_keys_and_values(device: str, poison: float) -> None:
    call = long_call(device, 200, 9000, 4, 2, 128, dtype=torch.bfloat16, window_size=(8000, -1))
    hidden = call.k.shape[1] - 200 - 8000
    if device == "cuda":
        call.k[:, :hidden] = call.v[:, :hidden] = poison
    assert_matches_oracle(call, gradients_of=())


def test_a_captured_graph(device: str) -> None:
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    call = long_call(device, 256, 9000, 8, 2, 128, dtype=torch.bfloat16, causal=True)
    expected = run_library(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_library(call)
    for value in found.values():
        value.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_scratch_memory_is_bounded(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU splits no tile")
    call = long_call(device, 2048, 65536, 32, 8, 128, dtype=torch.bfloat16, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_ext.attention(call.q, call.k, call.v, causal=True)
    assert torch.cuda.max_memory_allocated() - before < 2 * out.numel() * out.element_size() + (64 << 20)
