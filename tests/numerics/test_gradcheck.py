"""Gradients against finite differences, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests import reference
from tests.oracle import cumulative, int32


def double(*shape: int) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * 0.7 + 0.2).requires_grad_()


def qkv(seqlen_q: int = 3, seqlen_k: int = 4, heads_q: int = 2, heads_kv: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return double(1, seqlen_q, heads_q, 8), double(1, seqlen_k, heads_kv, 8), double(1, seqlen_k, heads_kv, 8)


def check(function: Any, *inputs: Tensor) -> None:
    assert torch.autograd.gradcheck(function, inputs)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "top_left": True},
    "window": {"window_size": (1, 1)},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([0.3, 0.1])},
    "mask": {"mask": torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])[None, None]},
    "dropout": {"dropout_p": 0.4, "rng_state": torch.tensor([11, 5])},
    "seqused": {"seqused_q": int32([2]), "seqused_k": int32([3])},
    "all": {
        "causal": True,
        "softcap": 2.0,
        "alibi_slopes": torch.tensor([0.3, 0.1]),
        "dropout_p": 0.3,
        "rng_state": torch.tensor([1, 2]),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("returned", ["out", "lse", "both"])
def test_attention(options: dict[str, Any], returned: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> Any:
        out, lse = flash_ext.attention(q, k, v, bias=bias, sink=sink, return_lse=True, **options)
        lse = torch.where(torch.isneginf(lse), 0, lse)  # finite differences of -inf are NaN
        return {"out": out, "lse": lse, "both": (out, lse)}[returned]

    check(function, *qkv(), double(1, 2, 3, 4), double(2))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 4), (1, 1, 3, 1), (1, 2, 3, 4)], ids=str)
def test_broadcast_bias(shape: tuple[int, ...]) -> None:
    q, k, v = (t.detach() for t in qkv())
    check(lambda bias: flash_ext.attention(q, k, v, bias=bias), double(*shape))


def test_rows_that_see_nothing() -> None:
    check(lambda q, k, v, sink: flash_ext.attention(q, k, v, causal=True, sink=sink), *qkv(5, 3), double(2))


def test_packed_sequences() -> None:
    cu_q, cu_k = cumulative([2, 0, 3]), cumulative([3, 1, 2])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = flash_ext.attention(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=3, max_seqlen_k=3, causal=True, return_lse=True
        )
        return out, torch.where(torch.isneginf(lse), 0, lse)

    check(function, double(5, 2, 8), double(6, 1, 8), double(6, 1, 8))


def test_block_mask() -> None:
    see = torch.tensor([[True, False, True, True], [False, True, True, False], [True] * 4])[None, None]
    block_mask = flash_ext.BlockMask(*reference.block_mask_tensors(see, 16, 32), seqlen_q=3, seqlen_k=4)
    check(lambda q, k, v: flash_ext.attention(q, k, v, block_mask=block_mask), *qkv())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_attention_weights(options: dict[str, Any]) -> None:
    def function(q: Tensor, k: Tensor, lse: Tensor, bias: Tensor) -> Tensor:
        return flash_ext.attention_weights(q, k, lse, bias=bias, **options)

    q, k, _ = qkv()
    check(function, q, k, double(1, 2, 3), double(1, 1, 3, 4))


def test_signed_attention_weights() -> None:
    q, k, _ = qkv()
    dropout = OPTIONS["dropout"]
    check(lambda q, k, lse: flash_ext.attention_weights(q, k, lse, signed=True, **dropout), q, k, double(1, 2, 3))


def test_weights_through_the_lse_they_came_from() -> None:
    """The whole path of a module that returns its weights: lse is not a constant."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = flash_ext.attention(q, k, v, causal=True, return_lse=True)
        return out, flash_ext.attention_weights(q, k, lse, causal=True)

    check(function, *qkv(3, 3))


@pytest.mark.parametrize("splits", [1, 3])
def test_merge(splits: int) -> None:
    check(flash_ext.merge, double(splits, 1, 3, 2, 5), double(splits, 1, 2, 3))


def test_merge_with_a_part_that_saw_nothing() -> None:
    nothing = torch.zeros(2, 1, 2, 3, dtype=torch.bool)
    nothing[0, :, :, 1] = True

    def function(outs: Tensor, lses: Tensor) -> Any:
        return flash_ext.merge(outs, torch.where(nothing, -torch.inf, lses))

    check(function, double(2, 1, 3, 2, 5), double(2, 1, 2, 3))


def test_attention_over_cut_keys() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        parts = [flash_ext.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 1), slice(1, None))]
        return flash_ext.merge(*zip(*parts, strict=True))

    check(function, *qkv())
