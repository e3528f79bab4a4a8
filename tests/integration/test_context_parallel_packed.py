"""Attention over ranks, of packed sequences that lie across them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext.integrations.distributed import context_parallel_attention, split_sequence
from tests.integration.rank_pool import LAYOUTS, OPTIONS, assert_matches, refusal
from tests.oracle import cumulative, make_call


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["causal", "window", "narrow", "full", "alibi", "sink"])
def test_varlen(pools: Any, kind: str, layout: str, method: str, device: str) -> None:
    """Sequences of which some lie on both ranks, and some are empty."""
    options: dict[str, Any] = {"alibi": {"causal": True, "alibi_slopes": torch.rand(4)}, **OPTIONS}.get(kind, {})
    if kind == "narrow":  # the sequences reach over more ranks than the window
        options = {"window_size": (3, 0)}
    if kind == "sink":
        options = {"causal": True, "sink": torch.randn(4)}
    cu_seqlens = cumulative([5, 0, 30, 1, 12])
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=30, max_seqlen_k=30)
    call = make_call(
        seqlen_q=48, seqlen_k=48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **lengths, **options
    )
    assert_matches(pools(2, device), call, layout, method)


@pytest.mark.parametrize("alibi", [False, True])
def test_keys_begin_behind_the_start_of_a_sequence(pools: Any, alibi: bool, device: str) -> None:
    """A window so short that the last rank has only the end of a sequence's keys."""
    cu_seqlens = cumulative([5, 0, 47, 8])
    options: dict[str, Any] = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, window_size=(3, 0))
    options |= {"alibi_slopes": torch.rand(4)} if alibi else {}
    call = make_call(seqlen_q=60, seqlen_k=60, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(3, device), call, "contiguous", "gather")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 4, 30, 30), (1, 1, 30, 30), (5, 1, 1, 30), (1, 4, 30, 1)])
def test_varlen_with_bias_and_mask(pools: Any, shape: tuple[int, ...], layout: str, device: str) -> None:
    """Both count from the start of each sequence, and each rank has all of them."""
    cu_seqlens = cumulative([5, 0, 30, 1, 12])
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=30, max_seqlen_k=30)
    options = dict(causal=True, bias=torch.randn(shape), mask=torch.rand(shape) < 0.7)
    call = make_call(
        seqlen_q=48, seqlen_k=48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **lengths, **options
    )
    assert_matches(pools(2, device), call, layout, "ulysses")
    for name in ("bias", "mask"):
        one = replace(
            call, options={n: value for n, value in call.options.items() if n not in {"bias", "mask"} - {name}}
        )
        message = f"{name} of packed sequences is not supported with method 'gather', but with 'ulysses'"
        assert message in refusal(pools(2, device), one, layout=layout, method="gather")


def poisoned(device: str) -> dict[str, Any]:
    """Attention of rank 0 while places of keys that did not travel hold Inf and NaN, and of all on one rank."""
    from flash_ext.integrations.distributed import gather

    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 11, 40, 64], dtype=torch.int32, device=device)
    options: dict[str, Any] = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True, window_size=(5, 0))
    q, k, v, gradient = torch.randn(4, 64, 2, 16, device=device)
    poisons: list[float] = []

    def poison(like: Tensor, shape: Any) -> Tensor:
        poisons.append([torch.nan, torch.inf][len(poisons) % 2])
        return like.new_full(shape, poisons[-1])

    def results(attend: Any, *inputs: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

    unfilled, gather.unfilled = gather.unfilled, poison
    try:
        parts = [split_sequence(x, None, layout="zigzag", dim=0) for x in (q, k, v, gradient)]
        method = dict(layout="zigzag", method="gather", **options)
        found = results(lambda *x: context_parallel_attention(*x, None, **method), *parts)
    finally:
        gather.unfilled = unfilled
    whole = results(lambda *x: flash_ext.attention(*x, **options), q, k, v, gradient)
    right = [split_sequence(x, None, layout="zigzag", dim=0) for x in whole]
    return {"found": [x.cpu() for x in found], "right": [x.cpu() for x in right], "poisons": len(poisons)}


def test_keys_that_did_not_travel_have_no_effect(pools: Any, device: str) -> None:
    """Rank 0 has the first and the last chunk, and a short window does not reach between them."""
    answer = pools(2, device).run(poisoned)
    assert answer["poisons"] == 4  # of keys and of values, forward and backward
    for found, right in zip(answer["found"], answer["right"], strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("top_left", "method"), [(False, "gather"), (False, "ulysses"), (True, "ulysses")])
def test_varlen_of_other_lengths(pools: Any, top_left: bool, method: str, device: str) -> None:
    lengths_q, lengths_k = [5, 30, 13], [20, 4, 8]
    options: dict[str, Any] = dict(cu_seqlens_q=cumulative(lengths_q), cu_seqlens_k=cumulative(lengths_k))
    options |= dict(max_seqlen_q=30, max_seqlen_k=20, causal=True, top_left=top_left)
    call = make_call(seqlen_q=48, seqlen_k=32, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(2, device), call, "contiguous", method)
