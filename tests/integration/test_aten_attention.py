"""The kernels with the schemas of aten's fused attention operators: the form that torch's meta functions promise, and
the numbers. They are called as functions here, which works on every device; ``test_sdpa_provider`` calls operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext.integrations import aten_attention, aten_calls, aten_packed_attention, layouts
from flash_ext.integrations.aten_calls import NotServed
from tests.integration.test_sdpa_provider import ORDERS, assert_right, by_hand, qkv
from tests.oracle import cumulative, random

FORWARD = {
    "flash": ("_scaled_dot_product_flash_attention", aten_attention.flash_forward, ()),
    "efficient": ("_scaled_dot_product_efficient_attention", aten_attention.efficient_forward, (None, True)),
    "efficient without lse": (
        "_scaled_dot_product_efficient_attention",
        aten_attention.efficient_forward,
        (None, False),
    ),
    "cudnn": ("_scaled_dot_product_cudnn_attention", aten_attention.cudnn_forward, (None, True)),
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu", aten_attention.cpu_forward, ()),
}


def on_meta(operator: str, *args: Any, **options: Any) -> Any:
    """What torch says that the operator returns: shapes, strides and dtypes."""
    args = tuple(torch.empty_like(a, device="meta") if isinstance(a, Tensor) else a for a in args)
    return getattr(torch.ops.aten, operator)(*args, **options)


def assert_same_form(found: Sequence[Any], promised: Sequence[Any]) -> None:
    assert len(found) == len(promised)
    for ours, theirs in zip(found, promised, strict=True):
        if not isinstance(theirs, Tensor):
            assert ours is None or ours == theirs
        elif ours is not None:
            assert (ours.shape, ours.dtype, strides(ours)) == (theirs.shape, theirs.dtype, strides(theirs))


def strides(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def low_precision(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


# ---- Form -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("batch", "heads", "seqlens"), [(2, (4, 4), (37, 53)), (1, (4, 2), (64, 32)), (3, (1, 1), (1, 9))]
)
def test_form_of_results(
    device: str, name: str, order: str, batch: int, heads: tuple[int, int], seqlens: tuple[int, int]
) -> None:
    operator, kernel, extra = FORWARD[name]
    if name.startswith("efficient"):
        heads = (heads[0], heads[0])  # torch sends it no heads in groups
    q, k, v = qkv(
        device, low_precision(device), batch=batch, heads=heads, seqlens=seqlens, order=order, requires_grad=False
    )
    found = kernel(q, k, v, *extra)
    assert_same_form(found, on_meta(operator, q, k, v, *extra))
    grad_out = torch.randn_like(found[0])
    gradients, promised = run_backward(name, grad_out, q, k, v, found)
    assert_same_form(gradients, promised)


def run_backward(name: str, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, results: Any) -> tuple[Any, Any]:
    """(ours, what torch promises)"""
    if name == "cpu":
        args: tuple[Any, ...] = (grad_out, q, k, v, *results, 0.0, False)
        kernel: Callable[..., Any] = aten_attention.cpu_backward
    elif name == "flash":
        args = (grad_out, q, k, v, *results[:6], 0.0, False, results[6], results[7])
        kernel = aten_attention.flash_backward
    elif name == "cudnn":
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = results
        args = (grad_out, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, False)
        kernel = aten_attention.cudnn_backward
    else:
        out, lse, seed, offset = aten_attention.efficient_forward(q, k, v, None, True)
        args = (grad_out, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False])
        kernel = aten_attention.efficient_backward
    # torch's schemas say Tensor where undefined ones are given.
    meta = tuple(torch.empty(0, device="meta") if a is None else a for a in args)
    return kernel(*args), on_meta(f"{FORWARD[name][0]}_backward", *meta)[: 4 if name.startswith("efficient") else 3]


@pytest.mark.parametrize("shape", [(2, 4, 37, 53), (2, 4, 37, 64)], ids=str)
def test_form_of_the_gradient_of_a_bias(device: str, shape: tuple[int, ...]) -> None:
    q, k, v = qkv(device, seqlens=(shape[2], shape[3]), requires_grad=False)
    bias = random(*shape, device=device)
    out, lse, seed, offset = aten_attention.efficient_forward(q, k, v, bias, True)
    args = (torch.randn_like(out), q, k, v, bias, out, lse, seed, offset, 0.0, [True] * 4)
    operator = "_scaled_dot_product_efficient_attention_backward"
    assert_same_form(aten_attention.efficient_backward(*args), on_meta(operator, *args))


def test_form_of_packed_results(device: str) -> None:
    q, k, v = (random(19, 4, 16, dtype=low_precision(device), device=device) for _ in range(3))
    cu_seqlens = cumulative([5, 11, 3], device)
    args = (q, k, v, cu_seqlens, cu_seqlens, 11, 11, 0.0, True, False)
    assert_same_form(aten_packed_attention.packed_flash_forward(*args), on_meta("_flash_attention_forward", *args))
    args = (q[None], k[None], v[None], None, cu_seqlens, cu_seqlens, 11, 11, 0.0, 1, True)
    assert_same_form(
        aten_packed_attention.packed_efficient_forward(*args), on_meta("_efficient_attention_forward", *args)
    )


# ---- Numbers --------------------------------------------------------------------------------------------------------


class Recorded(torch.autograd.Function):
    """A kernel with its backward, so that autograd checks the pair."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> Tensor:
        results = forward(*tensors)
        ctx.backward_of, ctx.results, ctx.tensors = backward, results, tensors
        return results[0].clone()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # type: ignore[override]
        return None, None, *ctx.backward_of(grad_out, ctx.tensors, ctx.results)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_flash_is_causal_from_the_bottom_right(
    device: str, order: str, heads: tuple[int, int], is_causal: bool
) -> None:
    q, k, v = qkv(device, heads=heads, order=order)
    out = Recorded.apply(
        lambda *t: aten_attention.flash_forward(*t, 0.0, is_causal),
        lambda g, t, r: aten_attention.flash_backward(g, *t, *r[:6], 0.0, is_causal, r[6], r[7]),
        q,
        k,
        v,
    )
    assert_right(out, (q, k, v), q, k, v, is_causal=is_causal, bottom_right=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("expanded", [False, True])
def test_efficient_with_a_bias(device: str, expanded: bool, heads: tuple[int, int], is_causal: bool) -> None:
    q, k, v = qkv(device, heads=heads, dims=(16, 24))
    bias = random(1, 4, 37, 53, device=device).expand(2, 4, 37, 53) if expanded else random(2, 4, 37, 53, device=device)
    bias = bias.detach().requires_grad_()
    out = Recorded.apply(
        lambda *t: aten_attention.efficient_forward(*t, True, 0.0, is_causal),
        lambda g, t, r: aten_attention.efficient_backward(g, *t, *r, 0.0, [True] * 4, is_causal),
        q,
        k,
        v,
        bias,
    )
    assert_right(out, (q, k, v, bias), q, k, v, bias, is_causal=is_causal)


@pytest.mark.parametrize("kind", ["none", "shared", "full"])
@pytest.mark.parametrize("order", ORDERS)
def test_cudnn_with_a_bias(device: str, order: str, kind: str) -> None:
    q, k, v = qkv(device, order=order)
    shape = (37, 53) if kind == "shared" else (2, 4, 37, 53)
    bias = None if kind == "none" else random(*shape, device=device)
    out = Recorded.apply(
        lambda *t: aten_attention.cudnn_forward(*t, bias, True),
        lambda g, t, r: aten_attention.cudnn_backward(g, *t, *r[:2], *r[6:8], bias, *r[2:6], 0.0, False),
        q,
        k,
        v,
    )
    assert_right(out, (q, k, v), q, k, v, *(() if bias is None else (bias,)))


@pytest.mark.parametrize("custom_mask_type", [0, 1, 2])
def test_packed_efficient(device: str, custom_mask_type: int) -> None:
    lengths_q, lengths_k = [5, 40, 0, 3], [7, 33, 2, 8]
    cu_q, cu_k = cumulative(lengths_q, device), cumulative(lengths_k, device)
    q, k, v = (random(1, sum(n), 4, 16, device=device).requires_grad_() for n in (lengths_q, lengths_k, lengths_k))
    sequences = (None, cu_q, cu_k, 40, 33)
    out = Recorded.apply(
        lambda *t: aten_packed_attention.packed_efficient_forward(*t, *sequences, 0.0, custom_mask_type, True),
        lambda g, t, r: aten_packed_attention.packed_efficient_backward(
            g, *t, None, r[0], cu_q, cu_k, 40, 33, r[1], 0.0, r[2], r[3], custom_mask_type, False
        )[:3],
        q,
        k,
        v,
    )
    parts = []
    for x, y, z in zip(*(t[0].split(n) for t, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))), strict=True):
        x, y, z = (t.transpose(0, 1) for t in (x, y, z))
        parts.append(
            by_hand(x, y, z, is_causal=custom_mask_type > 0, bottom_right=custom_mask_type == 2).transpose(0, 1)
        )
    expected = torch.cat(parts)[None]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    weight = torch.randn_like(out)
    pairs = zip(
        torch.autograd.grad((out * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    )
    for found, right in pairs:
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)


def test_lse_of_packed_sequences_is_padded(device: str) -> None:
    cu_seqlens = cumulative([5, 0, 3], device)
    q = random(1, 8, 2, 16, device=device)
    _, lse, *_ = aten_packed_attention.packed_efficient_forward(
        q, q, q, None, cu_seqlens, cu_seqlens, 5, 5, 0.0, 0, True
    )
    assert lse.shape == (3, 2, 32)
    scores = torch.einsum("qhd,khd->hqk", q[0, :5], q[0, :5]) / 4
    torch.testing.assert_close(lse[0, :, :5], scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
    assert lse[0, :, 5:].isposinf().all() and lse[1].isposinf().all() and lse[2, :, 3:].isposinf().all()


# ---- What is not supported ------------------------------------------------------------------------------------------


def test_not_supported(device: str) -> None:
    q, k, v = qkv(device, low_precision(device), requires_grad=False)
    cu_seqlens = cumulative([5, 11], device)
    packed = random(16, 4, 16, dtype=low_precision(device), device=device)
    sequences = (cu_seqlens, cu_seqlens, 11, 11)
    refused = [
        aten_attention.flash_forward(q, k, v, 0.1),
        aten_attention.flash_forward(q, k, v, 0.0, False, True),
        aten_attention.flash_forward(q, k[:1], v[:1]),
        aten_attention.efficient_forward(q, k, v, q.new_zeros(4, 37, 53), True),
        aten_attention.efficient_forward(q, k, v, None, True, 0.1),
        aten_attention.cudnn_forward(q, k, v, None, True, 0.1),
        aten_attention.cpu_forward(q, k, v, 0.1),
        aten_packed_attention.packed_flash_forward(packed, packed, packed, *sequences, 0.1, False, False),
        aten_packed_attention.packed_flash_forward(packed, packed, packed, *sequences, 0.0, False, False, num_splits=1),
        aten_packed_attention.packed_flash_forward(packed, packed, packed[:, :3], *sequences, 0.0, False, False),
        aten_packed_attention.packed_efficient_forward(q, k, v, None, None, None, None, None, 0.1, 0),
        aten_packed_attention.packed_efficient_forward(q, k, v, None, None, None, None, None, 0.0, 7),
    ]
    assert all(type(results) is NotServed and results for results in refused)


# ---- Layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_no_copies(order: str) -> None:
    q, k, v = qkv("cpu", order=order, requires_grad=False)
    arrangement = layouts.arrangement_of(q, k, v)
    rows = arrangement.to_rows(q)
    assert rows.is_contiguous() and rows.data_ptr() == q.data_ptr()
    back = arrangement.from_rows(rows, (2, 4))
    assert back.stride() == q.stride() and back.data_ptr() == q.data_ptr()
    assert layouts.in_order_of(back, q) is back


def test_views_of_one_projection_are_taken_by_rows() -> None:
    packed = torch.randn(2, 37, 3, 4, 16).unbind(2)
    q, k, v = (x.transpose(1, 2) for x in packed)
    assert layouts.arrangement_of(q, k, v) is layouts.BY_ROWS
    out = torch.randn(2, 37, 4, 16).transpose(1, 2)
    assert layouts.in_order_of(out, q) is out
    assert out.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("like", [*ORDERS, "expanded", "sliced"])
def test_memory_order_follows(order: str, like: str) -> None:
    x = qkv("cpu", order=order, requires_grad=False)[0]
    target = {
        "expanded": torch.randn(1, 1, 37, 16).expand(2, 4, 37, 16),
        "sliced": torch.randn(2, 4, 80, 32)[:, :, 3:40, :16],
    }.get(like)
    target = qkv("cpu", order=like, requires_grad=False)[0] if target is None else target
    found = layouts.in_order_of(x, target)
    assert torch.equal(found, x)
    assert found.stride() == torch.empty_like(target).stride()


# ---- What is not ours -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2**16, 1, 1), (1, 65535 * 32 + 1, 1), (1, 1, 2**29 + 1)], ids=str)
def test_more_than_a_grid_counts_is_not_served(sizes: tuple[int, int, int]) -> None:
    cuda = torch.device("cuda")
    assert aten_calls.exceeds_sizes(cuda, *sizes)
    assert not aten_calls.exceeds_sizes(torch.device("cpu"), *sizes)
    assert not aten_calls.exceeds_sizes(cuda, *(size - 1 for size in sizes))


def test_the_gradient_of_a_bias_that_is_not_there_is_torchs_to_refuse(device: str) -> None:
    q, k, v = qkv(device, low_precision(device), requires_grad=False)
    out, lse, seed, offset = aten_attention.efficient_forward(q, k, v, None, True)
    wanted = aten_attention.efficient_backward(out, q, k, v, None, out, lse, seed, offset, 0.0, [True] * 4)
    assert type(wanted) is NotServed
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v, out)]
    packed = aten_packed_attention.packed_efficient_backward(
        rows[3], *rows[:3], None, rows[3], None, None, 37, 53, lse, 0.0, seed, offset, 0, True
    )
    assert type(packed) is NotServed
