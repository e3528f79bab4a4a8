"""An attention sink adds exp(sink) to the denominator, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import (
    FLOATS,
    assert_alike,
    assert_matches_oracle,
    make_call,
    make_varlen_call,
    random,
    run_library,
)


@pytest.mark.parametrize("sink_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_dtype_with_every_dtype(device: str, dtype: torch.dtype, sink_dtype: torch.dtype) -> None:
    sink = random(4, dtype=sink_dtype, device=device)
    assert_matches_oracle(make_call(dtype=dtype, device=device, causal=True, sink=sink))


def test_sink_equals_one_more_key_without_a_value(device: str, dtype: torch.dtype) -> None:
    call = make_call(heads_q=2, heads_kv=2, dtype=dtype, device=device)
    sink = random(2, device=device)
    with_sink = run_library(call.with_options(sink=sink))
    extended = make_call(heads_q=2, heads_kv=2, dtype=dtype, device=device)
    extended.q = call.q
    extended.k, extended.v = (torch.cat([t, torch.zeros_like(t[:, :1])], dim=1) for t in (call.k, call.v))
    bias = torch.zeros(1, 2, 1, 48, device=device)
    bias[0, :, 0, -1] = sink
    as_key = run_library(extended.with_options(bias=bias))
    assert_alike(with_sink["out"], as_key["out"])
    torch.testing.assert_close(with_sink["lse"], as_key["lse"])


@pytest.mark.parametrize("value", [-1e4, -torch.inf])
def test_a_sink_far_below_changes_nothing(device: str, dtype: torch.dtype, value: float) -> None:
    call = make_call(dtype=dtype, device=device)
    result = run_library(call.with_options(sink=torch.full((4,), value, device=device)))
    assert_alike(result["out"], run_library(call)["out"])


def test_a_sink_far_above_takes_everything(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device, sink=torch.full((4,), 500.0, device=device))
    result = assert_matches_oracle(call)
    assert result["out"].abs().max() < 1e-6
    torch.testing.assert_close(result["lse"], torch.full_like(result["lse"], 500.0))


def test_a_row_that_sees_nothing_has_no_sink_either(device: str, dtype: torch.dtype) -> None:
    call = make_call(2, 47, 33, dtype=dtype, device=device, causal=True, sink=random(4, device=device))
    result = assert_matches_oracle(call)
    assert (result["out"][:, :14] == 0).all()
    assert torch.isneginf(result["lse"][:, :, :14]).all()


def test_gradient_of_sink_alone(device: str, dtype: torch.dtype) -> None:
    assert_matches_oracle(make_call(dtype=dtype, device=device, sink=random(4, device=device)), gradients_of=("sink",))


def test_strided_sink(device: str, dtype: torch.dtype) -> None:
    assert_matches_oracle(make_call(dtype=dtype, device=device, sink=random(8, device=device)[::2]))


def test_packed_sequences(device: str, dtype: torch.dtype) -> None:
    assert_matches_oracle(
        make_varlen_call([9, 0, 17], [9, 4, 3], device, causal=True, sink=random(4, device=device), dtype=dtype)
    )


def test_with_softcap_and_dropout(device: str, dtype: torch.dtype) -> None:
    options = {"softcap": 2.0, "dropout_p": 0.2, "rng_state": torch.tensor([3, 4], device=device)}
    assert_matches_oracle(make_call(dtype=dtype, device=device, sink=random(4, device=device), **options))
