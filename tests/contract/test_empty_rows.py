"""Rows that see nothing: out 0, lse -inf, every gradient 0, and no NaN anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle import FLOATS, Call, assert_matches_oracle, int32, make_call, random, random_rng


def hidden_by_window(device: str, dtype: torch.dtype, **options: Any) -> Call:
    """Bottom-right causal with more queries than keys: the first 14 rows see nothing."""
    return make_call(2, 47, 33, dtype=dtype, device=device, causal=True, **options)


def hidden_by_mask(device: str, dtype: torch.dtype, **options: Any) -> Call:
    mask = torch.ones(2, 4, 47, 33, dtype=torch.bool, device=device)
    mask[:, :, :14] = False
    return make_call(2, 47, 33, dtype=dtype, device=device, mask=mask, **options)


def hidden_by_bias(device: str, dtype: torch.dtype, **options: Any) -> Call:
    bias = random(1, 1, 47, 33, device=device)
    bias[:, :, :14] = -torch.inf
    return make_call(2, 47, 33, dtype=dtype, device=device, bias=bias, **options)


HIDDEN = {"window": hidden_by_window, "mask": hidden_by_mask, "bias": hidden_by_bias}


def assert_first_rows_are_empty(call: Call) -> None:
    result = assert_matches_oracle(call)
    assert (result["out"][:, :14] == 0).all()
    assert torch.isneginf(result["lse"][:, :, :14]).all()
    assert (result["dq"][:, :14] == 0).all()


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_see_nothing(device: str, dtype: torch.dtype, hide: Any) -> None:
    assert_first_rows_are_empty(hide(device, dtype))


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN.keys())
@pytest.mark.parametrize("option", ["sink", "softcap", "dropout", "alibi"])
def test_with_options(device: str, dtype: torch.dtype, option: str, hide: Any) -> None:
    options: dict[str, Any] = {
        "sink": {"sink": random(4, device=device)},
        "softcap": {"softcap": 2.0},
        "dropout": {"dropout_p": 0.3, "rng_state": random_rng(device)},
        "alibi": {"alibi_slopes": torch.rand(4, device=device)},
    }[option]
    assert_first_rows_are_empty(hide(device, dtype, **options))


def test_everything_hidden(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device, mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device))
    result = assert_matches_oracle(call)
    for name, value in result.items():
        assert torch.isneginf(value).all() if name == "lse" else (value == 0).all(), name


def test_a_sequence_without_keys(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device, seqused_k=int32([0, 47], device), sink=random(4, device=device))
    result = assert_matches_oracle(call)
    assert (result["out"][0] == 0).all() and torch.isneginf(result["lse"][0]).all()


def test_huge_gradients_do_not_reach_hidden_rows(device: str, dtype: torch.dtype) -> None:
    call = hidden_by_mask(device, dtype).with_random_gradients()
    call.grad_out[:, :14] = torch.finfo(torch.float32).max
    call.grad_lse[:, :, :14] = torch.inf
    result = assert_matches_oracle(call)
    assert (result["dq"][:, :14] == 0).all()
