"""Nested tensors of the jagged layout in ``attention`` and ``scaled_dot_product_attention``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.nn.attention.bias import causal_upper_left

import flash_ext
from tests.oracle import cumulative, random

LENGTHS, LENGTHS_K = [5, 11, 1, 40], [7, 11, 3, 33]


def jagged(
    lengths: Sequence[int],
    heads: int = 4,
    head_dim: int = 16,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    offsets: Tensor | None = None,
) -> tuple[Any, Tensor]:
    """(nested tensor, the packed leaf that it is a view of)."""
    values = random(sum(lengths), heads, head_dim, dtype=dtype, device=device).requires_grad_()
    offsets = cumulative(lengths, device).long() if offsets is None else offsets
    return nested_tensor_from_jagged(values, offsets), values


def triple(device: str, lengths_k: Sequence[int] | None = None, heads_kv: int = 4, head_dim_v: int = 16) -> list[Any]:
    """[q, k, v, leaves]: self-attention without ``lengths_k``."""
    q, leaf_q = jagged(LENGTHS, device=device)
    offsets = q.offsets() if lengths_k is None else cumulative(lengths_k, device).long()
    lengths_k = LENGTHS if lengths_k is None else lengths_k
    k, leaf_k = jagged(lengths_k, heads_kv, device=device, offsets=offsets)
    v, leaf_v = jagged(lengths_k, heads_kv, head_dim_v, device=device, offsets=offsets)
    return [q, k, v, (leaf_q, leaf_k, leaf_v)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths_k", [None, LENGTHS_K], ids=["self", "cross"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (6, 2)}, {"softcap": 5.0, "softmax_scale": 0.3}, {"dropout_p": 0.3}],
    ids=str,
)
def test_is_attention_of_packed_sequences(device: str, options: dict[str, Any], lengths_k: list[int] | None) -> None:
    q, k, v, leaves = triple(device, lengths_k, heads_kv=2, head_dim_v=24)
    if "dropout_p" in options:
        options = {**options, "rng_state": flash_ext.draw_rng_state(device)}
    out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = flash_ext.attention(
        *leaves,
        cu_seqlens_q=q.offsets().int(),
        cu_seqlens_k=k.offsets().int(),
        max_seqlen_q=max(LENGTHS),
        max_seqlen_k=max(lengths_k or LENGTHS),
        return_lse=True,
        **options,
    )
    assert out.is_nested and out.shape == (4, q.shape[1], 4, 24) and out.offsets() is q.offsets()
    assert lse.is_nested and lse.shape == (4, 4, q.shape[1])
    assert_same((out.values(), lse.values()), (expected, expected_lse))
    weight = torch.randn_like(expected)
    assert_same(
        torch.autograd.grad((out.values() * weight).sum() + lse.values().sum(), leaves),
        torch.autograd.grad((expected * weight).sum() + expected_lse.sum(), leaves),
    )


def test_bias_counts_from_the_start_of_each_sequence(device: str) -> None:
    q, k, v, leaves = triple(device)
    bias = random(1, 4, 40, 40, device=device).requires_grad_()
    out = flash_ext.attention(q, k, v, bias=bias)
    sequences = [
        flash_ext.attention(*(x[None] for x in part), bias=bias[:, :, : len(part[0]), : len(part[0])])
        for part in zip(*(leaf.split(LENGTHS) for leaf in leaves), strict=True)
    ]
    expected = torch.cat([x[0] for x in sequences])
    assert_same([out.values()], [expected])
    assert_same(
        torch.autograd.grad(out.values().sum(), (*leaves, bias)),
        torch.autograd.grad(expected.sum(), (*leaves, bias)),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_holes_between_sequences(device: str, causal: bool) -> None:
    padded = random(3, 9, 4, 16, device=device)
    lengths = torch.tensor([3, 9, 5], device=device)
    x = torch.nested.narrow(padded, 1, torch.zeros_like(lengths), lengths, layout=torch.jagged)
    assert x.lengths() is not None
    out = flash_ext.attention(x, x, x, causal=causal)
    for found, rows in zip(out.unbind(), x.unbind(), strict=True):
        assert_same([found[None]], [flash_ext.attention(*[rows[None]] * 3, causal=causal)])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": ...}], ids=["plain", "causal", "masked"])
def test_sdpa(device: str, options: dict[str, Any]) -> None:
    q, k, v, _ = triple(device, LENGTHS_K)
    expected = {"causal": options.get("is_causal", False), "top_left": True}
    if "attn_mask" in options:
        mask = torch.rand(40, 33, device=device) < 0.8
        options, expected = {"attn_mask": mask}, expected | {"mask": mask[None, None]}
    turned = (x.transpose(1, 2) for x in (q, k, v))
    out = flash_ext.scaled_dot_product_attention(*turned, **options)
    assert out.shape == (4, 4, q.shape[1], 16)
    assert_same([out.transpose(1, 2).values()], [flash_ext.attention(q, k, v, **expected).values()])


@pytest.mark.parametrize("head_dim_v", [5, 16])
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 1, 1), (1, 4, 4), (4, 4, 1)], ids=str)
def test_sdpa_takes_what_it_takes_of_dense_tensors(device: str, heads: tuple[int, ...], head_dim_v: int) -> None:
    """Any head_dim, and heads that broadcast."""
    assert_sdpa_is_that_of_each_sequence(device, heads, (5, 5, head_dim_v))


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 2, 4), (4, 1, 2)], ids=str)
def test_sdpa_groups_heads_where_it_may(device: str, heads: tuple[int, ...]) -> None:
    assert_sdpa_is_that_of_each_sequence(device, heads, (16, 16, 16), enable_gqa=True)
    made = nested_heads_first(device, heads, (16, 16, 16))[0]
    with pytest.raises(RuntimeError, match=r"heads \(without enable_gqa\) of query, key and value must broadcast"):
        flash_ext.scaled_dot_product_attention(*made)


def nested_heads_first(device: str, heads: Sequence[int], head_dims: Sequence[int]) -> tuple[list[Any], list[Tensor]]:
    offsets = cumulative(LENGTHS, device).long()
    made = [jagged(LENGTHS, *sizes, device=device, offsets=offsets) for sizes in zip(heads, head_dims, strict=True)]
    return [x.transpose(1, 2) for x, _ in made], [leaf for _, leaf in made]


def assert_sdpa_is_that_of_each_sequence(
    device: str, heads: Sequence[int], head_dims: Sequence[int], **options: Any
) -> None:
    made, leaves = nested_heads_first(device, heads, head_dims)
    out = flash_ext.scaled_dot_product_attention(*made, **options).transpose(1, 2).values()
    dense = [
        flash_ext.scaled_dot_product_attention(*(x[None].transpose(1, 2) for x in sequence), **options)
        for sequence in zip(*(leaf.split(LENGTHS) for leaf in leaves), strict=True)
    ]
    expected = torch.cat([x[0].transpose(0, 1) for x in dense])
    assert_same([out], [expected])
    assert_same(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves))


def test_is_planned(device: str) -> None:
    """``supports`` and ``explain`` know what ``attention`` takes."""
    q, k, v, leaves = triple(device)
    lengths = dict(cu_seqlens_q=q.offsets().int(), cu_seqlens_k=k.offsets().int())
    for operation in ("forward", "backward"):
        assert flash_ext.supports(q, k, v, operation=operation, causal=True) == (True, "")
        packed = flash_ext.explain(*leaves, operation=operation, causal=True, **lengths)
        assert str(flash_ext.explain(q, k, v, operation=operation, causal=True)) == str(packed)
    ok, reason = flash_ext.supports(q, k, v, softcap=-1.0)
    assert not ok and "softcap must" in reason
    ok, reason = flash_ext.supports(q, k, v, operation="weights")
    assert not ok and "q must be a Tensor of no class of its own" in reason


@pytest.mark.parametrize("lengths_k", [None, LENGTHS_K], ids=["self", "cross"])
def test_compiles_in_one_graph(device: str, lengths_k: list[int] | None) -> None:
    q, k, v, leaves = triple(device, lengths_k)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_ext.attention(q, k, v, causal=True)
        assert isinstance(out, Tensor)
        return out * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, expected = compiled(q, k, v), attend(q, k, v)
    assert found.shape[1] == q.shape[1]
    assert_same([found.values()], [expected.values()])
    assert_same(torch.autograd.grad(found.values().sum(), leaves), torch.autograd.grad(expected.values().sum(), leaves))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": ...}, {"scale": 0.3}], ids=str)
def test_sdpa_compiles_in_one_graph(device: str, options: dict[str, Any]) -> None:
    q, k, v, leaves = triple(device)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    if "attn_mask" in options:
        options = {"attn_mask": torch.rand(40, 40, device=device) < 0.8}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_ext.scaled_dot_product_attention(query, key, value, **options) * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, expected = compiled(query, key, value), attend(query, key, value)
    assert_same([found.values()], [expected.values()])
    assert_same(torch.autograd.grad(found.values().sum(), leaves), torch.autograd.grad(expected.values().sum(), leaves))


def test_autocast(device: str) -> None:
    q, k, v, _ = triple(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_ext.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.values().float(), flash_ext.attention(q, k, v).values(), rtol=3e-2, atol=3e-2)


def test_errors(device: str) -> None:
    q, k, v, leaves = triple(device)
    other, _ = jagged(LENGTHS, device=device)
    longer, _ = jagged([*LENGTHS, 3], device=device)
    strided = torch.nested.nested_tensor([x for x in leaves[0].detach().split(LENGTHS)])
    with pytest.raises(TypeError, match=r"k must be a nested tensor, as the others are, got shape \(57, 4, 16\)"):
        flash_ext.attention(q, leaves[1], v)
    with pytest.raises(RuntimeError, match="v must have the offsets of k"):
        flash_ext.attention(q, k, other)
    with pytest.raises(RuntimeError, match="k must have the batch of q: expected 4 sequences, got 5"):
        flash_ext.attention(q, longer, longer)
    with pytest.raises(RuntimeError, match=r"q must be a nested tensor with layout=torch\.jagged"):
        flash_ext.attention(strided, strided, strided)
    with pytest.raises(
        RuntimeError, match=r"q must be \(batch, jagged seqlen, heads, head_dim\), .* number 2 is jagged"
    ):
        flash_ext.attention(q.transpose(1, 2), k, v)
    with pytest.raises(TypeError, match="cu_seqlens_q must be None with nested tensors"):
        flash_ext.attention(q, k, v, cu_seqlens_q=cumulative(LENGTHS, device))


def test_errors_of_sdpa(device: str) -> None:
    """In the words of its caller."""
    q, k, v, leaves = triple(device)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))

    def refused(error: type[Exception], match: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(error, match=match):
            flash_ext.scaled_dot_product_attention(*arguments, **options)

    mask = torch.ones(40, 40, device=device)
    refused(TypeError, "key must be a nested tensor", query, leaves[1], leaves[2])
    refused(TypeError, "key must be a Tensor, got None", query, None, value)
    refused(RuntimeError, r"query must be \(batch, heads, jagged seqlen, head_dim\)", q, k, v)
    refused(RuntimeError, "attn_mask must broadcast", query, key, value, torch.ones(3, device=device))
    refused(RuntimeError, "attn_mask must be None with is_causal=True", query, key, value, mask, is_causal=True)
    refused(TypeError, "attn_mask must be .* got a CausalBias: is_causal", query, key, value, causal_upper_left(40, 40))
    refused(TypeError, "attn_mask must be a Tensor or None of no class", query, key, value, query)
    refused(RuntimeError, "^flash_ext: scale must be finite", query, key, value, scale=math.nan)
