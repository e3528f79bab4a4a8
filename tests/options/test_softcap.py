"""Softcap where a kernel may go from one formula to another: scores around fractions of the cap, at both ends of
what caps and scales can be, and scores that are no numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import FLOATS, HALF, Call, assert_matches_oracle, make_call, run_library, run_reference

HEAD_DIMS = [64, 96, 128, 192, 256]
QUERIES, KEYS = 140, 600
# Relative error of a capped score: that of the tanh of GPUs, 2^-11, and some rounding.
TOLERANCE = 6e-4


def call_of_scores(scores: Tensor, keys: int, head_dim: int, dtype: torch.dtype, device: str) -> Call:
    """A row of exactly scores[i] with every key, at scale 1."""
    q = torch.zeros(1, len(scores), 1, head_dim, dtype=dtype, device=device)
    q[0, :, 0, 0] = scores.to(q)
    k = torch.zeros(1, keys, 1, head_dim, dtype=dtype, device=device)
    k[..., 0] = 1
    v = torch.randn(1, keys, 1, head_dim, device=device).to(dtype)
    return Call(q, k, v, {"softmax_scale": 1.0})


def capped(scores: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(scores.double() / cap)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "fraction", [0.0078125, 0.19921875, 0.203125, 0.25, 0.498046875, 0.5, 0.50390625, 0.75, 1.0, 4.0]
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_all_scores_at_a_fraction_of_the_cap(
    device: str, dtype: torch.dtype, head_dim: int, fraction: float, sign: int
) -> None:
    cap = 32.0
    scores = torch.full((QUERIES,), sign * fraction * cap, device=device)
    call = call_of_scores(scores, KEYS, head_dim, dtype, device).with_options(softcap=cap)
    _, lse = flash_ext.attention(call.q, call.k, call.v, **call.options, return_lse=True)
    expected = capped(scores, cap)
    error = (lse[0, 0].double() - expected - math.log(KEYS)).abs()
    assert (error <= TOLERANCE * expected.abs() + 1e-5).all(), f"{error.max().item():.1e} of {expected[0].item():.3g}"


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"alibi_slopes": True}], ids=["full", "causal", "ALiBi"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_one_row_or_key_beyond(device: str, dtype: torch.dtype, head_dim: int, options: dict[str, bool]) -> None:
    """Among scores of 0.02 of the cap a row, and a key, whose scores are of its size."""
    call = make_call(1, QUERIES, KEYS, 2, 1, head_dim, dtype=dtype, device=device, softcap=20.0)
    call.options |= options
    if "alibi_slopes" in options:
        call.options["alibi_slopes"] = torch.tensor([0.0, 0.01], device=device)
    call.q *= 0.4
    call.q[:, 77] *= 30
    call.k[:, 300] *= 40
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_scores_of_all_sizes_in_a_tile(device: str, dtype: torch.dtype, head_dim: int) -> None:
    call = make_call(1, QUERIES, KEYS, 2, 1, head_dim, dtype=dtype, device=device, softcap=4.0)
    call.q *= torch.logspace(-2, 1.5, QUERIES, device=device).to(dtype)[:, None, None]
    first, again = assert_matches_oracle(call, gradients_of=()), run_library(call)
    assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])


@pytest.mark.parametrize("scale", [1e-3, -0.1, 0.1, 30.0])
@pytest.mark.parametrize("cap", [1e-3, 0.5, 1e4, 1e30])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_caps_and_scales_of_all_sizes(device: str, head_dim: int, cap: float, scale: float) -> None:
    call = make_call(1, QUERIES, KEYS, 1, 1, head_dim, dtype=torch.bfloat16, device=device)
    assert_matches_oracle(call.with_options(softcap=cap, softmax_scale=scale), gradients_of=())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_non_finite_scores(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """An infinite score is capped like any other; rows with a NaN are NaN, and no others."""
    call = make_call(1, QUERIES, KEYS, 1, 1, head_dim, dtype=dtype, device=device, softcap=10.0)
    infinite, nan = 37, 100
    call.q[:, infinite, :, 0] = torch.inf
    call.q[:, nan, :, 5] = torch.nan
    out, lse = flash_ext.attention(call.q, call.k, call.v, **call.options, return_lse=True)
    assert out[:, nan].isnan().all() and lse[..., nan].isnan().all()
    ref = run_reference(call, torch.float64)
    assert (lse[..., infinite] - ref["lse"][..., infinite]).abs().max() < 1e-2
    assert (out[:, infinite] - ref["out"][:, infinite]).abs().max() < 2e-2
    rows = torch.ones(QUERIES, dtype=torch.bool, device=device)
    rows[[infinite, nan]] = False
    finite = replace(call, q=call.q[:, rows])
    expected = flash_ext.attention(finite.q, finite.k, finite.v, **finite.options)
    assert not out[:, rows].isnan().any()
    assert (out[:, rows].float() - expected.float()).abs().max() < 2e-2
