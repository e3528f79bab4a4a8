"""Merging partial results over disjoint keys, with its gradient."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from tests import reference
from tests.oracle import (
    FLOATS,
    HALF,
    ROWS_OF_RMS,
    assert_rms_within_bound,
    assert_within_bound,
    make_call,
    make_varlen_call,
    poisoned_outputs,
    random,
)

pytestmark = pytest.mark.op("merge")


def parts(splits: int, dtype: torch.dtype, device: str, shape: tuple[int, ...] = (2, 9, 4, 24)) -> tuple:
    """outs (splits, batch, seqlen_q, heads, head_dim) and lses (splits, batch, heads, seqlen_q)."""
    *batch, seqlen, heads, _head_dim = shape
    outs = random(splits, *shape, dtype=dtype, device=device)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return outs, random(splits, *batch, heads, seqlen, dtype=lse_dtype, device=device) * 3


def assert_merge_matches(
    outs: torch.Tensor, lses: torch.Tensor, gradients_of: tuple[str, ...] = ("outs", "lses")
) -> None:
    grads = random(*outs.shape[1:], device=outs.device), random(*lses.shape[1:], device=outs.device)

    def run(function, dtype: torch.dtype, lse_dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = {"outs": outs.detach().to(dtype), "lses": lses.detach().to(lse_dtype)}
        wanted = [leaves[name].requires_grad_() for name in gradients_of]
        results = function(leaves["outs"], leaves["lses"])
        named = dict(zip(("out", "lse"), (t.detach() for t in results), strict=True))
        used = [(t, g.to(t.dtype)) for t, g in zip(results, grads, strict=True) if t.requires_grad]
        if wanted:
            found = torch.autograd.grad([t for t, _ in used], wanted, [g for _, g in used])
            named |= {"d" + name: g for name, g in zip(gradients_of, found, strict=True)}
        return named

    ref = run(reference.merge, torch.float64, torch.float64)
    low = run(reference.merge, outs.dtype, outs.dtype if outs.dtype not in HALF else torch.float32)
    slack = {name: torch.zeros_like(t) for name, t in ref.items()}
    if "dlses" in slack:
        slack["dlses"] += rounding_of_out(ref, lses, grads[0], outs.dtype)
    some_rows = outs.dtype in HALF and int(ref["lse"].isfinite().sum()) >= ROWS_OF_RMS
    with poisoned_outputs():
        poisoned = run(flash_ext.merge, outs.dtype, lses.dtype)
    for got in (run(flash_ext.merge, outs.dtype, lses.dtype), poisoned):
        for name in ref:
            exact = lses.dtype if name == "lse" else outs.dtype
            assert_within_bound(name, got[name], ref[name], low[name], exact, slack=slack[name])
            if some_rows and name in ("douts", "dlses"):
                assert_rms_within_bound(
                    name, got[name].double(), ref[name], low[name].double(), exact, 2.0, slack[name]
                )
        assert got["out"].dtype == outs.dtype and got["lse"].dtype == lses.dtype


def rounding_of_out(
    ref: dict[str, torch.Tensor], lses: torch.Tensor, grad_out: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What the rounding of ``out`` may add to the gradient of each part's lse, which is its weight times the product of
    grad_out and (its out - out): the backward reads ``out`` as it was returned."""
    weights = (lses.double() - ref["lse"]).exp().nan_to_num(0.0)
    products = (grad_out.double().abs() * ref["out"].abs()).sum(-1).transpose(-1, -2)
    return 0.5 * torch.finfo(dtype).eps * weights * products


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3, 17])
def test_matches_the_oracle(device: str, dtype: torch.dtype, splits: int) -> None:
    assert_merge_matches(*parts(splits, dtype, device))


@pytest.mark.parametrize("gradients_of", [(), ("outs",), ("lses",)], ids=str)
def test_subsets_of_gradients(device: str, gradients_of: tuple[str, ...]) -> None:
    assert_merge_matches(*parts(3, torch.float32, device), gradients_of)


@pytest.mark.parametrize("head_dim", [1, 7, 8, 64, 72, 256, 300])
def test_any_head_dim(device: str, head_dim: int) -> None:
    assert_merge_matches(*parts(3, torch.float32, device, (2, 5, 3, head_dim)))


def test_packed_sequences(device: str) -> None:
    assert_merge_matches(*parts(3, torch.float32, device, (21, 4, 24)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 5.0], ids=str)
def test_parts_that_saw_nothing_contribute_nothing(device: str, dtype: torch.dtype, garbage: float) -> None:
    outs, lses = parts(3, dtype, device)
    lses[0, :, :, 2:5] = -torch.inf
    lses[:, 1] = -torch.inf
    outs_seen = torch.where(torch.isneginf(lses).transpose(-1, -2)[..., None], 0, outs)
    outs = torch.where(torch.isneginf(lses).transpose(-1, -2)[..., None], garbage, outs)
    out, lse = flash_ext.merge(outs, lses)
    expected, expected_lse = reference.merge(outs_seen.double(), lses.double())
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype in HALF else {}
    torch.testing.assert_close(out, expected.to(dtype), **tolerance)
    torch.testing.assert_close(lse, expected_lse.to(lse.dtype))
    assert (out[1] == 0).all() and torch.isneginf(lse[1]).all()


def test_gradients_of_parts_that_saw_nothing_are_zero(device: str) -> None:
    outs, lses = parts(3, torch.float32, device)
    lses[0, :, :, 2:5], lses[:, 1] = -torch.inf, -torch.inf
    hidden = torch.isneginf(lses).transpose(-1, -2)
    outs = torch.where(hidden[..., None], torch.nan, outs).requires_grad_()
    lses = lses.requires_grad_()
    out, lse = flash_ext.merge(outs, lses)
    grad_outs, grad_lses = torch.autograd.grad([out, lse], [outs, lses], [torch.ones_like(out), torch.ones_like(lse)])
    assert not grad_outs.isnan().any() and not grad_lses.isnan().any()
    assert (grad_outs[hidden] == 0).all() and (grad_lses.transpose(-1, -2)[hidden] == 0).all()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_lse_of_any_size(device: str, shift: float) -> None:
    outs, lses = parts(3, torch.float32, device)
    out, lse = flash_ext.merge(outs, lses + shift)
    plain, plain_lse = flash_ext.merge(outs, lses)
    torch.testing.assert_close(out, plain, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, plain_lse + shift, rtol=1e-6, atol=1e-2)


def test_sequences_of_tensors(device: str) -> None:
    outs, lses = parts(3, torch.float32, device)
    for stacked, listed in zip(flash_ext.merge(outs, lses), flash_ext.merge(list(outs), tuple(lses)), strict=True):
        assert torch.equal(stacked, listed)


def test_strided_parts(device: str) -> None:
    outs, lses = parts(3, torch.float32, device)
    strided = outs.transpose(2, 3).contiguous().transpose(2, 3), lses.transpose(2, 3).contiguous().transpose(2, 3)
    for got, want in zip(flash_ext.merge(*strided), flash_ext.merge(outs, lses), strict=True):
        assert torch.equal(got, want)
    assert_merge_matches(*strided)


def test_parts_an_odd_number_of_elements_apart(device: str) -> None:
    """The first is aligned, the others are not."""
    outs, lses = parts(3, torch.float32, device)
    apart = outs[0].numel() + 1
    spaced = outs.new_full((3 * apart,), torch.nan).as_strided(outs.shape, (apart, *outs.stride()[1:]))
    assert_merge_matches(spaced.copy_(outs), lses)


@pytest.mark.parametrize("spread", [1.0, 1e-4], ids=["different", "nearly equal"])
def test_parts_along_a_strided_dimension(device: str, spread: float) -> None:
    """Parts that agree almost everywhere: the gradient of their lse is a small difference of large numbers."""
    whole = random(1, 9, 2, 4, 24, device=device)
    outs = (whole + spread * random(3, 9, 2, 4, 24, device=device)).transpose(1, 2).transpose(0, 1).contiguous()
    outs, lses = outs.transpose(0, 1), random(2, 3, 4, 9, device=device).transpose(0, 1)
    leaves = [t.detach().requires_grad_() for t in (outs, lses)]
    doubles = [t.detach().double().requires_grad_() for t in (outs, lses)]
    out, lse = flash_ext.merge(*leaves)
    expected_out, expected_lse = reference.merge(*doubles)
    torch.testing.assert_close(out, expected_out.float())
    torch.testing.assert_close(lse, expected_lse.float())
    got = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
    want = torch.autograd.grad(expected_out.square().sum() + expected_lse.sum(), doubles)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=3e-5)


def test_empty_parts(device: str) -> None:
    for shape in [(0, 9, 4, 24), (2, 0, 4, 24)]:
        out, lse = flash_ext.merge(*parts(3, torch.float32, device, shape))
        assert out.shape == shape and lse.numel() == 0


@pytest.mark.op("attention_forward")
@pytest.mark.parametrize("cut", [0, 1, 20, 47])
def test_attention_over_cut_keys_merges_to_the_whole(device: str, cut: int) -> None:
    """Out, lse and, through the merge, every gradient."""
    call = make_call(device=device, dtype=torch.float32).with_random_gradients()
    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v)]
    whole = flash_ext.attention(*leaves, return_lse=True)
    pieces = [
        flash_ext.attention(call.q, call.k[:, part], call.v[:, part], return_lse=True)
        for part in (slice(0, cut), slice(cut, None))
    ]
    merged = flash_ext.merge([o for o, _ in pieces], [lse for _, lse in pieces])
    for got, want in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, want)
    grads = [call.grad_out, call.grad_lse]
    for got, want in zip(
        torch.autograd.grad(merged, leaves, grads), torch.autograd.grad(whole, leaves, grads), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.op("attention_forward")
def test_packed_attention_merges(device: str) -> None:
    call = make_varlen_call([9, 4], [12, 7], device, dtype=torch.float32)
    first, second = (
        flash_ext.attention(call.q, call.k, call.v, **call.options, window_size=w, top_left=True, return_lse=True)
        for w in ((-1, -1), (-1, 0))
    )
    out, lse = flash_ext.merge([first[0], second[0]], [first[1], second[1]])
    expected = reference.merge(torch.stack([first[0], second[0]]), torch.stack([first[1], second[1]]))
    torch.testing.assert_close((out, lse), expected)
