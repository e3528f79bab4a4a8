"""Boolean masks: True is visible; any dimension broadcasts; together with every other rule."""

from __future__ import annotations

import pytest
import torch

from tests.options.test_bias import BATCH, BROADCASTS, HEADS, SEQLEN_K, SEQLEN_Q
from tests.oracle import FLOATS, assert_matches_oracle, make_call, random, run_library


def random_mask(*shape: int, device: str) -> torch.Tensor:
    return torch.rand(*shape, device=device) < 0.6


@pytest.mark.parametrize("shape", BROADCASTS, ids=str)
def test_every_broadcast_pattern(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_matches_oracle(make_call(dtype=dtype, device=device, mask=random_mask(*shape, device=device)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(device: str, dtype: torch.dtype, causal: bool) -> None:
    mask = random_mask(BATCH, 1, SEQLEN_Q, SEQLEN_K, device=device)
    assert_matches_oracle(make_call(dtype=dtype, device=device, causal=causal, mask=mask))


@pytest.mark.parametrize("which", ["transposed", "sliced", "expanded"])
def test_strided_masks(device: str, dtype: torch.dtype, which: str) -> None:
    full = random_mask(BATCH, HEADS, SEQLEN_Q, SEQLEN_K, device=device)
    mask = {
        "transposed": full.transpose(2, 3).contiguous().transpose(2, 3),
        "sliced": random_mask(BATCH, HEADS, SEQLEN_Q, 2 * SEQLEN_K + 1, device=device)[..., 1::2],
        "expanded": full[:, :1, :1].expand_as(full),
    }[which]
    assert_matches_oracle(make_call(dtype=dtype, device=device, mask=mask))


@pytest.mark.parametrize("deterministic", [False, True])
def test_mask_beyond_one_tile(device: str, dtype: torch.dtype, deterministic: bool) -> None:
    mask = random_mask(1, 2, 203, 317, device=device)
    mask[..., 64:, 128:256] = False  # whole tiles without a visible pair
    options = {"mask": mask, "deterministic": deterministic}
    assert_matches_oracle(make_call(2, 203, 317, heads_q=2, heads_kv=1, dtype=dtype, device=device, **options))


def test_true_everywhere_changes_nothing(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    mask = torch.ones(1, 1, SEQLEN_Q, SEQLEN_K, dtype=torch.bool, device=device)
    torch.testing.assert_close(run_library(call.with_options(mask=mask))["out"], run_library(call)["out"])


def test_mask_bias_and_window_together(device: str, dtype: torch.dtype) -> None:
    call = make_call(
        dtype=dtype,
        device=device,
        mask=random_mask(1, HEADS, SEQLEN_Q, SEQLEN_K, device=device),
        bias=random(BATCH, 1, SEQLEN_Q, SEQLEN_K, device=device),
        window_size=(11, 4),
    )
    assert_matches_oracle(call)


def test_mask_of_causal_shape_equals_causal(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    offset = SEQLEN_K - SEQLEN_Q
    mask = torch.ones(SEQLEN_Q, SEQLEN_K, dtype=torch.bool, device=device).tril(offset)[None, None]
    by_mask, by_rule = run_library(call.with_options(mask=mask)), run_library(call.with_options(causal=True))
    torch.testing.assert_close(by_mask["out"], by_rule["out"])
    torch.testing.assert_close(by_mask["lse"], by_rule["lse"])
