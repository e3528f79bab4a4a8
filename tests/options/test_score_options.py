"""Softcap and ALiBi over many tiles of queries and keys: scores of any size, and the order of visits to keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.numerics.test_growing_scores import GROWTHS, call_with_scores, one_beyond_float
from tests.oracle import Call, assert_matches_oracle, int32, make_call, make_varlen_call, run_library

HEAD_DIMS = [64, 96, 128, 192, 256]  # of the kernels for Hopper
DTYPES = [torch.float16, torch.bfloat16]
WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 150)},
    "left": {"window_size": (170, -1)},
    "right": {"window_size": (-1, 90)},
}


def call_with_score_of_key(scores: Tensor, head_dim: int, dtype: torch.dtype, **options: Any) -> Call:
    """Queries are alike, and the products scaled by 1."""
    call = make_call(1, 150, len(scores), 2, 2, head_dim, dtype=dtype, device=str(scores.device), **options)
    call.q.zero_()[..., 0] = 1.0
    call.k.zero_()[..., 0] = scores.to(dtype)[:, None]
    return call.with_options(softmax_scale=1.0)


def exact(call: Call) -> tuple[Tensor, Tensor]:
    """Out and lse of call_with_score_of_key(): of one query of each head."""
    cap = call.options["softcap"]
    scores = cap * torch.tanh(call.k[0, :, :, 0].double() / cap)
    lse = scores.logsumexp(0)
    return torch.einsum("jh,jhd->hd", (scores - lse).exp(), call.v[0].double()), lse


@pytest.mark.parametrize("share", [1e-3, 0.3, 0.499, 0.5, 0.501, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("cap", [0.25, 30.0, 100.0])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_up_to_a_share_of_softcap(
    device: str, dtype: torch.dtype, head_dim: int, cap: float, share: float
) -> None:
    """Also around half of softcap, where the forward for Hopper changes its way: before, tanh is good to 2.3e-5,
    elsewhere to 2^-11 at least, which moves a score, and lse, by no more."""
    scores = cap * share * torch.linspace(-1, 1, 390, device=device)
    call = call_with_score_of_key(scores, head_dim, dtype, softcap=cap)
    assert_matches_oracle(call, gradients_of=())
    found = run_library(call)
    out, lse = exact(call)
    by_products = "sm90/forward " in str(flash_ext.explain(call.q, call.k, call.v, **call.options)) and head_dim <= 192
    off = (2.4e-5 if by_products and share < 0.5 else 2**-10.5) * cap * min(share, 1.0)
    torch.testing.assert_close(found["lse"].double(), lse[None, :, None].expand(1, -1, 150), rtol=0, atol=off + 1e-5)
    torch.testing.assert_close(
        found["out"].double(), out[None, None].expand(1, 150, -1, -1), rtol=2**-7, atol=(2**-8 + 2 * off) * 3
    )


@pytest.mark.parametrize("mask", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_one_key_beyond_softcap(device: str, head_dim: int, mask: dict[str, Any]) -> None:
    """Some warps cap scores by one way, others by another, and so do the tiles of one row."""
    call = make_call(1, 300, 520, 2, 1, head_dim, dtype=torch.bfloat16, device=device, softcap=20.0, **mask)
    call.q[:, ::70, :, 0] = head_dim**0.5
    call.k[:, [3, 200, 390], :, 0] = torch.tensor([1e4, -300.0, 21.0], device=device, dtype=call.dtype)[:, None]
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("infinite", [torch.inf, -torch.inf])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_of_infinite_scores(device: str, dtype: torch.dtype, head_dim: int, infinite: float) -> None:
    """Like any large one's. NaN is NaN in the rows that see it, and nowhere else."""
    scores = 4.0 * torch.linspace(-1, 1, 390, device=device)
    call = call_with_score_of_key(scores, head_dim, dtype, softcap=5.0, causal=True)
    call.k[:, 300, :, 0] = 1e4 if infinite > 0 else -1e4
    expected = run_library(call)
    call.k[:, 300, :, 0] = infinite
    found = run_library(call)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    call.k[:, 300, :, 0] = torch.nan
    found = run_library(call)
    sees = torch.arange(150, device=device) + 240 >= 300
    assert found["out"][:, sees].isnan().all() and found["lse"][..., sees].isnan().all()
    torch.testing.assert_close(found["out"][:, ~sees], expected["out"][:, ~sees], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("cap", "scale"), [(1e-30, 1e-31), (1e30, 1e29), (1e30, 1.0), (30.0, 1e-33), (1e-20, 1e10)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_softcap_and_scale_at_the_ends_of_a_float(device: str, head_dim: int, cap: float, scale: float) -> None:
    call = make_call(1, 70, 200, 1, 1, head_dim, dtype=torch.bfloat16, device=device, softcap=cap, softmax_scale=scale)
    assert_matches_oracle(call, gradients_of=())


def slopes_of(device: str, heads: int, steepest: float) -> Tensor:
    return steepest * 2.0 ** -torch.arange(heads, device=device, dtype=torch.float32)


@pytest.mark.parametrize("steepest", [0.01, 40.0])
@pytest.mark.parametrize("mask", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 520), (520, 300), (1, 600), (600, 70)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_alibi(device: str, head_dim: int, seqlen_q: int, seqlen_k: int, mask: dict[str, Any], steepest: float) -> None:
    """The diagonal lies within the keys, before them, and behind them."""
    call = make_call(
        1, seqlen_q, seqlen_k, 2, 1, head_dim, dtype=torch.bfloat16, device=device,
        alibi_slopes=slopes_of(device, 2, steepest), **mask,
    )  # fmt: skip
    assert_matches_oracle(call, gradients_of=())


def test_slopes_that_are_a_slice(device: str, dtype: torch.dtype) -> None:
    slopes = torch.rand(2, 9, device=device)[:, 3:7]
    assert_matches_oracle(make_call(dtype=dtype, device=device, alibi_slopes=slopes))


@pytest.mark.parametrize("slope", [0.375, -0.375], ids=["down", "up"])
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS.keys())
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alibi_beside_scores_that_grow(
    device: str, dtype: torch.dtype, head_dim: int, growth: Any, backwards: bool, slope: float
) -> None:
    """Away from the diagonal they may grow as fast as ALiBi lets them fall, or rise with a slope below 0."""
    if growth is one_beyond_float and dtype == torch.float16:
        pytest.skip("float16 holds no such key")
    call = call_with_scores(growth, backwards=backwards, device=device, head_dim=head_dim, dtype=dtype)
    slopes = torch.full((call.q.shape[2],), slope, device=device)
    assert_matches_oracle(call.with_options(alibi_slopes=slopes), gradients_of=())


@pytest.mark.parametrize("options", [{}, {"softcap": 4.0}], ids=["alibi", "both"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alibi_of_packed_sequences(device: str, dtype: torch.dtype, head_dim: int, options: dict[str, Any]) -> None:
    """The last tile, whose memory holds rows of the next sequence, is visited amid the others."""
    lengths_q, lengths_k = [300, 1, 0, 129, 64, 257], [521, 70, 9, 0, 200, 257]
    call = make_varlen_call(
        lengths_q, lengths_k, device, heads_q=4, heads_kv=2, head_dim=head_dim, dtype=dtype,
        alibi_slopes=torch.rand(6, 4, device=device) / 4, **options,
    )  # fmt: skip
    for window in WINDOWS.values():
        assert_matches_oracle(call.with_options(**window), gradients_of=())
    used_q, used_k = int32([290, 1, 0, 70, 64, 257], device), int32([400, 33, 9, 0, 140, 256], device)
    call = call.with_options(seqused_q=used_q, seqused_k=used_k)
    for sequence, (begin, used) in enumerate(zip(call.options["cu_seqlens_k"].tolist(), used_k.tolist(), strict=False)):
        call.k[begin + used : begin + lengths_k[sequence]] = torch.nan
        call.v[begin + used : begin + lengths_k[sequence]] = torch.nan
    found = run_library(call)
    assert not found["lse"].isnan().any()
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("poison", [torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("key", [5, 270, 505])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_alibi_and_values_that_a_window_hides(device: str, head_dim: int, key: int, poison: float) -> None:
    """Left of the diagonal, near it, and right of it: what is computed again visits tiles in the same order."""
    call = make_call(
        1, 300, 520, 2, 1, head_dim, dtype=torch.bfloat16, device=device, window_size=(160, 130),
        alibi_slopes=slopes_of(device, 2, 0.25),
    )  # fmt: skip
    expected = run_library(call)["out"]
    call.v[:, key, :, 3] = poison
    found = run_library(call)["out"]
    diagonal = torch.arange(300, device=device) + 220
    sees = (key >= diagonal - 160) & (key <= diagonal + 130)
    assert not found[:, sees, :, 3].isfinite().any()
    torch.testing.assert_close(found[:, ~sees], expected[:, ~sees], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[..., :3], expected[..., :3], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}], ids=["alibi", "causal", "softcap"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_same_bits_each_time(device: str, head_dim: int, options: dict[str, Any]) -> None:
    batch, heads = (1, 2) if device == "cpu" else (4, 24)
    q, k, v = (torch.randn(batch, 700, heads, head_dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    q[:, ::50, ::3] *= 40.0  # some rows are computed again, some warps cap otherwise
    slopes = slopes_of(device, heads, 0.5)
    first, *others = (
        flash_ext.attention(q, k, v, alibi_slopes=slopes, **options) for _ in range(2 if device == "cpu" else 20)
    )
    assert isinstance(first, Tensor)
    assert all(torch.equal(first, other) for other in others)
