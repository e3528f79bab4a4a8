"""Backward of sequences whose rows fit into one CTA, which has a kernel of its own on Hopper: heads that are not
grouped, head dims up to 64, up to 256 queries and keys."""

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
LENGTHS = [(1, 1), (33, 64), (64, 63), (65, 128), (128, 100), (197, 197), (256, 256), (256, 40), (9, 250)]


def short_call(
    seqlen_q: int, seqlen_k: int, device: str, dtype: torch.dtype, head_dim: int = 64, **options: Any
) -> Call:
    call = make_call(2, seqlen_q, seqlen_k, 3, 3, head_dim, dtype=dtype, device=device, **options)
    assert_kernel_on_hopper(call, "sm90/backward_short", "backward")
    return call


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_lengths(device: str, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, mask: dict[str, Any]) -> None:
    assert_matches_oracle(short_call(seqlen_q, seqlen_k, device, dtype, **mask))


@pytest.mark.parametrize("head_dim", [8, 24, 40])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int) -> None:
    assert_matches_oracle(short_call(130, 70, device, dtype, head_dim, causal=True))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sinks(device: str, dtype: torch.dtype, mask: dict[str, Any]) -> None:
    sink = torch.tensor([0.5, -torch.inf, 2.0], device=device)
    assert_matches_oracle(short_call(150, 90, device, dtype, sink=sink, **mask))


def test_a_sink_that_takes_all(device: str) -> None:
    sink = torch.tensor([torch.inf, 0.0, -1.0], device=device)
    result = assert_matches_oracle(short_call(70, 130, device, torch.bfloat16, sink=sink), ["q", "k", "v"])
    assert (result["dq"][:, :, 0] == 0).all() and (result["dv"][:, :, 0] == 0).all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_lengths_in_use(device: str, dtype: torch.dtype) -> None:
    """Rows behind them may hold anything."""
    used = {"seqused_q": int32([100, 0], device), "seqused_k": int32([70, 129], device)}
    call = short_call(190, 130, device, dtype, causal=True, **used)
    for entry in range(2):
        call.q[entry, int(used["seqused_q"][entry]) :] = torch.nan
        call.k[entry, int(used["seqused_k"][entry]) :] = torch.inf
        call.v[entry, int(used["seqused_k"][entry]) :] = torch.nan
    assert_matches_oracle(call)


@pytest.mark.parametrize("hidden", [slice(100, None), slice(0, 60)], ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_hidden_keys(device: str, dtype: torch.dtype, poison: float, hidden: slice) -> None:
    window = {"window_size": (-1, 0), "top_left": True} if hidden.start else {"window_size": (40, -1)}
    call = short_call(100, 200, device, dtype, **window)
    call.k[:, hidden] = call.v[:, hidden] = poison
    result = assert_matches_oracle(call)
    assert (result["dk"][:, hidden] == 0).all() and (result["dv"][:, hidden] == 0).all()


@pytest.mark.parametrize("which", ["q", "v", "grad_out"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_a_row_that_is_not_finite_reaches_those_who_see_it(device: str, which: str, poison: float) -> None:
    """And no others: under a causal mask queries before it, or keys behind it, do not."""
    call = short_call(128, 128, device, torch.bfloat16, causal=True).with_random_gradients()
    clean = run_library(call, ("q", "k", "v"))
    getattr(call, which)[:, 70] = poison
    found = run_library(call, ("q", "k", "v"))
    assert not found["dk"][:, 69].isfinite().all()
    close = {"rtol": 0.05, "atol": 0.05}  # a forward that meets NaN rounds in another order
    torch.testing.assert_close(found["dq"][:, :70], clean["dq"][:, :70], **close)
    if which != "v":
        torch.testing.assert_close(found["dv"][:, 71:], clean["dv"][:, 71:], **close)


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("q", "v")], ids=str)
def test_some_gradients(device: str, wanted: tuple[str, ...]) -> None:
    assert_matches_oracle(short_call(140, 200, device, torch.bfloat16, causal=True), wanted)


def test_views_of_one_projection(device: str) -> None:
    call = short_call(120, 120, device, torch.bfloat16)
    packed = torch.stack((call.q, call.k, call.v), dim=2)
    call.q, call.k, call.v = packed.unbind(2)
    assert_matches_oracle(call)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_each_run_gives_the_same_bits(device: str, mask: dict[str, Any]) -> None:
    batch = 64 if device == "cuda" else 2
    call = make_call(batch, 197, 197, 12, 12, 64, dtype=torch.bfloat16, device=device, **mask).with_random_gradients()
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
