"""``flash_ext.activate()``: torch's own functions, modules and operators, computed by this library."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, _registry, sdpa_kernel

import flash_ext
from flash_ext.integrations import sdpa_provider, sdpa_routing
from tests.oracle import random

SDPA = "scaled_dot_product_attention"
CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ORDERS = {"rows": (0, 2, 1, 3), "heads": (0, 1, 2, 3), "sequence": (2, 0, 1, 3)}  # of (batch, heads, seqlen) in memory


@pytest.fixture
def active() -> Iterator[None]:
    with flash_ext.activated():
        sdpa_provider.forget_calls()
        yield


def served() -> set[str]:
    """The operators that this library computed since the last question."""
    names = {name for name, count in sdpa_provider.calls_served().items() if count}
    assert not sdpa_provider.calls_passed_on()
    sdpa_provider.forget_calls()
    return names


def in_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    back = sorted(range(4), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


def qkv(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 4),
    seqlens: tuple[int, int] = (37, 53),
    dims: tuple[int, int] = (16, 16),
    order: str = "rows",
    requires_grad: bool = True,
) -> list[Tensor]:
    shapes = [
        (batch, heads[0], seqlens[0], dims[0]),
        (batch, heads[1], seqlens[1], dims[0]),
        (batch, heads[1], seqlens[1], dims[1]),
    ]
    tensors = [in_order(random(*shape, dtype=dtype, device=device), ORDERS[order]) for shape in shapes]
    return [t.requires_grad_(requires_grad) for t in tensors]


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, bottom_right: bool = False
) -> Tensor:
    """Attention in plain torch, in the dtype of its inputs."""
    if q.dim() > 2:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if is_causal:
        offset = k.shape[-2] - q.shape[-2] if bottom_right else 0
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(offset + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def gradients(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


def assert_right(out: Tensor, leaves: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any) -> None:
    """``out`` and its gradients against plain torch in float64, as exact as plain torch in their own dtype."""
    results = [[out, *gradients(out, leaves)]]
    for dtype in (torch.float64, out.dtype):
        given = {id(x): x.detach().to(dtype if x.is_floating_point() else x.dtype) for x in (q, k, v, *args)}
        asked = [given[id(leaf)].requires_grad_() for leaf in leaves]
        expected = by_hand(*(given[id(x)] for x in (q, k, v, *args)), **kw)
        results.append([expected, *gradients(expected, asked)])
    for found, exact, low in zip(*results, strict=True):
        error = (found.double() - exact).abs().max()
        rounding = (64 if out.dtype in (torch.float32, torch.float64) else 4) * torch.finfo(out.dtype).eps
        allowed = 2 * (low.double() - exact).abs().max() + rounding * exact.abs().max()
        assert error <= allowed, f"{error} > {allowed}"


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    return (torch.float64, torch.bfloat16) if device == "cpu" else (torch.float32, torch.bfloat16, torch.float16)


def make_mask(kind: str, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    if kind == "none":
        return None
    visible = torch.rand(shape, device=device) < 0.7
    visible[..., 0] = True
    return visible if kind == "bool" else random(*shape, dtype=dtype, device=device)


# ---- Right results, and by this library -----------------------------------------------------------------------------


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("options", ["plain", "causal", "bool", "float", "float per head"])
def test_results(device: str, options: str, heads: tuple[int, int], order: str) -> None:
    for dtype in dtypes(device):
        q, k, v = qkv(device, dtype, heads=heads, order=order)
        causal = options == "causal"
        shape = (1, 4, 37, 53) if options == "float per head" else (37, 53)
        mask = make_mask("none" if options in ("plain", "causal") else options.split()[0], device, dtype, shape)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=heads[0] != heads[1])
        masks = () if mask is None else (mask,)
        assert_right(out, (q, k, v), q, k, v, *masks, is_causal=causal)
    assert served()


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("dropout_p", [0.0, 1.0])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(37, 53), (2, 1, 1, 53), (1, 4, 37, 53)], ids=str)
def test_a_boolean_mask_may_change_before_the_backward(
    device: str, shape: tuple[int, ...], order: str, dropout_p: float
) -> None:
    q, k, v = qkv(device, order=order)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    outs, masks = [], []
    for keys in (8, 40):
        mask[..., :keys] = True
        masks.append(mask.clone())
        seen = mask.expand(2, 4, 37, 53) if keys == 40 else mask
        outs.append(F.scaled_dot_product_attention(q, k, v, seen, dropout_p))
    mask.fill_(False)
    found = gradients(torch.stack(outs), (q, k, v))
    expected = torch.stack([by_hand(q, k, v, mask) * (1 - dropout_p) for mask in masks])
    for ours, right in zip(found, gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    assert served()


def test_a_copy_holds_what_the_mask_holds(device: str) -> None:
    """Of a mask that repeats itself no more than once, from wherever it begins in memory."""
    mask = torch.rand(3, 1, 37, 53, device=device)[1:] < 0.5
    copy = sdpa_routing._copy_of(mask.expand(2, 4, 37, 53))
    assert copy.shape == mask.shape and torch.equal(copy, mask) and copy.data_ptr() != mask.data_ptr()
    whole = sdpa_routing._copy_of(mask)
    assert torch.equal(whole, mask) and whole.data_ptr() != mask.data_ptr()


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize(
    "shape", [(37, 53), (1, 53), (2, 1, 1, 53), (1, 4, 37, 53), (2, 4, 37, 53), (4, 37, 53), (1, 1, 37, 53)], ids=str
)
@pytest.mark.parametrize("order", ["rows", "heads"])
def test_gradient_of_a_bias(device: str, shape: tuple[int, ...], order: str) -> None:
    for dtype in dtypes(device):
        q, k, v = qkv(device, dtype, order=order)
        bias = random(*shape, dtype=dtype, device=device).requires_grad_()
        out = F.scaled_dot_product_attention(q, k, v, bias)
        assert_right(out, (q, k, v, bias), q, k, v, bias)
    assert served() >= {SDPA}


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("dims", [(16, 24), (24, 16), (5, 5), (12, 20)], ids=str)
def test_head_dims(device: str, dims: tuple[int, int]) -> None:
    for dtype in dtypes(device):
        q, k, v = qkv(device, dtype, dims=dims)
        assert_right(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), q, k, v, is_causal=True)
    assert served()


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 4)], ids=str)
def test_dimensions_that_torch_leaves_to_math(device: str, lead: tuple[int, ...]) -> None:
    q, k, v = (random(*lead, 9, 16, device=device).requires_grad_() for _ in range(3))
    assert_right(F.scaled_dot_product_attention(q, k, v), (q, k, v), *(x for x in (q, k, v)))
    assert served()  # SDPA itself; from torch 2.15 on, 3 dimensions come to its fused operator


@pytest.mark.usefixtures("active")
def test_batches_that_broadcast(device: str) -> None:
    q, k, v = random(2, 4, 9, 16, device=device), random(1, 4, 7, 16, device=device), random(4, 7, 16, device=device)
    out = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, by_hand(q, k, v), rtol=1e-4, atol=1e-4)
    assert served() == {SDPA}


@pytest.mark.usefixtures("active")
def test_query_that_sees_nothing(device: str) -> None:
    q, k, v = qkv(device)
    visible = torch.ones(37, 53, dtype=torch.bool, device=device)
    visible[3] = False
    out = F.scaled_dot_product_attention(q, k, v, visible)
    assert not out[:, :, 3].any()
    assert all(gradient.isfinite().all() for gradient in gradients(out, (q, k, v)))
    assert served() == {SDPA}


def test_rows_of_the_lowest_number(device: str) -> None:
    """Their log-sum-exp has no room for log n. What comes of that is what torch's kernel makes of it."""
    if device != "cpu":
        pytest.skip("torch's kernels there differ from each other")
    leaves = qkv(device)
    mask = torch.zeros(37, 53)
    mask[3] = torch.finfo(mask.dtype).min
    results = []
    for context in (nullcontext, flash_ext.activated):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context():
            out = F.scaled_dot_product_attention(*leaves, mask)
            results.append([out, *gradients(out, leaves)])
    for torchs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[1][0][:, :, 3], leaves[2].mean(2), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_last_dimension_of_any_stride(device: str, kind: str) -> None:
    """Also where it is padded."""
    for order in itertools.permutations(range(4)):
        q, k, v = (in_order(x, order).detach().requires_grad_() for x in qkv(device, dims=(20, 20)))
        masks = [] if kind == "none" else [make_mask(kind, device, q.dtype, (37, 53))]
        assert_right(F.scaled_dot_product_attention(q, k, v, *masks), (q, k, v), q, k, v, *masks)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize(("heads", "dims"), [((4, 4), (16, 16)), ((4, 2), (16, 16)), ((4, 4), (16, 24))], ids=str)
def test_memory_order_is_torchs(
    device: str, kind: str, heads: tuple[int, int], dims: tuple[int, int], order: str
) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = qkv(device, dtype, heads=heads, dims=dims, order=order)
    mask = make_mask(kind, device, dtype, (37, 53))
    strides = []
    for activate in (False, True):
        if activate:
            flash_ext.activate()
        try:
            strides.append(F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=heads[0] != heads[1]).stride())
        finally:
            flash_ext.deactivate()
    assert strides[0] == strides[1]


# ---- Backends and their restrictions --------------------------------------------------------------------------------


CUDA_BACKENDS = {
    SDPBackend.FLASH_ATTENTION: "_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("backend", CUDA_BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("order", ORDERS)
def test_each_backend_on_cuda(backend: SDPBackend, order: str) -> None:
    for causal in (False, True):
        q, k, v = qkv("cuda", torch.bfloat16, seqlens=(128, 128), dims=(64, 64), order=order)
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            assert_right(out, (q, k, v), q, k, v, is_causal=causal)
        assert served() == {CUDA_BACKENDS[backend], f"{CUDA_BACKENDS[backend]}_backward"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("active")
def test_float32_on_cuda_goes_through_the_efficient_operator() -> None:
    q, k, v = qkv("cuda")
    assert_right(F.scaled_dot_product_attention(q, k, v), (q, k, v), q, k, v)
    name = "_scaled_dot_product_efficient_attention"
    assert served() == {name, f"{name}_backward"}


def test_math_is_torchs_where_it_is_asked_for(device: str) -> None:
    q, k, v = qkv(device)
    mask = torch.rand(37, 53, device=device) < 0.7
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, mask)
        with flash_ext.activated():
            sdpa_provider.forget_calls()
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask), expected)
            F.scaled_dot_product_attention(q, k, v)
            torch.manual_seed(1)
            dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not sdpa_provider.calls_served()
    assert sdpa_provider.reasons_passed_on() == {
        "scaled_dot_product_attention (math was asked for, by sdpa_kernel or torch.backends.cuda)": 3
    }
    torch.manual_seed(1)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), dropped)


@pytest.mark.usefixtures("active")
def test_math_first_in_the_order(device: str) -> None:
    q, k, v = (random(9, 16, device=device) for _ in range(3))  # torch has nothing but math for it
    backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends, set_priority=True):
        F.scaled_dot_product_attention(q, k, v)
    assert set(sdpa_provider.calls_served()) == ({SDPA} if device == "cpu" else set())  # a CPU has no order
    sdpa_provider.forget_calls()
    with sdpa_kernel(backends[::-1], set_priority=True):
        F.scaled_dot_product_attention(q, k, v)
    assert served() == {SDPA}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("first", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_order_of_backends_chooses_the_operator(first: str) -> None:
    """``torch._fused_sdp_choice`` says the same with and without us, and the operator that it says is what runs."""
    backend = getattr(SDPBackend, first)
    q, k, v = qkv("cuda", torch.bfloat16, seqlens=(128, 128), dims=(64, 64), requires_grad=False)
    order = [backend, *(b for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if b != backend)]
    with sdpa_kernel([*order, SDPBackend.MATH], set_priority=True):
        chosen = torch._fused_sdp_choice(q, k, v)
        assert chosen == backend.value
        with flash_ext.activated():
            sdpa_provider.forget_calls()
            assert torch._fused_sdp_choice(q, k, v) == chosen
            F.scaled_dot_product_attention(q, k, v)
            name = first.removesuffix("_ATTENTION").lower()
            assert served() == {f"_scaled_dot_product_{name}_attention"}


@pytest.mark.usefixtures("active")
def test_flash_is_not_served_where_it_is_switched_off() -> None:
    q, k, v = qkv("cpu")
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        F.scaled_dot_product_attention(q, k, v)
    assert not sdpa_provider.calls_served()
    assert sdpa_provider.calls_passed_on() == {"scaled_dot_product_attention": 2}


@pytest.mark.usefixtures("active")
def test_errors_are_torchs(device: str) -> None:
    q, k, v = qkv(device)
    mask = torch.ones(37, 53, dtype=torch.bool, device=device)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k.double() if device == "cpu" else k.half(), v), {}),
        ((q, k, v, mask.int()), {}),
        ((q, k, v, mask[:5]), {}),
        ((q, k[..., :8], v), {}),
        ((q[0, 0], k, v[:, :1]), {"attn_mask": mask.expand(3, 2, 37, 53)}),
        ((q, k[:, :3], v[:, :3]), {"enable_gqa": True, "attn_mask": mask}),
    ]
    if device == "cpu":
        wrong.append(((q, k, v), {"dropout_p": 1.5}))
    for args, options in wrong:
        with pytest.raises((RuntimeError, ValueError)):
            F.scaled_dot_product_attention(*args, **options)
    assert not served()


# ---- What goes on to torch ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("active")
def test_large_head_dims_go_on_to_torch(device: str) -> None:
    q, k, v = qkv(device, dims=(264, 264))
    out = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, by_hand(q, k, v), rtol=1e-3, atol=1e-3)
    gradients(out, (q, k, v))
    assert not sdpa_provider.calls_served()
    passed_on = {name: count for name, count in sdpa_provider.calls_passed_on().items() if count}
    if device == "cpu":
        assert passed_on == {CPU_FLASH: 1, f"{CPU_FLASH}_backward": 1}
    reasons = sdpa_provider.reasons_passed_on()
    for name in reasons:
        assert re.search(r" \(head_dim.* must be .*from \d to 256, got 264.*\)$", name), name
    # On CUDA torch's kernels call operators that are overridden as well.
    assert sum(reasons.values()) == 2 if device == "cpu" else sum(reasons.values()) >= 2
    sdpa_provider.forget_calls()
    assert not sdpa_provider.calls_passed_on() and not sdpa_provider.reasons_passed_on()


@pytest.mark.usefixtures("active")
def test_what_math_alone_takes_is_counted(device: str) -> None:
    """torch composes such calls of other operators, none of which would tell."""
    q, k, v = qkv(device, dims=(264, 264))
    F.scaled_dot_product_attention(q, k, v, torch.ones(37, 53, dtype=torch.bool, device=device), dropout_p=0.1)
    assert not sdpa_provider.calls_served()
    reasons = sdpa_provider.reasons_passed_on()  # on CUDA torch composes them of others, for other reasons
    if device == "cpu":
        for name in reasons:
            assert re.search(r" \(head_dim.* must be .*from \d to 256, got 264.*\)$", name), name
    assert reasons
    assert sum(sdpa_provider.calls_passed_on().values()) >= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("active")
def test_what_has_no_kernels_goes_on_to_torch() -> None:
    q, k, v = qkv("cuda", torch.float64)
    assert_right(F.scaled_dot_product_attention(q, k, v), (q, k, v), q, k, v)
    assert not served()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [*CUDA_BACKENDS.values()])
def test_dropout_through_an_operator_is_torchs(name: str) -> None:
    """Forward and backward, whether active or not."""
    if name.endswith("cudnn_attention") and not torch.backends.cudnn.is_available():
        pytest.skip("needs cuDNN")
    operator = getattr(torch.ops.aten, name)
    q, k, v = qkv("cuda", torch.bfloat16, seqlens=(128, 128), dims=(64, 64))
    extra: tuple[Any, ...] = () if name.endswith("flash_attention") else (None, True)
    results = []
    for activate in (False, True):
        torch.manual_seed(0)
        if activate:
            flash_ext.activate()
        try:
            out = operator(q, k, v, *extra, 0.5)[0]
        finally:
            flash_ext.deactivate()
        results.append([out, *gradients(out, (q, k, v))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("active")
def test_more_batch_entries_than_a_grid_counts_go_on_to_torch() -> None:
    q, k, v = qkv("cuda", torch.bfloat16, batch=2**16, heads=(1, 1), seqlens=(1, 2), dims=(8, 8))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v)
    assert_right(out, (q, k, v), q, k, v)


# ---- Dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_dropout_of_a_backend_that_was_asked_for_is_torchs(backend: SDPBackend) -> None:
    """Its random numbers are part of what ``sdpa_kernel`` asks for."""
    q, k, v = qkv("cuda", torch.bfloat16, seqlens=(128, 128), dims=(64, 64), requires_grad=False)
    results = []
    with sdpa_kernel(backend):
        for context in (nullcontext, flash_ext.activated):
            torch.manual_seed(0)
            with context():
                results.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert torch.equal(*results)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_dropout(device: str, kind: str) -> None:
    q, k, v = qkv(device, seqlens=(64, 96), order="rows")
    ones = torch.ones_like(v).requires_grad_()
    mask = make_mask(kind, device, q.dtype, (64, 96))
    torch.manual_seed(3)
    out = F.scaled_dot_product_attention(q, k, ones, mask, dropout_p=0.25)
    other = F.scaled_dot_product_attention(q, k, ones, mask, dropout_p=0.25)
    assert abs(out.mean().item() - 1.0) < 0.02
    assert not torch.equal(out, other)
    torch.manual_seed(3)
    assert torch.equal(F.scaled_dot_product_attention(q, k, ones, mask, dropout_p=0.25), out)
    # What the backward drops is what the forward dropped: out is linear in v.
    (gradient,) = torch.autograd.grad(out.sum(), ones)
    torch.testing.assert_close((gradient * ones).sum(), out.sum(), rtol=1e-4, atol=1e-2)
    assert served() == {SDPA}


def test_backward_with_dropout_after_deactivation(device: str) -> None:
    q, k, _ = qkv(device)
    v = torch.ones_like(k).requires_grad_()
    with flash_ext.activated():
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(gradient.sum(), out.sum(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("active_first", [True, False])
def test_forward_and_backward_by_different_kernels(device: str, active_first: bool) -> None:
    for dtype in dtypes(device):
        q, k, v = qkv(device, dtype, seqlens=(48, 48), dims=(32, 32))
        if active_first:
            with flash_ext.activated():
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            assert_right(out, (q, k, v), q, k, v, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            with flash_ext.activated():
                assert_right(out, (q, k, v), q, k, v, is_causal=True)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("numbers", [{"scale": torch.inf}, {"scale": -1e39}, {"scale": torch.nan}, {"dropout_p": -1.0}])
def test_numbers_that_are_for_torch_to_judge(device: str, numbers: dict[str, float], kind: str) -> None:
    q, k, v = qkv(device)
    mask = make_mask(kind, device, q.dtype, (37, 53))
    results: list[list[Tensor] | type[Exception]] = []
    for context in (nullcontext, flash_ext.activated):
        with context():
            try:
                out = F.scaled_dot_product_attention(q, k, v, mask, **numbers)
                results.append([out, *gradients(out, (q, k, v))])
            except RuntimeError as error:
                results.append(type(error))
    torchs, ours = results
    if isinstance(torchs, type) or "dropout_p" in numbers:
        assert isinstance(torchs, type) == isinstance(ours, type)
    else:
        torch.testing.assert_close(ours, torchs, equal_nan=True)


# ---- Activation -----------------------------------------------------------------------------------------------------


def registrations() -> list[str]:
    names = {name for kernels in sdpa_provider.KERNELS.values() for name in kernels} | {SDPA, "_fused_sdp_choice"}
    return [torch._C._dispatch_dump_table(f"aten::{name}") for name in sorted(names) if hasattr(torch.ops.aten, name)]


def test_deactivation_restores_torch(device: str) -> None:
    q, k, v = qkv(device)
    before, table, tag = F.scaled_dot_product_attention(q, k, v), registrations(), torch.compiler.config.cache_key_tag
    flash_ext.activate()
    flash_ext.activate()
    assert registrations() != table
    sdpa_provider.forget_calls()
    F.scaled_dot_product_attention(q, k, v)
    assert served()
    assert torch.compiler.config.cache_key_tag != tag
    flash_ext.deactivate()
    flash_ext.deactivate()
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), before)
    assert not served()
    assert registrations() == table
    assert torch.compiler.config.cache_key_tag == tag


def test_nested_activation() -> None:
    assert not sdpa_provider.is_active()
    with flash_ext.activated():
        with flash_ext.activated():
            assert sdpa_provider.is_active()
        assert sdpa_provider.is_active()
    assert not sdpa_provider.is_active()
    with pytest.raises(ValueError, match="out"), flash_ext.activated():
        raise ValueError("out")
    assert not sdpa_provider.is_active()


def test_overlapping_activation() -> None:
    first, second, third = (flash_ext.activated() for _ in range(3))
    for block in (first, second, third):
        block.__enter__()
    for block in (first, third):
        block.__exit__(None, None, None)
        assert sdpa_provider.is_active()
    second.__exit__(None, None, None)
    assert not sdpa_provider.is_active()
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_activation_by_several_threads(device: str) -> None:
    """Blocks of some begin and end while others are inside of theirs."""
    sdpa_provider.forget_calls()
    q, k, v = qkv(device, requires_grad=False)
    mask = make_mask("bool", device, q.dtype, (37, 53))
    expected = flash_ext.scaled_dot_product_attention(q, k, v, mask)

    def work(_: int) -> None:
        with flash_ext.activated():
            found = F.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(200)))
    finally:
        sys.setswitchinterval(interval)
    assert served() == {SDPA}
    assert not sdpa_provider.is_active()


def test_torchs_registry() -> None:
    assert "flash_ext" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("flash_ext")  # type: ignore[arg-type]
    try:
        assert sdpa_provider.is_active()
        assert torch.nn.attention.current_flash_attention_impl() == "flash_ext"
    finally:
        flash_ext.deactivate()
    assert not sdpa_provider.is_active()
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.skipif(not hasattr(_registry, "restore_flash_attention_impl"), reason="this torch cannot restore")
def test_another_implementation_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log = []

    class Handle:
        def remove(self) -> None:
            log.append("removed")

    def register() -> Handle:
        log.append("registered")
        return Handle()

    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    _registry.register_flash_attention_impl("other", register_fn=register)
    _registry.activate_flash_attention_impl("other")
    with flash_ext.activated():
        assert log == ["registered", "removed"]
    assert log == ["registered", "removed", "registered"]
    assert _registry.current_flash_attention_impl() == "other"
    _registry.restore_flash_attention_impl()


def test_import_activates_nothing() -> None:
    program = (
        "import sys, torch\n"
        "name = 'aten::scaled_dot_product_attention'\n"
        "before = torch._C._dispatch_dump_table(name)\n"
        "import flash_ext\n"
        "assert torch._C._dispatch_dump_table(name) == before\n"
        "assert torch.nn.attention.current_flash_attention_impl() is None\n"
        "late = ('aten_attention', 'aten_packed_attention', 'sdpa_routing')\n"
        "assert not [m for m in sys.modules if m.split('.')[-1] in late], 'imported too early'\n"
        "assert 'torch.utils.flop_counter' not in sys.modules and 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
