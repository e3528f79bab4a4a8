"""Visibility: i + offset - left <= j <= i + offset + right, offset by the bottom right or the top left."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.oracle import Call, assert_matches_oracle, make_call, run_library


def visible_pairs(call: Call) -> torch.Tensor:
    """Which keys each query sees, read off the output: v is the identity and all scores are equal."""
    seqlen_q, seqlen_k, device = call.q.shape[1], call.k.shape[1], call.q.device
    eye = torch.zeros(1, seqlen_k, 1, -(-seqlen_k // 8) * 8, dtype=call.v.dtype, device=device)
    eye[0, :, 0, :seqlen_k] = torch.eye(seqlen_k, device=device)
    call.q, call.v = torch.zeros_like(call.q), eye
    return run_library(call)["out"][0, :seqlen_q, 0, :seqlen_k] > 0


def rule(seqlen_q: int, seqlen_k: int, left: int, right: int, top_left: bool) -> torch.Tensor:
    """The contract's sentence, pair by pair."""
    offset = 0 if top_left else seqlen_k - seqlen_q
    see = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
        after_left = left < 0 or j >= i + offset - left
        before_right = right < 0 or j <= i + offset + right
        see[i, j] = after_left and before_right
    return see


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 8), (8, 3), (1, 7), (7, 1), (6, 70), (70, 6)])
@pytest.mark.parametrize("top_left", [False, True])
def test_every_small_window(device: str, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, top_left: bool) -> None:
    for left, right in itertools.product([-1, 0, 1, 2, 4, 9], repeat=2):
        call = make_call(
            1, seqlen_q, seqlen_k, 1, 1, 8, window_size=(left, right), top_left=top_left, dtype=dtype, device=device
        )
        expected = rule(seqlen_q, seqlen_k, left, right, top_left)
        assert torch.equal(visible_pairs(call).cpu(), expected), (left, right)


@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (63, 0), (64, 64), (1, 130), (100, -1), (-1, 77)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 231), (231, 150)])
@pytest.mark.parametrize("top_left", [False, True])
def test_windows_across_tiles(
    device: str, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, window: tuple[int, int], top_left: bool
) -> None:
    call = make_call(1, seqlen_q, seqlen_k, 2, 1, 16, window_size=window, top_left=top_left, dtype=dtype, device=device)
    assert_matches_oracle(call)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1])
def test_huge_windows_see_everything(device: str, dtype: torch.dtype, size: int) -> None:
    call = make_call(dtype=dtype, device=device)
    assert torch.equal(run_library(call.with_options(window_size=(size, size)))["out"], run_library(call)["out"])


def test_causal_overrides_the_right_side_and_keeps_the_left(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    causal = run_library(call.with_options(causal=True, window_size=(5, 9)))
    window = run_library(call.with_options(window_size=(5, 0)))
    assert torch.equal(causal["out"], window["out"])
