"""``flash_ext.scaled_dot_product_attention`` against torch's."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flash_ext
from tests.oracle import random


def qkv(
    device: str, lead: tuple[int, ...] = (2, 4), seqlens: tuple[int, int] = (9, 13), dims: tuple[int, int] = (16, 16)
) -> list[Tensor]:
    shapes = [(*lead, seqlens[0], dims[0]), (*lead, seqlens[1], dims[0]), (*lead, seqlens[1], dims[1])]
    return [
        random(*shape, dtype=torch.float64 if device == "cpu" else torch.float32, device=device) for shape in shapes
    ]


def assert_same(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """Output and gradients equal torch's math, up to rounding."""
    floating = [t for t in (query, key, value, attn_mask) if t is not None and t.is_floating_point()]
    floating = [t.requires_grad_() for t in floating]
    results = []
    for function in (flash_ext.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = function(query, key, value, attn_mask, **options)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
        results.append((out, *torch.autograd.grad((out * weight).sum(), floating)))
    tolerance = {} if query.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    return results[0][0]


def test_signature_is_torchs() -> None:
    parameters = inspect.signature(flash_ext.scaled_dot_product_attention).parameters
    assert list(parameters) == [
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
        "scale",
        "enable_gqa",
    ]
    assert [p.default for p in parameters.values()][3:] == [None, 0.0, False, None, False]
    keyword_only = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == ["scale", "enable_gqa"]


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dims", [(16, 16), (5, 5), (12, 20), (1, 3)], ids=str)
def test_shapes(device: str, lead: tuple[int, ...], is_causal: bool, dims: tuple[int, int]) -> None:
    out = assert_same(*qkv(device, lead, dims=dims), is_causal=is_causal)
    assert out.shape == (*lead, 9, dims[1])


@pytest.mark.parametrize("seqlens", [(9, 13), (13, 9), (1, 7), (7, 1)], ids=str)
def test_causal_starts_at_the_top_left(device: str, seqlens: tuple[int, int]) -> None:
    assert_same(*qkv(device, seqlens=seqlens), is_causal=True)


@pytest.mark.parametrize("floating", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize(
    "shape",
    [(9, 13), (1, 13), (9, 1), (1, 1), (4, 9, 13), (1, 9, 13), (2, 1, 1, 13), (2, 4, 9, 13), (1, 4, 1, 13)],
    ids=str,
)
def test_masks_broadcast(device: str, shape: tuple[int, ...], floating: bool) -> None:
    tensors = qkv(device)
    visible = torch.rand(shape, device=device) < 0.7
    visible[..., 0] = True
    assert_same(*tensors, random(*shape, dtype=tensors[0].dtype, device=device) if floating else visible)


@pytest.mark.parametrize(
    "shape", [(9, 13), (4, 1, 13), (3, 1, 9, 1), (2, 1, 1, 9, 13), (1, 3, 4, 9, 13), (2, 3, 4, 9, 13)], ids=str
)
def test_masks_broadcast_over_leading_dimensions(device: str, shape: tuple[int, ...]) -> None:
    tensors = qkv(device, (2, 3, 4))
    assert_same(*tensors, random(*shape, dtype=tensors[0].dtype, device=device))


def test_mask_of_one_batch_of_heads(device: str) -> None:
    tensors = qkv(device, (3,))
    assert_same(*tensors, torch.rand(3, 9, 13, device=device) < 0.9)
    assert_same(*(t[0] for t in tensors), torch.rand(9, 13, device=device) < 0.9)


@pytest.mark.parametrize("lengths", [(4, 2, 2), (4, 1, 1), (4, 2, 1), (4, 4, 2), (6, 3, 3)], ids=str)
@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=str)
def test_gqa(device: str, lengths: tuple[int, int, int], lead: tuple[int, ...]) -> None:
    tensors = [qkv(device, (*lead, heads))[i] for i, heads in enumerate(lengths)]
    assert_same(*tensors, enable_gqa=True)


@pytest.mark.parametrize("lead_q", [(2, 4), (1, 4), (2, 1), (1, 1), (4,)], ids=str)
@pytest.mark.parametrize("lead_k", [(2, 4), (1, 4), (2, 1), (1, 1), (4,)], ids=str)
def test_leading_dimensions_broadcast(device: str, lead_q: tuple[int, ...], lead_k: tuple[int, ...]) -> None:
    (query, _, _), (_, key, value) = qkv(device, lead_q), qkv(device, lead_k)
    assert_same(query, key, value)
    assert_same(query, key, value[:1] if value.dim() > 3 else value)


@pytest.mark.parametrize("scale", [None, 0.5, 1.0])
def test_scale_comes_from_the_head_dim_before_padding(device: str, scale: float | None) -> None:
    assert_same(*qkv(device, dims=(5, 5)), scale=scale)


def test_strided_inputs(device: str) -> None:
    query, key, value = qkv(device)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key)]
    assert_same(*turned, value.transpose(-1, -2).contiguous().transpose(-1, -2))
    assert_same(query, key, value[..., :1].expand(value.shape).detach())


@pytest.mark.parametrize("dims", [(16, 16), (5, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("lead", [(2, 4), (2, 1), (1, 1)], ids=str)
def test_dimensions_in_any_memory_order(device: str, lead: tuple[int, ...], dims: tuple[int, int]) -> None:
    """Padding keeps the order of some, in which the padded dimension is not contiguous."""
    for order in itertools.permutations(range(4)):
        back = sorted(range(4), key=order.__getitem__)
        assert_same(*(x.permute(order).contiguous().permute(back) for x in qkv(device, lead, (9, 1), dims)))


def test_no_query_sees_nothing_as_nan(device: str) -> None:
    tensors = [t.requires_grad_() for t in qkv(device)]
    mask = torch.ones(9, 13, dtype=torch.bool, device=device)
    mask[3] = False
    for attn_mask in (mask, torch.zeros(9, 13, device=device).masked_fill(~mask, -torch.inf)):
        out = flash_ext.scaled_dot_product_attention(*tensors, attn_mask)
        assert not out[:, :, 3].any()
        gradients = torch.autograd.grad(out.sum(), tensors)
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert not gradients[0][:, :, 3].any()


def test_mask_of_another_floating_dtype(device: str) -> None:
    tensors = [t.to(torch.bfloat16) for t in qkv(device)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        mask = torch.zeros(9, 13, dtype=dtype, device=device).masked_fill(torch.rand(9, 13, device=device) < 0.3, -1e4)
        out = flash_ext.scaled_dot_product_attention(*tensors, mask)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(*tensors, mask.bfloat16()), rtol=2e-2, atol=2e-2)


def test_dropout(device: str) -> None:
    query, key, value = qkv(device, seqlens=(64, 64))
    torch.manual_seed(3)
    out = flash_ext.scaled_dot_product_attention(query, key, torch.ones_like(value), dropout_p=0.25)
    assert not torch.equal(out, torch.ones_like(out))
    assert abs(out.mean().item() - 1.0) < 0.02
    torch.manual_seed(3)
    again = flash_ext.scaled_dot_product_attention(query, key, torch.ones_like(value), dropout_p=0.25)
    assert torch.equal(out, again)


@pytest.mark.parametrize("lengths", list(itertools.product([0, 3], repeat=2)), ids=str)
@pytest.mark.parametrize("lead", [(2, 4), (0, 4)], ids=str)
def test_empty(device: str, lead: tuple[int, ...], lengths: tuple[int, int]) -> None:
    query, key, value = qkv(device, lead, lengths)
    out = flash_ext.scaled_dot_product_attention(query, key, value)
    assert out.shape == (*lead, lengths[0], 16)
    if lengths[1] == 0:
        assert not out.any()


BIASES = {"upper_left": causal_upper_left, "lower_right": causal_lower_right}


@pytest.mark.parametrize("seqlens", [(9, 9), (9, 13), (13, 9), (1, 7)], ids=str)
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_bias(device: str, name: str, seqlens: tuple[int, int]) -> None:
    """Torch's rule, which is a tensor without content. Queries that see nothing give 0."""
    query, key, value = (t.requires_grad_() for t in qkv(device, seqlens=seqlens))
    visible = BIASES[name](*seqlens)._materialize(torch.device(device))
    dense = flash_ext.scaled_dot_product_attention(query, key, value, visible)
    out = flash_ext.scaled_dot_product_attention(query, key, value, BIASES[name](*seqlens))
    found, expected = ([t, *torch.autograd.grad(t.sum(), (query, key, value))] for t in (out, dense))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if visible.any(-1).all():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            theirs = F.scaled_dot_product_attention(query, key, value, visible)
        torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-4)


def test_causal_bias_compiles(device: str) -> None:
    """One function for both: what the bias says is guarded."""
    query, key, value = qkv(device)
    compiled = torch.compile(flash_ext.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    for make in (*BIASES.values(), causal_upper_left):
        expected = flash_ext.scaled_dot_product_attention(query, key, value, make(9, 13))
        torch.testing.assert_close(compiled(query, key, value, make(9, 13)), expected)


def test_causal_bias_of_other_lengths(device: str) -> None:
    query, key, value = qkv(device)
    for wrong in (causal_upper_left(9, 9), causal_lower_right(13, 9), causal_lower_right(5, 5)):
        with pytest.raises(RuntimeError, match=r"attn_mask must be made for .* \(9, 13\), got a CausalBias for"):
            flash_ext.scaled_dot_product_attention(query, key, value, wrong)
    with pytest.raises(RuntimeError, match="attn_mask must be None with is_causal"):
        flash_ext.scaled_dot_product_attention(query, key, value, causal_upper_left(9, 13), is_causal=True)


def test_errors(device: str) -> None:
    query, key, value = qkv(device)
    mask = torch.ones(9, 13, dtype=torch.bool, device=device)
    sdpa = flash_ext.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="attn_mask must be None with is_causal"):
        sdpa(query, key, value, mask, is_causal=True)
    with pytest.raises(RuntimeError, match="attn_mask must be bool or floating"):
        sdpa(query, key, value, mask.int())
    with pytest.raises(RuntimeError, match="attn_mask must broadcast"):
        sdpa(query, key, value, mask[0])
    with pytest.raises(RuntimeError, match="attn_mask must broadcast"):
        sdpa(query, key, value, mask[None, None, None])
    with pytest.raises(RuntimeError, match=r"attn_mask must broadcast to .* = \(2, 4, 9, 13\), got shape \(5, 13\)"):
        sdpa(query, key, value, mask[:5])
    with pytest.raises(RuntimeError, match="attn_mask must broadcast"):
        sdpa(query, key, value, mask.expand(3, 1, 9, 13))
    with pytest.raises(RuntimeError, match="value must have as many rows as key"):
        sdpa(query, key, value[..., :5, :])
    with pytest.raises(TypeError, match="key must be a Tensor"):
        sdpa(query, None, value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dropout_p must be a number, got None"):
        sdpa(query, key, value, dropout_p=None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="must divide query's, got 4, 3 and 3"):
        sdpa(query, key[:, :3], value[:, :3], enable_gqa=True)
    with pytest.raises(RuntimeError, match=r"heads .* must broadcast"):
        sdpa(query, key[:, :2], value[:, :2])
    with pytest.raises(RuntimeError, match="dimensions before the heads"):
        sdpa(query, torch.cat([key, key[:1]]), torch.cat([value, value[:1]]))
    with pytest.raises(RuntimeError, match="at least 3 dimensions"):
        sdpa(query, key[0, 0], value[0, 0])
    with pytest.raises(RuntimeError, match="dtype"):
        sdpa(query, key.half(), value)
    with pytest.raises(RuntimeError, match="dropout_p"):
        sdpa(query, key, value, dropout_p=1.5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((20, 17, 20), "key must have the head_dim of query: expected 20 .* 17"),
        ((0, 0, 8), "query must have a head_dim from 1 to 256"),
        ((8, 8, 0), "value must have a head_dim from 1 to 256"),
        ((257, 257, 8), "query must have a head_dim from 1 to 256, got shape .*257"),
    ],
)
def test_head_dims_are_checked_before_padding(device: str, sizes: tuple[int, int, int], message: str) -> None:
    tensors = [random(1, 2, 5, size, device=device) for size in sizes]
    with pytest.raises(RuntimeError, match=message):
        flash_ext.scaled_dot_product_attention(*tensors)


def test_autocast(device: str) -> None:
    tensors = [t.float() for t in qkv(device, dims=(5, 5))]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_ext.scaled_dot_product_attention(*tensors, is_causal=True)
        expected = F.scaled_dot_product_attention(*tensors, is_causal=True)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_compiles_in_one_graph(device: str) -> None:
    tensors = qkv(device, dims=(5, 5))
    torch._dynamo.reset()
    compiled = torch.compile(flash_ext.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    expected = flash_ext.scaled_dot_product_attention(*tensors, is_causal=True)
    torch.testing.assert_close(compiled(*tensors, is_causal=True), expected)
