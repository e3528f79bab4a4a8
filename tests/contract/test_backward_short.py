"""Backward of sequences whose rows fit into one CTA, which has a kernel of its own on Hopper: heads that are not
grouped, up to 256 queries and keys at head dims up to 64, up to 128 at head dims up to 128."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_ext
from tests.oracle import Call, assert_kernel_on_hopper, assert_matches_oracle, int32, make_call, run_library

HALF = [torch.float16, torch.bfloat16]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top left": {"causal": True, "top_left": True},
    "window": {"window_size": (50, 7)},
    "left": {"window_size": (20, -1)},
}
# Around whole tiles of 64, and where queries and keys need different numbers of them.
LENGTHS = [(1, 1), (33, 64), (64, 63), (65, 128), (128, 100), (128, 128), (197, 197), (256, 256), (256, 40), (9, 250)]
MOST_ROWS = {64: 256, 128: 128}  # of kernels up to these head dims
CASES = [(dim, *lengths) for dim, most in MOST_ROWS.items() for lengths in LENGTHS if max(lengths) <= most]


def short_call(
    seqlen_q: int, seqlen_k: int, device: str, dtype: torch.dtype, head_dim: int = 64, **options: Any
) -> Call:
    call = make_call(2, seqlen_q, seqlen_k, 3, 3, head_dim, dtype=dtype, device=device, **options)
    assert_kernel_on_hopper(call, "sm90/backward_short", "backward")
    return call


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("head_dim", "seqlen_q", "seqlen_k"), CASES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_lengths(
    device: str, dtype: torch.dtype, head_dim: int, seqlen_q: int, seqlen_k: int, mask: dict[str, Any]
) -> None:
    assert_matches_oracle(short_call(seqlen_q, seqlen_k, device, dtype, head_dim, **mask))


@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 104, 120])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int) -> None:
    assert_matches_oracle(short_call(130 if head_dim <= 64 else 110, 70, device, dtype, head_dim, causal=True))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("head_dim", "seqlen_q"), [(64, 150), (128, 120)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sinks(device: str, dtype: torch.dtype, head_dim: int, seqlen_q: int, mask: dict[str, Any]) -> None:
    sink = torch.tensor([0.5, -torch.inf, 2.0], device=device)
    assert_matches_oracle(short_call(seqlen_q, 90, device, dtype, head_dim, sink=sink, **mask))


@pytest.mark.parametrize(("head_dim", "seqlen_k"), [(64, 130), (128, 128)])
def test_a_sink_that_takes_all(device: str, head_dim: int, seqlen_k: int) -> None:
    sink = torch.tensor([torch.inf, 0.0, -1.0], device=device)
    call = short_call(70, seqlen_k, device, torch.bfloat16, head_dim, sink=sink)
    result = assert_matches_oracle(call, ["q", "k", "v"])
    assert (result["dq"][:, :, 0] == 0).all() and (result["dv"][:, :, 0] == 0).all()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize(("head_dim", "seqlen_q", "seqlen_k"), [(64, 190, 130), (128, 120, 128)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_lengths_in_use(
    device: str, dtype: torch.dtype, head_dim: int, seqlen_q: int, seqlen_k: int, finite: bool, mask: dict[str, Any]
) -> None:
    """Rows behind them may hold anything, also where all keys in use are visible."""
    used = {"seqused_q": int32([100, 0], device), "seqused_k": int32([70, seqlen_k - 1], device)}
    call = short_call(seqlen_q, seqlen_k, device, dtype, head_dim, **mask, **used)
    for entry in () if finite else range(2):
        call.q[entry, int(used["seqused_q"][entry]) :] = torch.nan
        call.k[entry, int(used["seqused_k"][entry]) :] = torch.inf
        call.v[entry, int(used["seqused_k"][entry]) :] = torch.nan
    assert_matches_oracle(call)


@pytest.mark.parametrize(("head_dim", "seqlen"), [(64, 200), (128, 100)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scores_far_below_zero(device: str, dtype: torch.dtype, head_dim: int, seqlen: int) -> None:
    """A row behind the last key has scores of 0, of which the weight would be beyond float16."""
    call = short_call(seqlen, seqlen, device, dtype, head_dim)
    call.q, call.k = call.q / 16 + 2, call.k / 16 - 2
    assert_matches_oracle(call)


@pytest.mark.parametrize("hidden", [slice(100, None), slice(0, 60)], ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(("head_dim", "seqlen_k"), [(64, 200), (128, 128)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_hidden_keys(
    device: str, dtype: torch.dtype, head_dim: int, seqlen_k: int, poison: float, hidden: slice
) -> None:
    window = {"window_size": (-1, 0), "top_left": True} if hidden.start else {"window_size": (40, -1)}
    call = short_call(seqlen_k - 100, seqlen_k, device, dtype, head_dim, **window)
    call.k[:, hidden] = call.v[:, hidden] = poison
    result = assert_matches_oracle(call)
    assert (result["dk"][:, hidden] == 0).all() and (result["dv"][:, hidden] == 0).all()


@pytest.mark.parametrize("which", ["q", "v", "grad_out"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("head_dim", MOST_ROWS)
def test_a_row_that_is_not_finite_reaches_those_who_see_it(
    device: str, head_dim: int, which: str, poison: float
) -> None:
    """And no others: under a causal mask queries before it, or keys behind it, do not."""
    call = short_call(128, 128, device, torch.bfloat16, head_dim, causal=True).with_random_gradients()
    clean = run_library(call, ("q", "k", "v"))
    getattr(call, which)[:, 70] = poison
    found = run_library(call, ("q", "k", "v"))
    assert not found["dk"][:, 69].isfinite().all()
    close = {"rtol": 0.05, "atol": 0.05}  # a forward that meets NaN rounds in another order
    torch.testing.assert_close(found["dq"][:, :70], clean["dq"][:, :70], **close)
    if which != "v":
        torch.testing.assert_close(found["dv"][:, 71:], clean["dv"][:, 71:], **close)


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("q", "v")], ids=str)
@pytest.mark.parametrize(("head_dim", "seqlen_q", "seqlen_k"), [(64, 140, 200), (128, 90, 120)])
def test_some_gradients(device: str, wanted: tuple[str, ...], head_dim: int, seqlen_q: int, seqlen_k: int) -> None:
    assert_matches_oracle(short_call(seqlen_q, seqlen_k, device, torch.bfloat16, head_dim, causal=True), wanted)


@pytest.mark.parametrize("head_dim", MOST_ROWS)
def test_views_of_one_projection(device: str, head_dim: int) -> None:
    call = short_call(120, 120, device, torch.bfloat16, head_dim)
    packed = torch.stack((call.q, call.k, call.v), dim=2)
    call.q, call.k, call.v = packed.unbind(2)
    assert_matches_oracle(call)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("head_dim", "seqlen"), [(64, 197), (128, 128)])
def test_each_run_gives_the_same_bits(device: str, head_dim: int, seqlen: int, mask: dict[str, Any]) -> None:
    batch = 64 if device == "cuda" else 2
    call = make_call(batch, seqlen, seqlen, 12, 12, head_dim, dtype=torch.bfloat16, device=device, **mask)
    call = call.with_random_gradients()
    first = run_library(call, ("q", "k", "v"))
    for _ in range(20 if device == "cuda" else 2):
        again = run_library(call, ("q", "k", "v"))
        assert all(torch.equal(first[name], again[name]) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("change", [{"seqlen_q": 257}, {"seqlen_k": 257}, {"heads_kv": 1}, {"head_dim": 72}], ids=str)
def test_calls_beside_them(device: str, change: dict[str, int]) -> None:
    """Those that the kernel does not serve."""
    sizes = {"seqlen_q": 130, "seqlen_k": 130, "heads_q": 3, "heads_kv": 3, "head_dim": 64, **change}
    call = make_call(2, **sizes, dtype=torch.bfloat16, device=device, causal=True)
    explained = flash_ext.explain(call.q, call.k, call.v, operation="backward", causal=True)
    assert explained.plan.kernel != "sm90/backward_short"
    assert_matches_oracle(call)
