"""Calls of SDPA with masks, biases and dropout: in C++, by the operator that torch keeps for other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import flash_ext
from flash_ext.integrations import aten_fused
from tests.integration.test_aten_attention import strides
from tests.integration.test_sdpa_provider import ORDERS, assert_right, gradients, qkv
from tests.integration.test_what_stands_on_sdpa import Names
from tests.oracle import random

FUSED_NODE = "ScaledDotProductFusedAttentionOverrideableBackward0"
MASKS = {"key": (2, 1, 1, 53), "shared": (37, 53), "three": (4, 37, 53), "head": (1, 4, 37, 53), "each": (2, 4, 37, 53)}


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    """Deterministic, so that two backwards on CUDA give the same bits."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with flash_ext.activated():
        yield
    torch.use_deterministic_algorithms(before)


def make(kind: str, shape: tuple[int, ...], device: str) -> Tensor:
    if kind == "bool":
        return torch.rand(shape, device=device) < 0.7
    return random(*shape, device=device).requires_grad_(kind == "bias with gradient")


def is_fused(out: Tensor) -> bool:
    assert out.grad_fn is not None
    nodes = [out.grad_fn, *(node for node, _ in out.grad_fn.next_functions if node is not None)]  # a view, perhaps
    return any(node.name() == FUSED_NODE for node in nodes)


def sdpa(*args: Any, **options: Any) -> Tensor:
    torch.manual_seed(5)
    return F.scaled_dot_product_attention(*args, **options)


# ---- Right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "bias", "bias with gradient"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_results(device: str, kind: str, shape: tuple[int, ...], heads: tuple[int, int]) -> None:
    q, k, v = qkv(device, heads=heads, dims=(16, 24))
    mask = make(kind, shape, device)
    out = sdpa(q, k, v, mask, enable_gqa=heads[0] != heads[1])
    assert is_fused(out) or kind == "bias", "additive masks on a CPU are for torch's own operator"
    leaves = [q, k, v, *([mask] if mask.requires_grad else [])]
    assert_right(out, leaves, q, k, v, mask)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["none", "bool", "bias with gradient"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_bits_of_the_way_by_python(
    device: str, monkeypatch: pytest.MonkeyPatch, order: str, kind: str, shape: tuple[int, ...], dropout_p: float
) -> None:
    q, k, v = qkv(device, torch.bfloat16, order=order)
    mask = None if kind == "none" else make(kind, shape, device)
    leaves = [q, k, v, *([mask] if mask is not None and mask.requires_grad else [])]
    out = sdpa(q, k, v, mask, dropout_p)
    assert (
        is_fused(out)
        or order != "rows"
        or (dropout_p == 0 and (kind == "none" or (device == "cpu" and kind == "bias")))
    )
    found = [out, *gradients(out, leaves)]
    monkeypatch.setitem(aten_fused.filled, torch.device(device).type, False)
    expected = sdpa(q, k, v, mask, dropout_p)
    assert not is_fused(expected) and strides(out) == strides(expected)
    for ours, right in zip(found, [expected, *gradients(expected, leaves)], strict=True):
        assert (ours.shape, ours.dtype) == (right.shape, right.dtype)
        assert torch.equal(ours, right)


def test_dropout_draws_from_torchs_generator(device: str) -> None:
    """Two numbers, as ``draw_rng_state`` does: the same seed is the same call."""
    q, k, v = qkv(device)
    out = sdpa(q, k, v, None, 0.3)
    assert is_fused(out)
    following = torch.rand(1, device=device)
    torch.manual_seed(5)
    rng_state = flash_ext.draw_rng_state(device)
    assert torch.equal(following, torch.rand(1, device=device))
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    expected = flash_ext.attention(*rows, dropout_p=0.3, rng_state=rng_state)
    assert isinstance(expected, Tensor)
    assert torch.equal(out, expected.transpose(1, 2))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("masked", [False, True])
def test_memory_of_out_and_gradients_is_that_of_the_inputs(device: str, order: str, masked: bool) -> None:
    """Whatever the order of the gradient of out is: another one costs copies, but no bits."""
    q, k, v = qkv(device, order=order)
    mask = make("bool", MASKS["shared"], device) if masked else None
    out = flash_ext.scaled_dot_product_attention(q, k, v, mask)
    assert is_fused(out) and strides(out) == strides(q)
    found: list[tuple[Tensor, ...]] = []
    for like in ORDERS:
        grad_out = qkv(device, order=like, requires_grad=False)[0].copy_(torch.linspace(-1, 1, 37)[:, None])
        found.append(torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True))
        assert [strides(x) for x in found[-1]] == [strides(x) for x in (q, k, v)]
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))


def test_queries_that_are_repeated_in_memory(device: str) -> None:
    """A query with a stride of 0 has no memory order to follow."""
    q, k, v = qkv(device, requires_grad=False)
    q = q[:, :1].expand(q.shape)
    out = flash_ext.scaled_dot_product_attention(q, k, v, make("bool", MASKS["shared"], device), 0.0)
    assert out.shape == q.shape and 0 not in out.stride()


@pytest.mark.parametrize("asked", ["q", "k", "v", "mask", "qv"])
def test_gradients_that_are_asked_for(device: str, asked: str) -> None:
    names = {"q": 0, "k": 1, "v": 2, "mask": 3}
    tensors = [*qkv(device, requires_grad=False), make("bias", MASKS["head"], device)]
    leaves = [tensors[names[name]].requires_grad_() for name in (["mask"] if asked == "mask" else asked)]
    q, k, v, mask = tensors
    out = sdpa(q, k, v, mask, 0.2)
    for other in tensors:
        other.requires_grad_()
    some, every = gradients(out, leaves), gradients(sdpa(q, k, v, mask, 0.2), tensors)
    for found, leaf in zip(some, leaves, strict=True):
        assert torch.equal(found, next(right for right, x in zip(every, tensors, strict=True) if x is leaf))


def test_a_gradient_of_out_without_memory_of_its_own(device: str) -> None:
    q, k, v = qkv(device)
    mask = make("bool", MASKS["key"], device)
    ones = torch.ones(2, 4, 37, 16, device=device)
    found, expected = (
        torch.autograd.grad(sdpa(q, k, v, mask), (q, k, v), grad)
        for grad in (ones[:1, :1, :1, :1].expand(ones.shape), ones)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class FirstAlone(torch.autograd.Function):
    """Hands the first input on; its derivative says nothing of that one, and ones of the second."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


@pytest.mark.parametrize("kind", ["none", "bool", "bias", "bias with gradient"])
@pytest.mark.parametrize("by_python", [False, True])
def test_an_undefined_gradient_of_out(device: str, monkeypatch: pytest.MonkeyPatch, kind: str, by_python: bool) -> None:
    """Torch's formulas take one, and nothing depends on the inputs then."""
    if by_python:
        monkeypatch.setitem(aten_fused.filled, torch.device(device).type, False)
    q, k, v = qkv(device)
    mask = None if kind == "none" else make(kind, MASKS["shared"], device)
    other = torch.ones(2, 4, 37, 16, device=device, requires_grad=True)
    for function in (F.scaled_dot_product_attention, flash_ext.scaled_dot_product_attention):
        out = FirstAlone.apply(function(q, k, v, mask), other)
        found = torch.autograd.grad(out.sum(), (q, k, v, other), allow_unused=True)
        assert found[:3] == (None, None, None) or all(not x.any() for x in found[:3])
        assert (found[3] == 1).all()


# ---- A graph that outlives what made it -----------------------------------------------------------------------------


def test_backward_after_deactivate(device: str) -> None:
    q, k, v = qkv(device)
    mask = make("bool", MASKS["each"], device)
    expected = gradients(sdpa(q, k, v, mask, 0.3), (q, k, v))
    out = sdpa(q, k, v, mask, 0.3)
    assert is_fused(out)
    flash_ext.deactivate()
    assert all(torch.equal(a, b) for a, b in zip(gradients(out, (q, k, v)), expected, strict=True))


@pytest.mark.parametrize("order", ORDERS)
def test_hooks_that_give_saved_tensors_other_strides(device: str, order: str) -> None:
    q, k, v = qkv(device, order=order)
    mask = make("bias with gradient", MASKS["each"], device)
    expected = gradients(sdpa(q, k, v, mask, 0.3), (q, k, v, mask))
    for unpack in (torch.Tensor.contiguous, lambda x: x if x.dim() < 2 else x.mT.contiguous().mT):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), unpack):
            found = gradients(sdpa(q, k, v, mask, 0.3), (q, k, v, mask))
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_second_derivatives_are_refused(device: str) -> None:
    q, k, v = qkv(device)
    out = sdpa(q, k, v, make("bool", MASKS["key"], device))
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        dq.sum().backward()


# ---- The operator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(12, 16), (16, 12)], ids=str)
def test_calls_that_take_copies_go_by_python(device: str, dims: tuple[int, int]) -> None:
    q, k, v = qkv(device, dims=dims)
    mask = make("bool", MASKS["key"], device)
    out = sdpa(q, k, v, mask)
    assert not is_fused(out)
    assert_right(out, (q, k, v), q, k, v, mask)
    with pytest.raises(RuntimeError, match="need no copies"):
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable(q, k, v, mask)


def test_a_mask_beside_is_causal_is_refused(device: str) -> None:
    q, k, v = qkv(device)
    mask = make("bool", MASKS["shared"], device)
    with pytest.raises(RuntimeError, match="is_causal"):
        flash_ext.scaled_dot_product_attention(q, k, v, mask, is_causal=True)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own kernel divides by the number of heads")
@pytest.mark.parametrize("kind", ["none", "bool"])
def test_no_heads(device: str, kind: str) -> None:
    q, k, v = qkv(device, heads=(0, 0))
    mask = None if kind == "none" else make("bool", (37, 53), device)
    assert F.scaled_dot_product_attention(q, k, v, mask).shape == q.shape


def test_a_parameter_as_bias(device: str) -> None:
    q, k, v = qkv(device)
    bias = torch.nn.Parameter(random(1, 4, 37, 53, device=device))
    assert is_fused(flash_ext.scaled_dot_product_attention(q, k, v, bias))


def test_gradients_of_keys_that_are_repeated_in_memory(device: str) -> None:
    """Keys with a stride of 0 have no memory order to follow: nothing is copied."""
    q, k, v = qkv(device, heads=(4, 1))
    k, v = (x.detach().expand(2, 4, 53, 16).requires_grad_() for x in (k, v))
    out = flash_ext.scaled_dot_product_attention(q, k, v)
    assert is_fused(out)
    dk, dv = torch.autograd.grad(out.sum(), (k, v), retain_graph=True)
    assert strides(dk) == strides(dv) == [53 * 4 * 16, 16, 4 * 16, 1]
    assert_right(out, (q, k, v), q, k, v)


def test_an_operator_that_another_library_has_filled_is_left_alone(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aten_fused, "filled", {})
    monkeypatch.setattr(aten_fused, "has_kernel", lambda *args: True)
    assert not aten_fused.fill(torch.device(device).type)
    q, k, v = qkv(device)
    mask = make("bool", MASKS["key"], device)
    out = sdpa(q, k, v, mask)
    assert not is_fused(out)
    assert_right(out, (q, k, v), q, k, v, mask)


def test_autocast_comes_first(device: str) -> None:
    q, k, v = qkv(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        out = flash_ext.scaled_dot_product_attention(q, k, v)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("dropout_p", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability(device: str, dropout_p: float) -> None:
    """Our function refuses it; under activate() torch's own judgement stands."""
    q, k, v = qkv(device)
    mask = make("bool", MASKS["shared"], device)
    with pytest.raises(RuntimeError, match="dropout_p must be"):
        flash_ext.scaled_dot_product_attention(q, k, v, mask, dropout_p)

    def answer() -> Any:
        try:
            return sdpa(q, k, v, mask, dropout_p).shape
        except RuntimeError as error:
            return str(error)

    found = answer()
    flash_ext.deactivate()
    assert found == answer()


def test_compiled_programs_have_torchs_operators(device: str) -> None:
    q, k, v = qkv(device)
    mask = make("bool", MASKS["key"], device)
    graphs: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    out = torch.compile(F.scaled_dot_product_attention, backend=aot_autograd(fw_compiler=compiler))(q, k, v, mask)
    assert "aten._scaled_dot_product" in graphs[0] and "overrideable" not in graphs[0]
    assert_right(out, (q, k, v), q, k, v, mask)


@pytest.mark.parametrize("who", ["mode", "make_fx", "trace"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_who_looks_on_sees_the_operators_of_our_function(device: str, who: str) -> None:
    """Which can be stored and transformed: torch's has rules for neither."""
    q, k, v = qkv(device)
    mask = make("bool", MASKS["shared"], device)

    def attend(*tensors: Tensor) -> Tensor:
        return flash_ext.scaled_dot_product_attention(*tensors, mask)

    if who == "mode":
        with Names() as names:
            attend(q, k, v)
        seen = str(names.seen)
    else:
        seen = str((make_fx(attend)(q, k, v) if who == "make_fx" else torch.jit.trace(attend, (q, k, v))).graph)
    assert "attention_forward" in seen and "overrideable" not in seen


def test_vmap_of_our_function(device: str) -> None:
    q, k, v = qkv(device)
    mask = make("bool", MASKS["shared"], device)
    stacked = torch.stack([q, q.flip(0)])
    found = torch.vmap(lambda q: flash_ext.scaled_dot_product_attention(q, k, v, mask))(stacked)
    for out, query in zip(found, stacked, strict=True):
        torch.testing.assert_close(out, flash_ext.scaled_dot_product_attention(query, k, v, mask))
