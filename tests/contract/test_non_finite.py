"""NaN and Inf that queries do see: gradients must not look sound where the output is not.

A score of -inf is a hidden pair, whoever makes it: a bias, or an infinity in a key. Any other score or gradient that is
not finite makes NaN of all that it takes part in, as in torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import Call, assert_alike, make_call, run_library

KEY, QUERY = 30, 35  # causal with as many keys: later queries see the key, later keys are hidden from the query
OPTIONS: dict[str, Any] = {
    "plain": lambda device: {},
    "causal": lambda device: {"causal": True},
    "bias": lambda device: {"causal": True, "bias": torch.zeros(1, 1, 40, 40, device=device)},
}


@pytest.fixture(params=[32, 96, 192])
def head_dim(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=OPTIONS)
def call(request: pytest.FixtureRequest, device: str, dtype: torch.dtype, head_dim: int) -> Call:
    """Queries whose first number is negative, so that +-Inf there in a key makes scores of -+Inf."""
    call = make_call(2, 40, 40, dtype=dtype, head_dim=head_dim, device=device, **OPTIONS[request.param](device))
    call.q[..., 0] = -call.q[..., 0].abs() - 0.1
    return call.with_random_gradients()


def all_nan(t: Tensor) -> bool:
    return bool(t.isnan().all())


def test_a_score_of_minus_infinity_is_a_hidden_pair(call: Call) -> None:
    if call.q.is_cuda and call.dtype == torch.float32:
        pytest.skip("float32 is split into two or three numbers, and Inf - Inf is NaN")
    shown = torch.ones(1, 1, 40, 40, dtype=torch.bool, device=call.q.device)
    shown[..., KEY] = False
    expected = run_library(call.with_options(mask=shown), ("q", "k", "v"))
    call.k[:, KEY, :, 0] = torch.inf
    result = run_library(call, ("q", "k", "v"))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert result[name].isfinite().all(), name
        assert_alike(result[name], expected[name])
    assert (result["dk"][:, KEY] == 0).all() and (result["dv"][:, KEY] == 0).all()


@pytest.mark.parametrize("poison", ["infinite_score", "nan_in_q", "nan_in_grad_out"])
def test_one_query_poisons_itself_and_the_keys_it_sees(call: Call, poison: str) -> None:
    if poison == "infinite_score":
        call.q[:, QUERY, :, 0], call.k[..., 0] = torch.inf, 1.0
    elif poison == "nan_in_q":
        call.q[:, QUERY] = torch.nan
    else:
        assert call.grad_out is not None
        call.grad_out[:, QUERY] = torch.nan
    result = run_library(call, ("q", "k", "v"))
    others = [i for i in range(40) if i != QUERY]
    if poison != "nan_in_grad_out":
        assert all_nan(result["out"][:, QUERY])
    assert result["out"][:, others].isfinite().all()
    assert all_nan(result["dq"][:, QUERY]) and result["dq"][:, others].isfinite().all()
    hidden = slice(QUERY + 1 if call.options.get("causal") else 40, None)
    for name in ("dk", "dv"):
        assert all_nan(result[name][:, : hidden.start]), name
        assert result[name][:, hidden].isfinite().all(), name


@pytest.mark.parametrize("poison", ["nan_in_q", "nan_in_grad_out", "scores_of_minus_infinity_beside_a_sink"])
def test_one_query_poisons_no_hidden_key_of_whole_tiles(
    device: str, dtype: torch.dtype, head_dim: int, poison: str
) -> None:
    """A tile that is seen in part, and has no rows behind the end, which alone would have it sanitised."""
    query, length = 150, 256
    sink = torch.zeros(4, device=device) if "sink" in poison else None
    call = make_call(1, length, length, dtype=dtype, head_dim=head_dim, device=device, causal=True, sink=sink)
    call = call.with_random_gradients()
    assert call.grad_out is not None
    if poison == "nan_in_q":
        call.q[:, query] = torch.nan
    elif poison == "nan_in_grad_out":
        call.grad_out[:, query] = torch.nan
    else:
        call.q[:, query, :, 0], call.k[..., 0] = torch.inf, -1.0
    result = run_library(call, ("q", "k", "v"))
    others = [i for i in range(length) if i != query]
    assert result["dq"][:, others].isfinite().all()
    for name in ("dk", "dv"):
        assert result[name][:, query + 1 :].isfinite().all(), name


def test_one_key_poisons_itself_and_the_queries_that_see_it(call: Call) -> None:
    call.k[:, KEY] = torch.nan
    result = run_library(call, ("q", "k", "v"))
    first = KEY if call.options.get("causal") else 0
    for name in ("out", "dq"):
        assert all_nan(result[name][:, first:]), name
        assert result[name][:, :first].isfinite().all(), name
    assert all_nan(result["dk"][:, KEY]) and all_nan(result["dv"][:, KEY])


def test_an_infinite_value_leaves_no_gradient_of_scores_finite(call: Call) -> None:
    call.v[:, KEY] = torch.inf
    result = run_library(call, ("q", "k", "v"))
    first = KEY if call.options.get("causal") else 0
    assert not result["out"][:, first:].isfinite().any()
    assert not result["dq"][:, first:].isfinite().any() and result["dq"][:, :first].isfinite().all()
    assert result["dv"].isfinite().all()  # which does not depend on V


def test_an_infinite_sink_takes_everything(device: str, dtype: torch.dtype, head_dim: int) -> None:
    sink = torch.full((4,), torch.inf, device=device)
    call = make_call(2, 40, 40, dtype=dtype, head_dim=head_dim, device=device, sink=sink).with_random_gradients()
    result = run_library(call, ("q", "k", "v"))
    for name in ("out", "dq", "dk", "dv"):
        assert (result[name] == 0).all(), name


def test_a_sink_does_not_hide_an_infinite_score(device: str, dtype: torch.dtype, head_dim: int) -> None:
    call = make_call(2, 40, 40, dtype=dtype, head_dim=head_dim, device=device, sink=torch.zeros(4, device=device))
    call.q[:, QUERY], call.k[...] = torch.inf, call.k.abs() + 0.1
    result = run_library(call.with_random_gradients(), ("q", "k", "v"))
    for name in ("out", "dq"):
        assert all_nan(result[name][:, QUERY]), name
    assert all_nan(result["dk"]) and all_nan(result["dv"])


def test_gradients_are_those_of_torch(device: str) -> None:
    """Where they are NaN, for a call that torch computes too."""
    q, k, v = (torch.randn(1, 2, 9, 16, device=device, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        q[0, 0, 3], v[0, 1, 4] = torch.nan, torch.inf
    of_ours = torch.autograd.grad(flash_ext.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    weights = (q @ k.transpose(-1, -2) / 4).softmax(-1)
    of_torch = torch.autograd.grad((weights @ v).sum(), (q, k, v))
    for ours, torchs in zip(of_ours, of_torch, strict=True):
        assert torch.equal(ours.isfinite(), torchs.isfinite())
