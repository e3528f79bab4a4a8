"""``return_max_logit``: the largest score that a query of each head sees, of each batch entry or packed sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

import flash_ext
from tests import reference
from tests.numerics import problems
from tests.numerics.test_random import QUICK_SCORES, run_problems
from tests.oracle import (
    FLOATS,
    HALF,
    Call,
    cumulative,
    int32,
    make_call,
    make_varlen_call,
    poisoned_outputs,
    random,
    random_rng,
    reference_max_logit,
    run_library,
)


def max_logit_of(call: Call) -> Tensor:
    _, max_logit = flash_ext.attention(call.q, call.k, call.v, **call.options, return_max_logit=True)
    return max_logit


def tolerance(call: Call, expected: Tensor) -> Tensor:
    """Units in the last place of what is added up to a score; the tanh of GPUs has 2^-11."""
    eps = torch.finfo(call.lse_dtype).eps
    q, k = (torch.nan_to_num(x.double(), 0, 0, 0) for x in (call.q, call.k))
    norms = [x.norm(dim=-1).max().item() if x.numel() else 0.0 for x in (q, k)]
    scale = call.options.get("softmax_scale")
    size = norms[0] * norms[1] * abs(call.q.shape[-1] ** -0.5 if scale is None else scale)
    bias, slopes = call.options.get("bias"), call.options.get("alibi_slopes")
    if bias is not None and bias.numel():
        size += bias.double().nan_to_num(0, 0, 0).abs().max().item()
    if slopes is not None and slopes.numel():
        size += slopes.abs().max().item() * (call.q.shape[-3] + call.k.shape[-3])
    cap = call.options.get("softcap", 0.0)
    coarse = call.q.is_cuda and call.dtype in HALF
    smallest = torch.finfo(call.lse_dtype).tiny  # scores below it may be 0
    return torch.full_like(expected, 32 * eps * (size + cap) + (2**-9 * cap if coarse else 0.0) + smallest)


def assert_right(call: Call) -> Tensor:
    expected = reference_max_logit(call)
    with poisoned_outputs():
        found = max_logit_of(call)
    assert found.dtype == call.lse_dtype and found.shape == expected.shape and not found.requires_grad
    nothing = expected.isneginf()
    assert torch.equal(found.isneginf(), nothing), (found, expected)
    error = torch.where(nothing, 0, found.double() - torch.where(nothing, 0, expected)).abs()
    assert (error <= tolerance(call, error)).all(), f"{error.max().item():.2e} of {expected.abs().max().item():.3g}"
    return found


# ---- Every option ---------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda device: {},
    "causal": lambda device: {"causal": True},
    "top_left": lambda device: {"causal": True, "top_left": True},
    "window": lambda device: {"window_size": (20, 3)},
    "negative_scale": lambda device: {"softmax_scale": -0.4},
    "softcap": lambda device: {"softcap": 3.0},
    "alibi": lambda device: {"alibi_slopes": torch.rand(4, device=device)},
    "alibi_by_batch": lambda device: {"alibi_slopes": torch.rand(2, 4, device=device), "causal": True},
    "bias": lambda device: {"bias": random(2, 4, 150, 201, device=device)},
    "bias_per_key": lambda device: {"bias": random(1, 4, 1, 201, dtype=torch.bfloat16, device=device)},
    "mask": lambda device: {"mask": torch.rand(2, 1, 150, 201, device=device) < 0.1},
    "all_hidden": lambda device: {"mask": torch.zeros(1, 1, 150, 201, dtype=torch.bool, device=device)},
    "seqused": lambda device: {"seqused_q": int32([150, 40], device), "seqused_k": int32([0, 77], device)},
    "all": lambda device: {
        "window_size": (90, 40),
        "softcap": 5.0,
        "alibi_slopes": torch.rand(4, device=device),
        "bias": random(1, 4, 150, 201, device=device),
        "mask": torch.rand(2, 1, 150, 201, device=device) < 0.5,
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_options(device: str, dtype: torch.dtype, options: str) -> None:
    assert_right(make_call(2, 150, 201, 4, 2, 64, dtype=dtype, device=device, **OPTIONS[options](device)))


@pytest.mark.parametrize(
    "head_dims", [(8, 8), (40, 40), (64, 128), (96, 96), (128, 128), (136, 136), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_head_dims(device: str, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    """Several key tiles, of which the last is not full."""
    head_dim, head_dim_v = head_dims
    call = make_call(1, 70, 333, 2, 1, head_dim, head_dim_v, dtype=dtype, device=device, causal=True)
    assert_right(call)
    assert_right(call.with_options(bias=random(1, 2, 70, 333, dtype=dtype, device=device)))


@pytest.mark.parametrize("block", [(64, 64), (128, 128), (16, 32)], ids=str)
def test_block_mask(device: str, dtype: torch.dtype, block: tuple[int, int]) -> None:
    see = torch.rand(2, 4, 150, 300, device=device) < 0.02
    see[:, 1] = False
    see[:, 2, 20:90, 100:260] = True
    mask = flash_ext.BlockMask.from_dense(see, block)
    call = make_call(2, 150, 300, 4, 2, 64, dtype=dtype, device=device, block_mask=mask)
    call.block_visible = see
    assert assert_right(call)[:, 1].isneginf().all()


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 17], ids=str)
def test_few_queries(device: str, rows: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_right(make_call(2, rows, 1025, 8, 2, 128, dtype=dtype, device=device, causal=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(device: str, dtype: torch.dtype, causal: bool) -> None:
    """Some without queries, some without keys, one behind the others' last tile; rows of no sequence hold NaN."""
    lengths_q, lengths_k = [64, 0, 1, 63, 130, 5, 0], [70, 3, 0, 64, 100, 300, 0]
    call = make_varlen_call(lengths_q, lengths_k, device, spare=9, head_dim=64, dtype=dtype, causal=causal)
    for t, lengths in ((call.q, lengths_q), (call.k, lengths_k), (call.v, lengths_k)):
        t[sum(lengths) :] = torch.nan
    found = assert_right(call)
    assert found[[1, 2, 6]].isneginf().all() and found[[0, 3, 4, 5]].isfinite().all()
    loose = call.with_options(max_seqlen_q=None, max_seqlen_k=None)
    assert torch.equal(max_logit_of(loose), found)


def test_random_problems(device: str) -> None:
    """Any options, layouts and lengths."""

    def check(data: st.DataObject) -> None:
        call, _ = data.draw(problems.attention_calls(device, QUICK_SCORES))
        assert_right(call)

    run_problems(check)


def test_empty_tensors(device: str) -> None:
    for batch, rows, keys in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        found = assert_right(make_call(batch, rows, keys, device=device))
        assert found.shape == (batch, 4) and found.isneginf().all()


# ---- What it does not depend on, and what it does -------------------------------------------------------------------


def test_sink_and_dropout_have_no_influence(device: str, dtype: torch.dtype) -> None:
    call = make_call(2, 130, 200, dtype=dtype, device=device, head_dim=64, causal=True)
    expected = max_logit_of(call)
    sink = call.with_options(sink=torch.full((4,), 50.0, device=device))
    dropout = call.with_options(dropout_p=0.9, rng_state=random_rng(device))
    torch.testing.assert_close(max_logit_of(sink), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(max_logit_of(dropout), expected, rtol=1e-5, atol=1e-5)


def test_nothing_else_changes(device: str, dtype: torch.dtype) -> None:
    """Out, lse and gradients have the same bits, whatever stands beside them. Sequences of few queries have other tiles
    on Hopper, so these are longer."""
    call = make_call(2, 400, 500, dtype=dtype, device=device, head_dim=64, causal=True, deterministic=True)
    expected = run_library(call.with_random_gradients(), ("q", "k", "v"))
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v)]
    out, lse, max_logit = flash_ext.attention(*leaves, **call.options, return_lse=True, return_max_logit=True)
    assert torch.equal(out, expected["out"]) and torch.equal(lse, expected["lse"])
    assert max_logit.grad_fn is None and not max_logit.requires_grad
    plain = flash_ext.attention(*leaves, **call.options, return_lse=True)
    weights = [torch.randn_like(out), torch.randn_like(lse)]
    for one, other in zip(
        torch.autograd.grad((out, lse), leaves, weights), torch.autograd.grad(plain, leaves, weights), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hidden_keys_have_no_influence(device: str, dtype: torch.dtype) -> None:
    see = torch.rand(2, 1, 1, 200, device=device) < 0.5
    call = make_call(2, 130, 200, dtype=dtype, device=device, head_dim=64, mask=see)
    expected = max_logit_of(call)
    for value in (math.nan, math.inf):
        call.k[~see[:, 0, 0]] = value
        assert torch.equal(max_logit_of(call), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 77, 199])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_visible_scores_that_are_no_numbers(
    device: str, dtype: torch.dtype, value: float, place: int, dropout_p: float
) -> None:
    """Of their own head and batch entry alone. Inf may come back as NaN."""
    call = make_call(2, 130, 200, 4, 2, 64, dtype=dtype, device=device, dropout_p=dropout_p)
    call.q[:] = call.q.abs() + 0.1
    expected = max_logit_of(call)
    call.k[1, place, 1] = call.k[1, place, 1].abs()
    call.k[1, place, 1, 3] = value
    found = max_logit_of(call)
    assert not found[1, 2:].isfinite().any() and not found[1, 2:].isneginf().any()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1, :2], expected[1, :2])


@pytest.mark.parametrize("query", [0, 3, 77, 129])
def test_one_query_that_is_no_number(device: str, dtype: torch.dtype, query: int) -> None:
    """Larger numbers of other queries, before it and behind it, do not hide it."""
    call = make_call(2, 130, 200, 4, 2, 64, dtype=dtype, device=device, causal=True)
    call.q[0, query, 2] = math.nan
    found = max_logit_of(call)
    assert found[0, 2].isnan() and found.isnan().sum() == 1


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("seqlen_q", [70, 700])
def test_scores_that_grow(device: str, dtype: torch.dtype, seqlen_q: int, head_dims: tuple[int, int]) -> None:
    """By thousands, from the last keys to the first: more than a weight can hold, so that rows are computed again."""
    head_dim, head_dim_v = head_dims
    call = make_call(1, seqlen_q, 900, 2, 2, head_dim, head_dim_v, dtype=dtype, device=device, softmax_scale=1.0)
    call.q[:], call.k[:] = 0.0, 0.0
    call.q[..., 0] = torch.linspace(1.0, 8.0, seqlen_q, device=device)[None, :, None]
    call.k[..., 0] = torch.linspace(400.0, -400.0, 900, device=device)[None, :, None]
    largest = (call.q[0, -1, 0, 0].float() * call.k[0, 0, 0, 0].float()).item()
    torch.testing.assert_close(max_logit_of(call).float(), torch.full((1, 2), largest, device=device))


def test_in_a_cuda_graph(device: str) -> None:
    """What is there from the call before is no bound on the next one."""
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    call = make_call(2, 300, 300, 4, 2, 64, dtype=torch.bfloat16, device=device)
    max_logit_of(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_ext.attention(call.q, call.k, call.v, return_max_logit=True)[1]
    graph.replay()
    torch.testing.assert_close(found, max_logit_of(call))
    call.q.mul_(0.25)
    graph.replay()
    torch.testing.assert_close(found, max_logit_of(call))


def test_a_score_of_minus_infinity_is_a_hidden_pair(device: str, dtype: torch.dtype) -> None:
    bias = random(1, 4, 130, 200, device=device)
    bias[..., 100:] = -math.inf
    bias[:, 3] = -math.inf
    found = assert_right(make_call(2, 130, 200, dtype=dtype, device=device, bias=bias))
    assert found[:, 3].isneginf().all() and found[:, :3].isfinite().all()


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_scores_of_one_sign(device: str, dtype: torch.dtype, sign: float) -> None:
    """Where CTAs meet, floats of either sign are compared as integers."""
    call = make_call(2, 300, 500, dtype=dtype, device=device, head_dim=64)
    call.q[:], call.k[:] = call.q.abs(), sign * call.k.abs()
    found = assert_right(call)
    assert (torch.sign(found) == sign).all()


def test_one_largest_score_anywhere(device: str, dtype: torch.dtype) -> None:
    """In any tile, alone."""
    call = make_call(1, 200, 700, 1, 1, 64, dtype=dtype, device=device)
    for i, j in ((0, 0), (63, 64), (64, 63), (130, 699), (199, 350), (199, 699)):
        call.q[:], call.k[:] = 0, 0
        call.q[0, i, 0, 5], call.k[0, j, 0, 5] = 4.0, 6.0
        torch.testing.assert_close(max_logit_of(call), torch.full((1, 1), 3.0, device=device, dtype=torch.float32))


# ---- Inside of PyTorch ----------------------------------------------------------------------------------------------


def test_form_of_the_result(device: str) -> None:
    call = make_call(device=device)
    given = dict(call.options)
    assert isinstance(flash_ext.attention(call.q, call.k, call.v, **given), Tensor)
    assert len(flash_ext.attention(call.q, call.k, call.v, **given, return_max_logit=True)) == 2
    results = flash_ext.attention(call.q, call.k, call.v, **given, return_lse=True, return_max_logit=True)
    assert [t.shape for t in results] == [call.q.shape, (2, 4, 33), (2, 4)]
    with pytest.raises(TypeError, match="return_max_logit"):
        flash_ext.attention(call.q, call.k, call.v, return_max_logit=1)


def test_supports_and_explain(device: str) -> None:
    call = make_call(device=device)
    assert flash_ext.supports(call.q, call.k, call.v, return_max_logit=True) == (True, "")
    ok, reason = flash_ext.supports(call.q, call.k, call.v, return_max_logit=2)
    assert not ok and "return_max_logit" in reason
    explained = flash_ext.explain(call.q, call.k, call.v, return_max_logit=True)
    assert explained.problem.wants_max_logit and "max_logit" in str(explained)
    for operation, given in (("forward", {}), ("backward", {"return_max_logit": True})):
        explained = flash_ext.explain(call.q, call.k, call.v, operation=operation, **given)
        assert not explained.problem.wants_max_logit and "max_logit" not in str(explained)


def test_compiled(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, max_logit = flash_ext.attention(q, k, v, causal=True, return_max_logit=True)
        return out.sum(), max_logit * 2

    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v)]
    expected = function(*leaves)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(found, expected)
    assert not found[1].requires_grad
    for one, other in zip(torch.autograd.grad(found[0], leaves), torch.autograd.grad(expected[0], leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", ["plain", "bias", "dropout"])
def test_vmap(device: str, options: str) -> None:
    given: dict[str, Any] = {"bias": {"bias": random(2, 4, 33, 47, device=device)}}.get(options, {})
    if options == "dropout":  # is looped over
        given = {"dropout_p": 0.5, "rng_state": random_rng(device)}
    calls = [make_call(device=device) for _ in range(3)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_ext.attention(q, k, v, return_lse=True, return_max_logit=True, **given)

    tensors = [torch.stack([getattr(call, name) for call in calls]) for name in "qkv"]
    expected = [torch.stack(results) for results in zip(*(function(c.q, c.k, c.v) for c in calls), strict=True)]
    for one, other in zip(torch.vmap(function)(*tensors), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_torch_func(device: str) -> None:
    call = make_call(device=device)

    def function(q: Tensor) -> tuple[Tensor, Tensor]:
        out, max_logit = flash_ext.attention(q, call.k, call.v, return_max_logit=True)
        return out.sum(), max_logit

    gradient, max_logit = torch.func.grad(function, has_aux=True)(call.q)
    leaf = call.q.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(function(leaf)[0], leaf)[0])
    torch.testing.assert_close(max_logit, max_logit_of(call))


def test_autocast(device: str) -> None:
    call = make_call(device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, max_logit = flash_ext.attention(call.q, call.k, call.v, return_max_logit=True)
    half = Call(call.q.bfloat16(), call.k.bfloat16(), call.v.bfloat16())
    assert out.dtype == torch.bfloat16 and max_logit.dtype == torch.float32
    assert torch.equal(max_logit, max_logit_of(half))


def test_nested_tensors(device: str) -> None:
    lengths = [5, 40, 1, 130]
    offsets = cumulative(lengths, device).long()
    q, k, v = (nested_tensor_from_jagged(random(sum(lengths), 4, 32, device=device), offsets) for _ in range(3))
    results = flash_ext.attention(q, k, v, causal=True, return_lse=True, return_max_logit=True)
    assert len(results) == 3 and results[0].is_nested and results[1].is_nested and not results[2].is_nested
    expected = [
        reference.max_logit(a[None].double(), b[None].double(), reference.Options(causal=True))[0]
        for a, b in zip(q.unbind(), k.unbind(), strict=True)
    ]
    torch.testing.assert_close(results[2].double(), torch.stack(expected), rtol=1e-5, atol=1e-5)
    out, max_logit = flash_ext.attention(q, k, v, causal=True, return_max_logit=True)
    assert out.is_nested and torch.equal(max_logit, results[2])


def test_qk_clip_bounds_the_scores(device: str) -> None:
    """What the number is for: with both projections scaled so, no score exceeds the bound."""
    call = make_call(device=device, heads_kv=4)
    bound = 0.5
    largest = max_logit_of(call).amax(0)
    factor = (bound / largest).clamp(max=1.0).sqrt()[:, None]
    clipped = Call(call.q * factor, call.k * factor, call.v)
    assert (largest > bound).any() and (max_logit_of(clipped) <= bound * (1 + 1e-5)).all()
