"""Attention weights recomputed from the LSE, and their gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_ext

from . import reference
from .oracle import (
    FLOATS,
    Call,
    assert_within_bound,
    dtypes_of,
    make_call,
    poisoned_outputs,
    random,
    random_rng,
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
    for name in ref:
        for result in (got, poisoned):
            assert_within_bound(name, result[name], ref[name], low[name], call.dtype, factor)
    return got["weights"]


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
    if dtype not in dtypes_of(device):
        pytest.skip(f"{dtype} is for the CPU")
    assert_weights_match(make_call(dtype=dtype, device=device, **options))


def test_with_bias_mask_and_alibi(device: str) -> None:
    assert_weights_match(
        make_call(
            device=device,
            bias=random(1, 4, 33, 47, device=device),
            mask=torch.rand(2, 1, 33, 47, device=device) < 0.6,
            alibi_slopes=torch.rand(4, device=device),
        )
    )


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_with_dropout(device: str, signed: bool, p: float) -> None:
    """Dropped weights are 0 and the others scaled; signed, they are negative and nothing is scaled."""
    call = make_call(device=device, causal=True, dropout_p=p, rng_state=random_rng(device))
    assert_weights_match(call, signed)


def test_the_rows_sum_to_one(device: str) -> None:
    weights = assert_weights_match(make_call(device=device, causal=True))
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_the_rest_of_the_row_went_to_the_sink(device: str) -> None:
    sink = random(4, device=device)
    call = make_call(device=device, sink=sink)
    lse = run_library(call)["lse"]
    weights = flash_ext.attention_weights(call.q, call.k, lse)
    share_of_sink = torch.exp(sink[None, :, None] - lse)
    torch.testing.assert_close(weights.sum(-1) + share_of_sink, torch.ones_like(lse))


def test_weights_times_v_is_the_output(device: str) -> None:
    call = make_call(heads_q=2, device=device, causal=True, dropout_p=0.4, rng_state=random_rng(device))
    result = run_library(call)
    weights = flash_ext.attention_weights(call.q, call.k, result["lse"], **call.options)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, call.v), result["out"])


def test_rows_that_see_nothing_have_no_weights(device: str) -> None:
    weights = assert_weights_match(make_call(2, 47, 33, device=device, causal=True))
    assert (weights[:, :, :14] == 0).all()


def test_hidden_keys_may_hold_nan(device: str) -> None:
    call = make_call(device=device, causal=True, top_left=True)
    call.k[:, 33:] = call.v[:, 33:] = torch.nan
    assert_weights_match(call)


def test_beyond_one_tile(device: str) -> None:
    assert_weights_match(make_call(1, 203, 313, heads_q=2, heads_kv=1, device=device, causal=True))


def test_strided_gradient(device: str) -> None:
    call = make_call(device=device)
    lse = run_library(call)["lse"]
    q = call.q.requires_grad_()
    weights = flash_ext.attention_weights(q, call.k, lse)
    (mean_of_heads,) = torch.autograd.grad(weights.mean(1).sum(-1).square().sum(), q, retain_graph=True)
    dense = torch.full_like(weights, 2.0 / 4) * weights.mean(1, keepdim=True).sum(-1, keepdim=True).detach()
    (expected,) = torch.autograd.grad(weights, q, dense)
    torch.testing.assert_close(mean_of_heads, expected)
