"""Gradients of the operators: which are computed, in which forms they come and go, and what refuses them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import flash_ext
from flash_ext.functional import checked_score_options
from tests.integration.test_ops import OPS, assert_all_equal, option_values, qkv
from tests.oracle import int32, random


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sink"])
def test_only_requested_gradients_are_computed(device: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["q", "k", "v", "bias", "sink"]
    tensors = dict(
        zip(names, [*qkv(device), random(1, 4, 9, 13, device=device), random(4, device=device)], strict=True)
    )
    tensors = {name: t.detach().requires_grad_(name == wanted) for name, t in tensors.items()}
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is OPS.attention_backward.default:
                seen.append(args[8:13])
            return func(*args, **(kwargs or {}))

    out = flash_ext.attention(**tensors)
    with Spy():
        out.sum().backward()
    assert seen == [tuple(name == wanted for name in names)]
    assert [name for name, t in tensors.items() if t.grad is not None] == [wanted]


def test_gradients_that_are_not_asked_for_are_empty(device: str) -> None:
    q, k, v = (t.detach() for t in qkv(device))
    values = option_values(q, k, {})
    out, lse = OPS.attention_forward(q, k, v, *values)
    found = OPS.attention_backward(out, lse, q, k, v, out, lse, False, False, True, False, False, False, *values)
    assert [tuple(t.shape) for t in found] == [(0,), tuple(k.shape), (0,), (0,), (0,)]


def test_expanded_and_strided_output_gradients(device: str) -> None:
    q, k, v = qkv(device)
    out = flash_ext.attention(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    assert_all_equal(torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True), expected)
    turned = torch.ones_like(out).transpose(1, 3).contiguous().transpose(1, 3)
    assert_all_equal(torch.autograd.grad(out, (q, k, v), turned), expected)


class Arguments(torch.utils._python_dispatch.TorchDispatchMode):
    """What an operator is called with."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.op:
            self.seen.append(args)
        return func(*args, **(kwargs or {}))


def test_gradients_that_do_not_come_are_none(device: str) -> None:
    """Not zeros, which would be read and multiplied; v then gets none either."""
    q, k, v = (t.requires_grad_() for t in qkv(device))
    need_dv = 10
    for name in ("out", "lse"):
        out, lse = flash_ext.attention(q, k, v, return_lse=True)
        with Arguments(OPS.attention_backward.default) as arguments:
            (out if name == "out" else lse).sum().backward()
        (seen,) = arguments.seen
        assert (seen[0] is None, seen[1] is None) == (name == "lse", name == "out")
        assert seen[need_dv] is (name == "out")


def test_deterministic_reaches_the_backward(device: str) -> None:
    q, k, v = qkv(device)
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is OPS.attention_backward.default:
                seen.append(args[7])
            return func(*args, **(kwargs or {}))

    for deterministic in (True, False, None):
        out = flash_ext.attention(q, k, v, deterministic=deterministic)
        with Spy():
            out.sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        out = flash_ext.attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    with Spy():
        out.sum().backward()
    for flag in (True, False):
        out = flash_ext.flash_attn_func(q, k, v, deterministic=flag)
        with Spy():
            out.sum().backward()
    assert seen == [True, False, False, True, True, False]


def test_function_modes_see_calls_that_need_gradients(device: str) -> None:
    q, k, v = qkv(device)
    seen = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        out = flash_ext.attention(q, k, v)
    assert OPS.attention_forward.default in seen
    assert_all_equal(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (out, flash_ext.attention(q, k, v))))


def test_dispatch_modes_see_one_operator(device: str) -> None:
    q, k, v = (t.detach() for t in qkv(device))
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        out = flash_ext.attention(q, k, v)
    assert seen == [OPS.attention_forward.default]
    assert torch.equal(out, flash_ext.attention(q, k, v))


def test_first_call_of_a_thread(device: str) -> None:
    """A thread that has not called CUDA yet."""
    q, k, v = (random(1, 128, 4, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    results = []
    thread = threading.Thread(target=lambda: results.append(flash_ext.attention(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], flash_ext.attention(q, k, v))


def test_parameters_and_saved_tensor_hooks(device: str) -> None:
    q, k, v = (torch.nn.Parameter(t.detach()) for t in qkv(device))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = flash_ext.attention(q, k, v, bias=random(1, 1, 9, 13, device=device))
    assert len(saved) == 6  # q, k, v, bias, out, lse
    out.sum().backward()
    assert_all_equal(
        [t.grad for t in (q, k, v)],
        torch.autograd.grad(
            OPS.attention_forward(q, k, v, *checked_score_options(q, k, bias=saved[-1]))[0].sum(), (q, k, v)
        ),
    )


def with_other_strides(x: Tensor) -> Tensor:
    return x.clone() if x.dim() < 2 else x.mT.contiguous().mT


def varlen_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = {"cu_seqlens_q": int32([0, 4, 9], q.device), "cu_seqlens_k": int32([0, 6, 13], q.device)}
    return flash_ext.attention(q[0], k[0], v[0], **lengths)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
    return flash_ext.attention(q, k, v, bias=bias, sink=sink)


def attention_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    _, lse = flash_ext.attention(q, k, v, return_lse=True)
    return flash_ext.attention_weights(q, k, lse) + v.sum()


def merged(outs: Tensor, lses: Tensor) -> Tensor:
    return flash_ext.merge(outs, lses)[0]


@pytest.mark.parametrize("call", [flash_ext.attention, varlen_attention, biased_attention, attention_weights, merged])
def test_saved_tensors_of_other_strides(device: str, call: Callable[..., Tensor]) -> None:
    """Hooks on saved tensors promise values, and no strides."""
    inputs = qkv(device)
    if call is biased_attention:
        inputs = (*inputs, random(1, 4, 9, 13, device=device), random(4, device=device))
    if call is merged:
        inputs = (random(2, 1, 9, 2, 16, device=device), random(2, 1, 2, 9, device=device))
    leaves = [x.detach().requires_grad_() for x in inputs]
    weight = random(*call(*leaves).shape, device=device)
    expected = torch.autograd.grad((call(*leaves) * weight).sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, with_other_strides):
        found = torch.autograd.grad((call(*leaves) * weight).sum(), leaves)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_attention_differentiates_once(device: str) -> None:
    q, k, v = qkv(device)
    (dq,) = torch.autograd.grad(flash_ext.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated once.*SDPBackend\.MATH"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: flash_ext.attention(q, k, v).sum())(q).sum())(q.detach())


def test_alibi_slopes_refuse_a_gradient(device: str) -> None:
    q, k, v = qkv(device)
    with pytest.raises(RuntimeError, match="alibi_slopes has no gradient"):
        flash_ext.attention(q, k, v, alibi_slopes=torch.rand(4, device=device).requires_grad_())
    lse = flash_ext.attention(q, k, v, return_lse=True)[1].detach()
    with pytest.raises(RuntimeError, match="alibi_slopes has no gradient"):
        flash_ext.attention_weights(q, k, lse, alibi_slopes=torch.rand(4, device=device).requires_grad_())


@pytest.mark.op("attention_decode")
def test_decode_refuses_a_gradient(device: str) -> None:
    q, k, v = (random(2, 1, 4, 16, device=device).requires_grad_() for _ in range(3))
    caches = [random(2, 32, 4, 16, device=device) for _ in range(2)]
    out = flash_ext.decode(q, *caches)
    with pytest.raises(RuntimeError, match="no derivative"):
        out.sum().backward()
    lengths = int32([3, 4], device)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        flash_ext.decode(q, *caches, k=k, v=v, cache_seqlens=lengths)
    with torch.no_grad():
        flash_ext.decode(q, *caches, k=k, v=v, cache_seqlens=lengths)


@pytest.mark.op("attention_decode_append")
def test_append_is_seen_by_autograd(device: str) -> None:
    caches = [random(2, 32, 4, 16, device=device) for _ in range(2)]
    factor = random(2, 32, 4, 16, device=device).requires_grad_()
    product = factor * caches[0]
    q, k, v = (random(2, 1, 4, 16, device=device) for _ in range(3))
    flash_ext.decode(q, *caches, k=k, v=v, cache_seqlens=int32([3, 4], device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_inference_mode(device: str) -> None:
    q, k, v = (t.detach() for t in qkv(device))
    with torch.inference_mode():
        inside = flash_ext.attention(q, k, v)
    assert torch.equal(inside, flash_ext.attention(q, k, v))
    assert not flash_ext.attention(q, k, v).requires_grad


def test_checkpoint_draws_the_same_dropout_again(device: str) -> None:
    q, k, v = qkv(device)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(7)
        function = lambda *t: flash_ext.attention(*t, dropout_p=0.5)  # noqa: E731
        run = (
            torch.utils.checkpoint.checkpoint(function, q, k, v, use_reentrant=False)
            if checkpointed
            else function(q, k, v)
        )
        results.append(torch.autograd.grad(run.sum(), (q, k, v)))
    assert_all_equal(*results)
