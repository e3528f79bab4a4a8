"""Attention over ranks, with each option: all ranks together are held against the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import flash_ext
from tests.integration.rank_pool import LAYOUTS, METHODS, OPTIONS, assert_matches
from tests.oracle import make_call


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_masks(pools: Any, kind: str, layout: str, method: str, device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    call = make_call(1, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=dtype, **OPTIONS[kind])
    assert_matches(pools(2, device), call, layout, method)


@pytest.mark.parametrize("method", METHODS)
def test_dtypes(pools: Any, method: str, dtype: torch.dtype, device: str) -> None:
    call = make_call(2, 64, 64, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=16, dtype=dtype, causal=True)
    assert_matches(pools(2, device), call, "zigzag", method)


@pytest.mark.parametrize(("layout", "method"), [("zigzag", "ring"), ("contiguous", "gather"), ("zigzag", "ulysses")])
@pytest.mark.parametrize("kind", ["causal", "window of both sides"])
def test_three_ranks(pools: Any, kind: str, layout: str, method: str, device: str) -> None:
    call = make_call(1, 60, 60, heads_q=6, heads_kv=3, head_dim=16, dtype=torch.float32, **OPTIONS[kind])
    assert_matches(pools(3, device), call, layout, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(16, 48), (48, 16)])
@pytest.mark.parametrize("top_left", [False, True])
def test_queries_and_keys_of_other_lengths(
    pools: Any, seqlen_q: int, seqlen_k: int, top_left: bool, method: str, device: str
) -> None:
    options: dict[str, Any] = dict(causal=True, top_left=top_left)
    call = make_call(1, seqlen_q, seqlen_k, heads_q=2, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(2, device), call, "contiguous", method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 4, 48, 48), (2, 1, 48, 48), (2, 4, 1, 48), (1, 1, 48, 1)])
def test_bias_and_sink(pools: Any, shape: tuple[int, ...], layout: str, method: str, device: str) -> None:
    options = dict(causal=True, bias=torch.randn(shape), sink=torch.randn(4))
    call = make_call(2, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(2, device), call, layout, method)


@pytest.mark.parametrize("method", METHODS)
def test_mask(pools: Any, method: str, device: str) -> None:
    mask = torch.rand(2, 1, 48, 48) < 0.6
    mask[:, :, 5] = False  # a query that sees nothing
    call = make_call(2, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, mask=mask, sink=torch.randn(4))
    assert_matches(pools(2, device), call, "zigzag", method)
    keys = torch.rand(2, 1, 1, 48) < 0.6
    assert_matches(pools(2, device), call.with_options(mask=keys), "contiguous", method)
    heads = torch.rand(2, 4, 48, 48) < 0.6
    assert_matches(pools(2, device), call.with_options(mask=heads), "zigzag", method)


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("heads", [1, 4])
def test_block_mask(pools: Any, heads: int, method: str, device: str) -> None:
    visible = torch.rand(1, heads, 128, 128) < 0.3
    visible &= (torch.rand(1, heads, 4, 4) < 0.5).repeat_interleave(32, 2).repeat_interleave(32, 3)
    mask = flash_ext.BlockMask.from_dense(visible, (32, 32))
    call = make_call(1, 128, 128, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, block_mask=mask)
    assert_matches(pools(2, device), replace(call, block_visible=visible), "zigzag", method)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_mask_whose_rows_of_blocks_do_not_divide_a_chunk(pools: Any, layout: str, device: str) -> None:
    """Only Ulysses has them, and "auto" takes it."""
    visible = torch.rand(1, 4, 96, 96) < 0.3
    mask = flash_ext.BlockMask.from_dense(visible, (32, 32))
    call = make_call(1, 96, 96, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, block_mask=mask)
    assert_matches(pools(2, device), replace(call, block_visible=visible), layout, "auto")


def test_alibi(pools: Any, device: str) -> None:
    call = make_call(1, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32)
    call = call.with_options(causal=True, alibi_slopes=torch.rand(4), window_size=(20, 0))
    for layout, method in itertools.product(LAYOUTS, ("auto", "ulysses")):
        assert_matches(pools(2, device), call, layout, method)
    assert_matches(pools(2, device), call.with_options(causal=False, window_size=(-1, -1)), "zigzag", "ulysses")
    call = make_call(2, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32)
    call = call.with_options(causal=True, alibi_slopes=torch.rand(2, 4))
    for method in ("gather", "ulysses"):
        assert_matches(pools(2, device), call, "zigzag", method)


@pytest.mark.parametrize("needed", [("q",), ("k",), ("v", "sink"), ("bias",)])
@pytest.mark.parametrize("method", METHODS)
def test_some_gradients(pools: Any, method: str, needed: tuple[str, ...], device: str) -> None:
    options = dict(causal=True, bias=torch.randn(1, 4, 48, 48), sink=torch.randn(4))
    call = make_call(1, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(2, device), call, "zigzag", method, needed)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_of_lse_alone(pools: Any, method: str, device: str) -> None:
    call = make_call(1, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, causal=True)
    call = replace(call.with_random_gradients(), grad_out=None)
    assert_matches(pools(2, device), call, "contiguous", method, ("q", "k"))
