"""Packed sequences, and the lengths in use of packed and dense ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle import (
    FLOATS,
    Call,
    assert_alike,
    assert_matches_oracle,
    cumulative,
    int32,
    make_call,
    make_varlen_call,
    random,
    random_rng,
    run_library,
)

LENGTHS = {
    "mixed": ([17, 1, 40, 9], [23, 5, 40, 2]),
    "empty_between": ([0, 17, 0, 9, 0], [4, 0, 0, 33, 7]),
    "all_empty": ([0, 0], [0, 0]),
    "one": ([65], [129]),
    "many_short": ([1] * 30, [2] * 30),
    "queries_only": ([5, 6], [0, 0]),
    "keys_only": ([0, 0], [5, 6]),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("causal", [False, True])
def test_sequence_lengths(device: str, dtype: torch.dtype, lengths: tuple[list[int], list[int]], causal: bool) -> None:
    assert_matches_oracle(make_varlen_call(*lengths, device, causal=causal, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    assert_matches_oracle(make_varlen_call(*LENGTHS["mixed"], device, dtype=dtype, causal=True))


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (0, 0), (4, 6), (-1, 2), (2, -1)], ids=str)
def test_each_sequence_has_its_own_window(
    device: str, dtype: torch.dtype, window: tuple[int, int], top_left: bool
) -> None:
    call = make_varlen_call([17, 40, 9, 3], [23, 5, 40, 3], device, window_size=window, top_left=top_left, dtype=dtype)
    assert_matches_oracle(call)


def test_a_bias_that_all_keys_share_without_any_key(device: str, dtype: torch.dtype) -> None:
    call = make_varlen_call([0], [0], device, spare=1, dtype=dtype, bias=random(1, 4, 1, 1, device=device))
    assert (assert_matches_oracle(call)["dbias"] == 0).all()


def test_rows_in_no_sequence(device: str, dtype: torch.dtype) -> None:
    """Rows before the first and after the last sequence: out 0, lse -inf, gradients 0, whatever they hold."""
    call = make_varlen_call([17, 9], [23, 5], device, spare=6, dtype=dtype)
    call = call.with_options(cu_seqlens_q=int32([3, 20, 29], device), cu_seqlens_k=int32([2, 25, 30], device))
    outside_q, outside_k = [*range(3), *range(29, 32)], [*range(2), *range(30, 34)]
    call.q[outside_q], call.k[outside_k], call.v[outside_k] = (float("nan"),) * 3
    result = assert_matches_oracle(call)
    assert (result["out"][outside_q] == 0).all()
    assert torch.isneginf(result["lse"][:, outside_q]).all()
    assert (result["dq"][outside_q] == 0).all()
    assert (result["dk"][outside_k] == 0).all()
    assert (result["dv"][outside_k] == 0).all()


@pytest.mark.parametrize("q_or_k", ["q", "k", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_in_use_of_packed_sequences(device: str, dtype: torch.dtype, q_or_k: str, causal: bool) -> None:
    call = make_varlen_call([17, 4, 40, 9], [23, 5, 40, 2], device, causal=causal, dtype=dtype)
    used = {"seqused_q": int32([17, 0, 31, 8], device), "seqused_k": int32([1, 5, 33, 0], device)}
    for name in ("seqused_q", "seqused_k"):
        if q_or_k in ("both", name[-1]):
            call = call.with_options(**{name: used[name]})
    assert_matches_oracle(call)


@pytest.mark.parametrize("q_or_k", ["q", "k", "both"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "top_left": True}], ids=str)
def test_lengths_in_use_of_dense_batches(device: str, dtype: torch.dtype, q_or_k: str, options: dict[str, Any]) -> None:
    call = make_call(3, dtype=dtype, device=device, **options)
    used = {"seqused_q": int32([33, 0, 12], device), "seqused_k": int32([9, 47, 0], device)}
    for name in ("seqused_q", "seqused_k"):
        if q_or_k in ("both", name[-1]):
            call = call.with_options(**{name: used[name]})
    assert_matches_oracle(call)


def test_rows_beyond_the_lengths_in_use_may_hold_nan(device: str, dtype: torch.dtype) -> None:
    call = make_call(2, dtype=dtype, device=device, causal=True).with_random_gradients()
    call = call.with_options(seqused_q=int32([20, 33], device), seqused_k=int32([47, 11], device))
    call.q[0, 20:] = call.k[1, 11:] = call.v[1, 11:] = float("nan")
    call.grad_out[0, 20:] = float("nan")
    call.grad_lse[0, :, 20:] = float("nan")
    result = assert_matches_oracle(call)
    assert (result["out"][0, 20:] == 0).all() and torch.isneginf(result["lse"][0, :, 20:]).all()
    assert (result["dq"][0, 20:] == 0).all() and (result["dk"][1, 11:] == 0).all() and (result["dv"][1, 11:] == 0).all()


def test_max_seqlen_may_be_left_out_or_too_large(device: str, dtype: torch.dtype) -> None:
    call = make_varlen_call(*LENGTHS["mixed"], device, causal=True, dtype=dtype)
    given = assert_matches_oracle(call)
    for lengths in ({"max_seqlen_q": None, "max_seqlen_k": None}, {"max_seqlen_q": 64, "max_seqlen_k": 1000}):
        other = assert_matches_oracle(call.with_options(**lengths))
        assert_alike(other["out"], given["out"])
        assert_alike(other["lse"], given["lse"])


@pytest.mark.parametrize("max_seqlen", [2**24, 2**31 - 1])
def test_a_loose_max_seqlen_costs_nothing(device: str, dtype: torch.dtype, max_seqlen: int) -> None:
    call = make_varlen_call(
        [60, 40], [30, 70], device, causal=True, bias=random(1, 4, 1, 1, device=device), dtype=dtype
    )
    call = call.with_random_gradients()
    given = run_library(call, tuple(call.inputs()))
    loose = run_library(call.with_options(max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen), tuple(call.inputs()))
    for name, want in given.items():
        torch.testing.assert_close(loose[name], want, msg=name)


def test_bias_larger_than_the_sequences(device: str, dtype: torch.dtype) -> None:
    """What no sequence reaches has gradient 0."""
    call = make_varlen_call([17, 9], [23, 5], device, bias=random(2, 4, 140, 150, device=device), dtype=dtype)
    call = call.with_options(max_seqlen_q=140, max_seqlen_k=150).with_random_gradients()
    dbias = assert_matches_oracle(call)["dbias"]
    assert (dbias[:, :, 17:] == 0).all() and (dbias[..., 23:] == 0).all()


def test_packed_equals_dense(device: str, dtype: torch.dtype) -> None:
    dense = make_call(3, 21, 34, dtype=dtype, device=device, causal=True)
    packed = Call(*(t.flatten(0, 1) for t in (dense.q, dense.k, dense.v)), options={
        "causal": True, "cu_seqlens_q": cumulative([21] * 3, device), "cu_seqlens_k": cumulative([34] * 3, device),
    })  # fmt: skip
    a, b = run_library(dense), run_library(packed)
    torch.testing.assert_close(b["out"].unflatten(0, (3, 21)), a["out"])
    torch.testing.assert_close(b["lse"].unflatten(1, (3, 21)).transpose(0, 1), a["lse"])


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_strided_packed_tensors(device: str, dtype: torch.dtype, which: str) -> None:
    call = make_varlen_call(*LENGTHS["mixed"], device, dtype=dtype)
    for name in "qkv":
        if which in (name, "all"):
            setattr(call, name, getattr(call, name).transpose(0, 1).contiguous().transpose(0, 1))
    assert_matches_oracle(call)


def test_score_options_use_local_coordinates(device: str, dtype: torch.dtype) -> None:
    """Bias, mask, dropout and ALiBi count rows and keys from the start of each sequence."""
    shape = (4, 4, 40, 40)
    assert_matches_oracle(
        make_varlen_call(
            *LENGTHS["mixed"],
            device,
            causal=True,
            bias=random(*shape, device=device),
            mask=torch.rand(shape, device=device) < 0.7,
            sink=random(4, device=device),
            alibi_slopes=torch.rand(4, 4, device=device),
            dropout_p=0.3,
            rng_state=random_rng(device),
            dtype=dtype,
        )
    )


@pytest.mark.parametrize("shape", [(1, 1, 40, 40), (4, 1, 1, 40), (1, 4, 40, 1), (1, 1, 1, 1)], ids=str)
def test_broadcast_bias_of_packed_sequences(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_matches_oracle(make_varlen_call(*LENGTHS["mixed"], device, bias=random(*shape, device=device), dtype=dtype))


def test_one_sequence_does_not_change_another(device: str, dtype: torch.dtype) -> None:
    call = make_varlen_call(*LENGTHS["mixed"], device, dtype=dtype)
    before = run_library(call)["out"].clone()
    call.k[23:28], call.v[23:28] = float("inf"), float("nan")
    after = run_library(call)["out"]
    assert torch.equal(after[:17], before[:17]) and torch.equal(after[18:], before[18:])
