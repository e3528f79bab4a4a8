"""Attention weights recomputed from the LSE, and their gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flash_ext
from flash_ext.functional import checked_score_options
from tests import reference
from tests.options.test_block_mask import make_blocked
from tests.oracle import (
    FLOATS,
    HALF,
    ROWS_OF_RMS,
    Call,
    assert_rms_within_bound,
    assert_within_bound,
    int32,
    largest_of,
    make_call,
    make_varlen_call,
    poisoned_outputs,
    random,
    random_rng,
    rounding_of_large_scores,
    run_library,
    score_options,
)

INPUTS = ("q", "k", "lse", "bias")


def run_weights(call: Call, lse: torch.Tensor, function: Any, dtype: torch.dtype, signed: bool) -> dict:
    """The weights and their gradients, by the library (dtype is the call's own) or by the oracle."""
    library = function is flash_ext.attention_weights
    given = {"q": call.q, "k": call.k, "lse": lse, "bias": call.options.get("bias")}
    leaves = {
        name: (t.detach() if library else t.detach().to(dtype)).requires_grad_()
        for name, t in given.items()
        if t is not None
    }
    if library:
        options = {name: value for name, value in call.options.items() if name != "sink"}
        weights = function(**{**options, **leaves}, signed=signed)
    else:
        weights = function(leaves["q"], leaves["k"], leaves["lse"], score_options(call, leaves), signed)
    found = torch.autograd.grad(weights, list(leaves.values()), call.grad_out.to(weights.dtype))
    return {"weights": weights.detach(), **{"d" + name: g for name, g in zip(leaves, found, strict=True)}}


def assert_weights_match(call: Call, signed: bool = False) -> torch.Tensor:
    lse = run_library(call)["lse"]
    shape = (call.q.shape[0], call.q.shape[2], call.q.shape[1], call.k.shape[1])
    call.grad_out = random(*shape, dtype=call.dtype, device=str(call.q.device))
    ref = run_weights(call, lse, reference.attention_weights, torch.float64, signed)
    low = run_weights(call, lse, reference.attention_weights, call.dtype, signed)
    got = run_weights(call, lse, flash_ext.attention_weights, call.dtype, signed)
    with poisoned_outputs():
        poisoned = run_weights(call, lse, flash_ext.attention_weights, call.dtype, signed)
    assert got["weights"].shape == shape and got["weights"].dtype == call.dtype
    factor = 3.0 if call.options.get("softcap") else 2.0
    slack = slack_of_rows(call, lse, ref, signed)
    some_rows = call.dtype in HALF and int(lse.isfinite().sum()) >= ROWS_OF_RMS
    for name in ref:
        for result in (got, poisoned):
            bound = name, result[name], ref[name], low[name], call.dtype, factor, slack[name]
            assert_within_bound(*bound)
            if some_rows and name != "weights":
                assert_rms_within_bound(*bound)
    return got["weights"]


def slack_of_rows(call: Call, lse: torch.Tensor, ref: dict, signed: bool) -> dict[str, torch.Tensor]:
    """What rows of large scores may be off: themselves, and what they add to the gradients of keys and of bias."""
    large = rounding_of_large_scores(call.lse_dtype, lse, call.q.shape[-1])
    slack = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in ref.items()}
    if not large.any():
        return slack
    of_row = {"weights": large.transpose(1, 2), "dq": large, "dlse": large.squeeze(-1).transpose(1, 2)}
    slack |= {name: part * largest_of(ref[name]) for name, part in of_row.items()}
    noisy = replace(call, grad_out=call.grad_out.abs() * large.transpose(1, 2))
    noise = run_weights(noisy, lse, reference.attention_weights, torch.float32, signed)
    slack["dk"] += noise["dk"].abs().amax(-1, keepdim=True)
    if "dbias" in slack:
        slack["dbias"] += noise["dbias"].abs()
    return slack


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "top_left": True},
    "window": {"window_size": (5, 3)},
    "softcap": {"softcap": 2.0},
    "scale": {"softmax_scale": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_weights_and_gradients_match_the_oracle(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert_weights_match(make_call(dtype=dtype, device=device, **options))


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int) -> None:
    assert_weights_match(make_call(1, 70, 131, head_dim=head_dim, dtype=dtype, device=device, causal=True))


@pytest.mark.parametrize(
    "shape", [(2, 4, 70, 131), (1, 4, 70, 131), (2, 1, 1, 131), (1, 4, 70, 1), (1, 1, 1, 1)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_broadcast_bias(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bias = random(*shape, dtype=dtype, device=device)
    assert_weights_match(make_call(2, 70, 131, dtype=dtype, device=device, bias=bias, causal=True))


@pytest.mark.parametrize("block", [(16, 32), (64, 64), (128, 128), (1, 32)], ids=str)
def test_block_mask(device: str, dtype: torch.dtype, block: tuple[int, int]) -> None:
    assert_weights_match(make_blocked(device, dtype, block=block, causal=True))


def test_packed_sequences(device: str, dtype: torch.dtype) -> None:
    """Each gives what it gives alone; what no sequence reaches is 0."""
    call = make_varlen_call([70, 1, 0, 33], [131, 5, 9, 2], device, spare=3, causal=True, dtype=dtype)
    used_q, used_k = [70, 0, 0, 30], [100, 5, 9, 2]
    options = {**call.options, "seqused_q": int32(used_q, device), "seqused_k": int32(used_k, device)}
    lse = run_library(call.with_options(**options))["lse"]
    q, k = call.q.requires_grad_(), call.k.requires_grad_()
    with poisoned_outputs():
        weights = flash_ext.attention_weights(q, k, lse, **options)
        grad_weights = random(*weights.shape, device=device)
        dq, dk = torch.autograd.grad(weights, (q, k), grad_weights)
    left_weights, left_dq, left_dk = weights.detach().clone(), dq.clone(), dk.clone()
    for b, (len_q, len_k) in enumerate(zip(used_q, used_k, strict=True)):
        rows_q = slice(int(options["cu_seqlens_q"][b]), int(options["cu_seqlens_q"][b]) + len_q)
        rows_k = slice(int(options["cu_seqlens_k"][b]), int(options["cu_seqlens_k"][b]) + len_k)
        alone = flash_ext.attention_weights(q[rows_q][None], k[rows_k][None], lse[:, rows_q][None], causal=True)
        torch.testing.assert_close(weights[b, :, :len_q, :len_k], alone[0])
        found = torch.autograd.grad(alone, (q, k), grad_weights[b : b + 1, :, :len_q, :len_k])
        torch.testing.assert_close((dq[rows_q], dk[rows_k]), (found[0][rows_q], found[1][rows_k]))
        left_weights[b, :, :len_q, :len_k] = left_dq[rows_q] = left_dk[rows_k] = 0
    assert not left_weights.any() and not left_dq.any() and not left_dk.any()


@pytest.mark.parametrize("shape", [(1, 2, 130, 140), (1, 1, 1, 140), (1, 1, 1, 1)], ids=str)
def test_gradients_are_repeatable(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    call = make_call(2, 130, 140, heads_q=2, dtype=dtype, device=device, bias=random(*shape, device=device))
    lse = run_library(call)["lse"]
    leaves = [t.requires_grad_() for t in (call.q, call.k, lse, call.options["bias"])]
    weights = flash_ext.attention_weights(*leaves[:3], bias=leaves[3])
    first, second = (torch.autograd.grad(weights, leaves, torch.ones_like(weights), retain_graph=True) for _ in "12")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_with_bias_mask_and_alibi(device: str, dtype: torch.dtype) -> None:
    assert_weights_match(
        make_call(
            dtype=dtype,
            device=device,
            bias=random(1, 4, 33, 47, device=device),
            mask=torch.rand(2, 1, 33, 47, device=device) < 0.6,
            alibi_slopes=torch.rand(4, device=device),
        )
    )


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_with_dropout(device: str, dtype: torch.dtype, signed: bool, p: float) -> None:
    """Dropped weights are 0 and the others scaled; signed, they are negative and nothing is scaled."""
    call = make_call(dtype=dtype, device=device, causal=True, dropout_p=p, rng_state=random_rng(device))
    assert_weights_match(call, signed)


def test_the_rows_sum_to_one(device: str, dtype: torch.dtype) -> None:
    weights = assert_weights_match(make_call(dtype=dtype, device=device, causal=True))
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_the_rest_of_the_row_went_to_the_sink(device: str) -> None:
    sink = random(4, device=device)
    call = make_call(device=device, dtype=torch.float32, sink=sink)
    lse = run_library(call)["lse"]
    weights = flash_ext.attention_weights(call.q, call.k, lse)
    share_of_sink = torch.exp(sink[None, :, None] - lse)
    torch.testing.assert_close(weights.sum(-1) + share_of_sink, torch.ones_like(lse))


def test_weights_times_v_is_the_output(device: str) -> None:
    call = make_call(
        heads_q=2, device=device, dtype=torch.float32, causal=True, dropout_p=0.4, rng_state=random_rng(device)
    )
    result = run_library(call)
    weights = flash_ext.attention_weights(call.q, call.k, result["lse"], **call.options)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, call.v), result["out"])


def test_rows_that_see_nothing_have_no_weights(device: str, dtype: torch.dtype) -> None:
    weights = assert_weights_match(make_call(2, 47, 33, dtype=dtype, device=device, causal=True))
    assert (weights[:, :, :14] == 0).all()


def test_rows_of_an_lse_of_minus_infinity_have_no_weights(device: str, dtype: torch.dtype) -> None:
    """Whatever their scores are: such an lse says that the row saw nothing."""
    call = make_call(dtype=dtype, device=device, causal=True)
    lse = run_library(call)["lse"]
    lse[:, :, ::3] = -torch.inf
    leaves = [t.requires_grad_() for t in (call.q, call.k, lse)]
    weights = flash_ext.attention_weights(*leaves, causal=True)
    assert not weights[:, :, ::3].any()
    grad_weights = random(*weights.shape, device=device)
    dq, dk, dlse = torch.autograd.grad(weights, leaves, grad_weights, retain_graph=True)
    assert not dq[:, ::3].any() and not dlse[:, :, ::3].any()
    grad_weights[:, :, ::3] = 0
    for got, want in zip((dq, dk, dlse), torch.autograd.grad(weights, leaves, grad_weights), strict=True):
        torch.testing.assert_close(got, want)


def test_rows_that_are_not_in_use_have_no_weights(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device, causal=True, seqused_q=int32([33, 5], device))
    lse = run_library(call)["lse"]
    with poisoned_outputs():
        weights = flash_ext.attention_weights(call.q, call.k, lse, **call.options)
    assert weights[:, :, :5].any() and not weights[1, :, 5:].any()


def test_dropout_that_is_to_be_ignored(device: str, dtype: torch.dtype) -> None:
    """dropout_mode 0 of the operator: the weights that dropout would act on."""
    call = make_call(dtype=dtype, device=device, causal=True)
    lse = run_library(call)["lse"]
    options = checked_score_options(call.q, call.k, causal=True, dropout_p=0.4, rng_state=random_rng(device))
    weights = torch.ops.flash_ext.attention_weights(call.q, call.k, lse, 0, *options)
    assert torch.equal(weights, flash_ext.attention_weights(call.q, call.k, lse, causal=True))


def test_hidden_keys_may_hold_nan(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device, causal=True, top_left=True)
    call.k[:, 33:] = call.v[:, 33:] = torch.nan
    assert_weights_match(call)


def test_beyond_one_tile(device: str, dtype: torch.dtype) -> None:
    assert_weights_match(make_call(1, 203, 313, heads_q=2, heads_kv=1, dtype=dtype, device=device, causal=True))


def test_strided_gradient(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    lse = run_library(call)["lse"]
    q = call.q.requires_grad_()
    weights = flash_ext.attention_weights(q, call.k, lse)
    (mean_of_heads,) = torch.autograd.grad(weights.mean(1).sum(-1).square().sum(), q, retain_graph=True)
    dense = torch.full_like(weights, 2.0 / 4) * weights.mean(1, keepdim=True).sum(-1, keepdim=True).detach()
    (expected,) = torch.autograd.grad(weights, q, dense)
    torch.testing.assert_close(mean_of_heads, expected)
