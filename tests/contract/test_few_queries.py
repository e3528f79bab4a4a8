"""Sequences of few queries, many of them: on Hopper small tiles, so that no warpgroup is without rows.

Dense ones of up to 128 queries and keys run another kernel (test_forward_short.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_ext
from tests.oracle import (
    Call,
    assert_matches_oracle,
    explained_on_hopper,
    int32,
    make_call,
    make_varlen_call,
    random,
    run_library,
)

HALF = [torch.bfloat16, torch.float16]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (50, 20)},
}
TILES = {64: (64, 64), 128: (256, 32)}  # by head_dim: queries and keys


def check(call: Call, head_dim: int) -> None:
    """In the tiles that are meant, and the same bits again."""
    if explained := explained_on_hopper(call):
        plan = explained.plan
        assert (plan.kernel, plan.block_m, plan.block_n) == ("sm90/forward", *TILES[head_dim])
    first = assert_matches_oracle(call, gradients_of=())
    again = run_library(call)
    assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])


def sequences(device: str) -> int:
    """More tiles than a GPU works on at a time."""
    return 2 if device == "cpu" else 40


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(
    ("head_dim", "queries", "keys"),
    [
        (64, 1, 129),
        (64, 64, 300),
        (64, 100, 300),
        (64, 320, 33),
        (64, 300, 384),
        (64, 384, 384),
        (128, 193, 193),
        (128, 197, 33),
        (128, 256, 256),
    ],
)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_lengths(device: str, dtype: torch.dtype, head_dim: int, queries: int, keys: int, mask: dict[str, Any]) -> None:
    heads = 2 if device == "cpu" else 16
    sizes = (sequences(device), queries, keys, heads, heads // 2, head_dim)
    check(make_call(*sizes, dtype=dtype, device=device, **mask), head_dim)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (40, 64), (64, 24)], ids=str)
def test_narrow_heads(device: str, head_dim: int, head_dim_v: int) -> None:
    call = make_call(sequences(device), 300, 90, 16, 16, head_dim, head_dim_v, dtype=torch.bfloat16, device=device)
    check(call.with_options(sink=random(16, device=device)), 64)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("place", [3, 100])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scores_that_overflow(device: str, dtype: torch.dtype, head_dim: int, place: int) -> None:
    call = make_call(
        sequences(device), 320 if head_dim == 64 else 256, 130, 16, 16, head_dim, dtype=dtype, device=device
    )
    call.k[1, place] = 80.0
    check(call, head_dim)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hidden_values(device: str, head_dim: int) -> None:
    queries = 128 if head_dim == 64 else 256
    call = make_call(sequences(device), queries, 130, 4, 2, head_dim, dtype=torch.bfloat16, device=device)
    lengths = [130, 7] + [64] * (sequences(device) - 2)
    call = call.with_options(seqused_k=int32(lengths, device))
    call.v[1, 7:] = call.k[1, 7:] = torch.nan
    check(call, head_dim)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("bound", [128, 4096])
def test_packed_sequences(device: str, bound: int, mask: dict[str, Any]) -> None:
    """With a list of tiles where the bound on the lengths is loose, and without one."""
    count = 8 if device == "cpu" else 90
    lengths = [(37 * k) % 128 + 1 for k in range(count)]
    call = make_varlen_call(lengths, lengths, device, heads_q=8, heads_kv=4, head_dim=64, dtype=torch.bfloat16, **mask)
    check(call.with_options(max_seqlen_q=min(bound, call.q.shape[0]), max_seqlen_k=min(bound, call.k.shape[0])), 64)


def test_a_captured_graph_of_copies_and_calls(device: str) -> None:
    """A call behind a copy, a fill and another call: it starts beside the end of none but the last."""
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    x = random(40, 320, 8, 64, dtype=torch.bfloat16, device=device)
    expected = flash_ext.attention(flash_ext.attention(x, x, x), x, x)
    place, out = torch.empty_like(x), torch.empty_like(x)
    flash_ext.attention(x, x, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        place.zero_()
        place.copy_(x)
        out.copy_(flash_ext.attention(flash_ext.attention(place, place, place), place, place))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)


def test_calls_that_follow_each_other(device: str) -> None:
    """Each starts beside the end of the one before, whose out it reads."""
    x = random(sequences(device), 320, 8, 64, dtype=torch.bfloat16, device=device)
    found, expected = x, x
    for _ in range(6):
        found = flash_ext.attention(found, found, found)
    for _ in range(6):
        expected = flash_ext.attention(expected, expected, expected)
        if device == "cuda":
            torch.cuda.synchronize()
    assert torch.equal(found, expected)
