"""The dense forward: dtypes, head dims, lengths, layouts, score options; out and lse against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_ext
from tests.oracle import FLOATS, assert_matches_oracle, far_apart, make_call, random, run_library

pytestmark = pytest.mark.usefixtures("kernel_family")

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal_top_left": {"causal": True, "top_left": True},
    "window": {"window_size": (9, 5)},
    "softcap": {"softcap": 3.0},
    "scale": {"softmax_scale": 0.37},
    "negative_scale": {"softmax_scale": -0.2},
    "zero_scale": {"softmax_scale": 0.0},
    "scale of 0 in float": {"softmax_scale": 1e-300, "causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_out_and_lse_match_the_oracle(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert_matches_oracle(make_call(dtype=dtype, device=device, **options), gradients_of=())


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 239), (239, 1), (113, 203), (203, 113), (64, 64), (129, 257)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(device: str, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    call = make_call(1, seqlen_q, seqlen_k, heads_q=2, heads_kv=1, causal=causal, dtype=dtype, device=device)
    assert_matches_oracle(call, gradients_of=())


def test_lengths_beyond_one_tile(device: str, dtype: torch.dtype) -> None:
    call = make_call(1, 1023, 1024, heads_q=2, heads_kv=2, causal=True, dtype=dtype, device=device)
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(device: str, dtype: torch.dtype, head_dim: int) -> None:
    call = make_call(1, 19, 35, heads_q=2, heads_kv=2, head_dim=head_dim, dtype=dtype, device=device)
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 256), (256, 8), (64, 72), (192, 128), (24, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_head_dim_of_v_may_differ(device: str, head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    call = make_call(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, device=device)
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (4, 4), (6, 3), (6, 2), (7, 1)])
def test_grouped_heads(device: str, dtype: torch.dtype, heads_q: int, heads_kv: int) -> None:
    assert_matches_oracle(
        make_call(heads_q=heads_q, heads_kv=heads_kv, causal=True, dtype=dtype, device=device), gradients_of=()
    )


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (0, 0, 0)], ids=str)
def test_empty_tensors(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    assert_matches_oracle(make_call(*shape, dtype=dtype, device=device))


def test_no_keys_give_zero_and_minus_infinity(device: str, dtype: torch.dtype) -> None:
    result = run_library(make_call(2, 5, 0, dtype=dtype, device=device))
    assert (result["out"] == 0).all()
    assert torch.isneginf(result["lse"]).all()


def test_heads_before_seqlen_needs_no_copy(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    call.q, call.k, call.v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (call.q, call.k, call.v))
    assert not call.q.is_contiguous()
    assert_matches_oracle(call, gradients_of=())


def test_slices_of_larger_tensors(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    wide = torch.full((4, 2 * 33, 5, 40), float("nan"), device=device)
    wide[1:3, ::2, 1:, 8:] = call.q
    packed = torch.full((2, 47, 2, 3, 32), float("nan"), device=device)
    packed[:, :, :, 0], packed[:, :, :, 2] = call.k, call.v
    call.q, call.k, call.v = wide[1:3, ::2, 1:, 8:], packed[:, :, :, 0], packed[:, :, :, 2]
    assert_matches_oracle(call, gradients_of=())


def test_rows_that_are_not_aligned(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    storage = torch.empty(call.q.numel() + 1, dtype=call.q.dtype, device=device)
    storage[1:] = call.q.flatten()
    call.q = storage[1:].view(call.q.shape)
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_expanded_batch_and_heads(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    call.k, call.v = call.k[:1].expand(2, -1, -1, -1), call.v[:, :, :1].expand(-1, -1, 2, -1)
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_scores_do_not_overflow(device: str, dtype: torch.dtype) -> None:
    assert_matches_oracle(make_call(dtype=dtype, device=device, softmax_scale=30.0), gradients_of=())


@pytest.mark.parametrize("shift", [-20000.0, 20000.0])
def test_scores_far_from_zero(device: str, shift: float) -> None:
    """Softmax is invariant to a shift of all scores, and lse follows it."""
    call = make_call(device=device, dtype=torch.float32)
    plain = run_library(call)
    shifted = run_library(call.with_options(bias=torch.full((1, 1, 1, 1), shift, device=device)))
    torch.testing.assert_close(shifted["out"], plain["out"], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(shifted["lse"], plain["lse"] + shift, rtol=1e-6, atol=1e-2)


def test_alibi_per_head_and_per_batch(device: str, dtype: torch.dtype) -> None:
    for shape in [(4,), (2, 4)]:
        slopes = torch.rand(shape, device=device)
        for options in ({}, {"causal": True}, {"top_left": True}):
            call = make_call(alibi_slopes=slopes, dtype=dtype, device=device, **options)
            assert_matches_oracle(call, gradients_of=())


def test_causal_means_right_is_zero(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    causal = run_library(call.with_options(causal=True))
    window = run_library(call.with_options(window_size=(-1, 0)))
    assert torch.equal(causal["out"], window["out"])
    assert torch.equal(causal["lse"], window["lse"])


def test_lse_is_only_returned_when_asked_for(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    out = flash_ext.attention(call.q, call.k, call.v)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, run_library(call)["out"])


def test_inputs_are_left_alone(device: str, dtype: torch.dtype) -> None:
    call = make_call(
        dtype=dtype, device=device, bias=random(2, 4, 33, 47, device=device), sink=random(4, device=device)
    )
    before = {name: t.clone() for name, t in call.inputs().items()}
    run_library(call.with_random_gradients(), tuple(before))
    for name, t in call.inputs().items():
        assert torch.equal(t, before[name]), name


@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out"])
def test_rows_further_apart_than_32_bits_can_say(device: str, name: str) -> None:
    call = make_call(1, 40, 61, heads_q=1, heads_kv=1, head_dim=256, dtype=torch.bfloat16, device=device)
    call = call.with_random_gradients()
    setattr(call, name, far_apart(getattr(call, name), dim=1))
    assert_matches_oracle(call)


@pytest.mark.parametrize("dim", [0, 2], ids=["entries", "heads"])
@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out"])
def test_entries_and_heads_further_apart_than_32_bits_can_say(device: str, name: str, dim: int) -> None:
    call = make_call(2, 40, 61, dtype=torch.bfloat16, device=device).with_random_gradients()
    setattr(call, name, far_apart(getattr(call, name), dim))
    assert_matches_oracle(call)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_rows_of_options_further_apart_than_32_bits_can_say(device: str, name: str) -> None:
    bias = random(1, 1, 40, 64, dtype=torch.bfloat16, device=device)
    option = far_apart(bias if name == "bias" else bias < 2, dim=2)
    assert_matches_oracle(make_call(1, 40, 64, dtype=torch.bfloat16, device=device, **{name: option}))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 0)}], ids=str)
@pytest.mark.parametrize("nats", [8.0, 60.0, 400.0, -400.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scores_that_grow_along_the_keys(
    device: str, dtype: torch.dtype, nats: float, options: dict[str, object]
) -> None:
    """From one tile of keys to the next, in either direction: what the exponentials refer to has to follow."""
    call = make_call(1, 320, 320, 2, 1, 64, dtype=dtype, device=device, softmax_scale=1.0, **options)
    call.q[..., 0] = 1.0
    call.k[..., 0] = (torch.arange(320, device=device) // 64 * nats / 4)[None, :, None]
    assert_matches_oracle(call, ())
