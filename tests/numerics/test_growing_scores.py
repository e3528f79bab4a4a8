"""Scores of any growth along the keys, to either side: what a softmax with a fixed row max has to survive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import FLOATS, Call, assert_hoppers_own_forward, assert_matches_oracle, make_call, run_library

SEQLEN = 800  # more than kernels of short sequences serve
HEAD_DIMS = [64, 96, 128, 192, 256]  # of the kernels for Hopper
MASKS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (200, 90)}}


def rising(position: Tensor) -> Tensor:
    """By about 30 in a tile of 80 keys."""
    return position * 0.375


def one_high(position: Tensor) -> Tensor:
    return 300.0 * (position == 100)


def one_beyond_float(position: Tensor) -> Tensor:
    """Above the others by more than the exponent of a float has."""
    return 5000.0 * (position == 7)


def step_up(position: Tensor) -> Tensor:
    return 200.0 * (position < 250)


def alternating(position: Tensor) -> Tensor:
    return 5e3 * (1.0 - 2.0 * (position % 2))


def constant(position: Tensor) -> Tensor:
    return torch.full_like(position, 20.0)


GROWTHS = {f.__name__: f for f in (rising, one_high, one_beyond_float, step_up, alternating, constant)}


def call_with_scores(growth: Callable[[Tensor], Tensor], *, backwards: bool, device: str, **arguments: Any) -> Call:
    """A key's score is growth(position of the key), and a little noise."""
    size = 1 if device == "cpu" else 2
    call = make_call(size, SEQLEN, SEQLEN, size, size, device=device, **arguments)
    assert_hoppers_own_forward(call)
    positions = torch.arange(SEQLEN, device=device, dtype=torch.float32)
    scores = growth(SEQLEN - 1 - positions if backwards else positions)
    call.q[..., 0] = call.q.shape[-1] ** 0.5 / 8
    call.k[..., 0] = (8 * scores).to(call.dtype)[:, None]
    return call


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS.keys())
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_growth(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    growth: Callable[[Tensor], Tensor],
    mask: dict[str, Any],
    backwards: bool,
) -> None:
    if growth is one_beyond_float and dtype == torch.float16:
        growth = one_high  # float16 holds no such key
    call = call_with_scores(growth, backwards=backwards, device=device, head_dim=head_dim, dtype=dtype, **mask)
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=str)
def test_a_head_that_overflows_leaves_the_others_alone(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """Some tiles of queries are computed twice, among many that are not, and the same each time."""
    batch, heads = (1, 3) if device == "cpu" else (4, 40)
    call = make_call(batch, 450, 450, heads, heads, head_dim, dtype=dtype, device=device)
    before = run_library(call)["out"]
    call.q[:, :, ::3, 0] = head_dim**0.5
    call.k[:, 5, ::3, 0] = 2000.0
    first, again = (run_library(call) for _ in range(2))
    assert torch.equal(first["out"], again["out"]) and torch.equal(first["lse"], again["lse"])
    unchanged = [head for head in range(heads) if head % 3]
    assert torch.equal(first["out"][:, :, unchanged], before[:, :, unchanged])
    expected = call.v[:, 5, ::3].unsqueeze(1).expand(-1, 450, -1, -1)
    assert torch.equal(first["out"][:, :, ::3], expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_first_tile_of_minus_infinity(device: str, head_dim: int) -> None:
    """The last keys give scores of -inf without being hidden; what the others give must not vanish beside nothing."""
    call = make_call(1, 200, 400, 1, 1, head_dim, dtype=torch.bfloat16, device=device)
    call.q[..., 0] = 1.0
    call.k[:, 100:, :, 0] = -torch.inf
    call.k[:, :100, :, 0] = -3000.0
    out, lse = flash_ext.attention(call.q, call.k, call.v, return_lse=True)
    short, short_lse = flash_ext.attention(call.q, call.k[:, :100], call.v[:, :100], return_lse=True)
    torch.testing.assert_close(out, short, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, short_lse)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_infinite_scores_before_the_window_ends(device: str, head_dim: int) -> None:
    """Tiles seen in full give -inf alone, and the one that the window cuts gives the first numbers."""
    call = make_call(1, 1000, 1000, 1, 1, head_dim, dtype=torch.bfloat16, device=device, window_size=(300, 0))
    call.q[..., 0] = 1.0
    call.k[:, 500:, :, 0] = -torch.inf
    out, lse = flash_ext.attention(call.q, call.k, call.v, window_size=(300, 0), return_lse=True)
    visible = slice(600, 790)  # rows that see some of the other keys, at the end of their window
    assert out[:, visible].isfinite().all() and lse[..., visible].isfinite().all()
    short = call.q[:, visible], call.k[:, :500], call.v[:, :500]
    mask = torch.arange(500, device=device) >= torch.arange(600, 790, device=device)[:, None] - 300
    expected = flash_ext.attention(*short, mask=mask[None, None])
    torch.testing.assert_close(out[:, visible], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sink", [None, 88.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sum_that_overflows_in_no_lane_alone(device: str, head_dim: int, sink: float | None) -> None:
    """A row's sum is shared by four lanes, two columns of eight each."""
    call = make_call(1, 100, 400, 1, 1, head_dim, dtype=torch.bfloat16, device=device)
    scale = head_dim**-0.5
    call.q.zero_()[..., 0] = 1.0
    call.k.zero_()[:, [0, 2, 4, 6], :, 0] = 88.0 / scale
    if sink is not None:
        call.options["sink"] = torch.full((1,), sink, device=device)
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=str)
def test_many_small_weights_beside_a_large_one(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """The key that is visited first outweighs each of the others by e^10, and not all of them."""
    call = make_call(1, 64, 16384, 1, 1, head_dim, dtype=dtype, device=device)
    call.q.zero_()[..., 0] = 1.0
    call.k.zero_()[:, -1, :, 0] = 10.0 * head_dim**0.5
    call.v.fill_(1.0)[:, -1] = 0.0
    assert_matches_oracle(call, gradients_of=())
