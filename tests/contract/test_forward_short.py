"""Forward of short sequences, which have a kernel of their own on Hopper: up to 128 queries and keys; up to 768 at head
dims up to 64, and up to 512 at head dims up to 128, where a call has few query tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import (
    HALF,
    Call,
    assert_kernel_on_hopper,
    assert_matches_oracle,
    explained_on_hopper,
    make_call,
    random,
    run_library,
)

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top left": {"causal": True, "top_left": True},
    "window": {"window_size": (50, 7)},
    "left": {"window_size": (20, -1)},
}
# Around whole tiles of 64, and where rows see no key.
LENGTHS = [(1, 1), (33, 64), (64, 63), (65, 129), (128, 100), (197, 197), (256, 256), (250, 9), (9, 250), (384, 300)]
LENGTHS += [(512, 512), (700, 768)]
MOST_ROWS = {64: 768, 128: 512}  # of kernels up to these head dims
CASES = [(dim, *lengths) for dim, most in MOST_ROWS.items() for lengths in LENGTHS if max(lengths) <= most]


@pytest.fixture(params=[False, True], ids=["few tiles", "many tiles"])
def many(request: pytest.FixtureRequest) -> bool:
    """Whether a call has so many query tiles that above head_dim 64 CTAs have 128 queries.

    Calls longer than 256 have few in either case.
    """
    return request.param


def heads_of(head_dim: int, longest: int, device: str, many: bool) -> tuple[int, int]:
    """Batch entries and query heads."""
    if device == "cpu":
        return 2, 2
    if not many or longest > 256:
        return 2, 8
    return (40, 16) if longest <= 128 else (8, 16)


def short_call(
    seqlen_q: int,
    seqlen_k: int,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    many: bool,
    head_dim_v: int = 0,
    **options: Any,
) -> Call:
    batch, heads = heads_of(head_dim, max(seqlen_q, seqlen_k), device, many)
    sizes = (batch, seqlen_q, seqlen_k, heads, heads // 2, head_dim, head_dim_v or head_dim)
    call = make_call(*sizes, dtype=dtype, device=device, **options)
    assert_kernel_on_hopper(call, "sm90/forward_short")
    if (explained := explained_on_hopper(call)) and max(head_dim, head_dim_v) > 64:
        tiles = batch * heads * -(-seqlen_q // 64)
        assert explained.plan.block_m == (64 if seqlen_q <= 64 or tiles <= 2 * 132 else 128)
    return call


def check(call: Call) -> None:
    """Right, and the same bits again."""
    first = assert_matches_oracle(call, gradients_of=())
    again = run_library(call)
    assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("head_dim", "seqlen_q", "seqlen_k"), CASES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_lengths(
    device: str, dtype: torch.dtype, head_dim: int, seqlen_q: int, seqlen_k: int, mask: dict[str, Any], many: bool
) -> None:
    check(short_call(seqlen_q, seqlen_k, device, dtype, head_dim, many, **mask))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (40, 64), (64, 24), (72, 8), (16, 120), (104, 104)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, many: bool) -> None:
    check(short_call(130, 70, device, dtype, head_dim, many, head_dim_v, causal=True))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("head_dim", MOST_ROWS)
def test_sinks(device: str, head_dim: int, mask: dict[str, Any], many: bool) -> None:
    call = short_call(150, 90, device, torch.bfloat16, head_dim, many, **mask)
    sink = random(call.q.shape[2], device=device)
    sink[0], sink[1] = -torch.inf, 200.0
    check(call.with_options(sink=sink))


@pytest.mark.parametrize("place", [0, 70, 129])
@pytest.mark.parametrize("head_dim", MOST_ROWS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_key_far_above_all_others(device: str, dtype: torch.dtype, head_dim: int, place: int, many: bool) -> None:
    """Out is its value, bit for bit, and lse is its score."""
    call = short_call(200, 130, device, dtype, head_dim, many)
    call.q.abs_()
    call.k[1, place] = 80.0
    check(call)
    out = run_library(call)["out"]
    values = call.v[1, place].repeat_interleave(2, 0)
    assert torch.equal(out[1], values.expand_as(out[1]))


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 30.0, 1e4])
@pytest.mark.parametrize("head_dim", MOST_ROWS)
def test_scales(device: str, head_dim: int, scale: float, many: bool) -> None:
    check(short_call(190, 230, device, torch.bfloat16, head_dim, many, causal=True, softmax_scale=scale))


def poisoned(call: Call, place: tuple[Any, ...]) -> Call:
    """The same call with NaN in a key, and Inf and NaN in its value."""
    k, v = call.k.clone(), call.v.clone()
    k[place] = torch.nan
    v[place] = torch.inf
    v[(*place, 0, slice(3, None))] = torch.nan
    return Call(**{**vars(call), "k": k, "v": v})


@pytest.mark.parametrize("head_dim", MOST_ROWS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("place", [199, 130, 64])
def test_hidden_keys_change_no_bit(device: str, dtype: torch.dtype, head_dim: int, place: int, many: bool) -> None:
    call = short_call(200, 200, device, dtype, head_dim, many, causal=True)
    expected, found = run_library(call), run_library(poisoned(call, (1, place)))
    for name, dim in (("out", 1), ("lse", 2)):
        x, y = found[name].movedim(dim, -1)[1], expected[name].movedim(dim, -1)[1]
        assert torch.equal(x[..., :place], y[..., :place])
        assert x[..., place:].isnan().all()
        assert torch.equal(found[name][0], expected[name][0])


@pytest.mark.parametrize("head_dim", [8, 24, *MOST_ROWS])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (30, 20)}], ids=["full", "causal", "window"])
def test_values_that_are_not_finite_come_out(device: str, head_dim: int, mask: dict[str, Any], many: bool) -> None:
    """In the rows that see them, and only there."""
    call = short_call(200, 200, device, torch.bfloat16, head_dim, many, **mask)
    expected = run_library(call)["out"]
    values = {(77, 3): torch.inf, (150, 4): -torch.inf, (20, 5): torch.nan}
    for (key, column), value in values.items():
        call.v[1, key, 0, column] = value
    out = run_library(call)["out"]
    queries = torch.arange(200, device=device)
    for (key, column), value in values.items():
        sees = torch.ones_like(queries, dtype=torch.bool)
        if "causal" in mask:
            sees = queries >= key
        if "window_size" in mask:
            sees = (queries - 30 <= key) & (key <= queries + 20)
        expected[1, :, :2, column] = torch.where(sees[:, None], value, expected[1, :, :2, column])
    # A CPU computes rows that see them by other instructions.
    rtol, atol = (2**-7, 2**-14) if device == "cpu" else (0, 0)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol, equal_nan=True)


def strided(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x with its dimensions in memory in the order of `dims`, and room between rows."""
    wide = torch.zeros(*(x.shape[d] for d in dims[:-1]), x.shape[-1] + 8, dtype=x.dtype, device=x.device)
    place = wide[..., : x.shape[-1]].permute(*(dims.index(d) for d in range(4)))
    return place.copy_(x)


@pytest.mark.parametrize("dims", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)], ids=str)
@pytest.mark.parametrize("head_dim", MOST_ROWS)
def test_strides(device: str, head_dim: int, dims: tuple[int, ...], many: bool) -> None:
    call = short_call(197, 150, device, torch.bfloat16, head_dim, many)
    check(Call(**{**vars(call), **{name: strided(getattr(call, name), dims) for name in ("q", "k", "v")}}))


@pytest.mark.parametrize("head_dim", MOST_ROWS)
def test_rows_that_see_nothing(device: str, head_dim: int, many: bool) -> None:
    """Whole tiles of them, beside values that are not finite."""
    call = short_call(100, 20, device, torch.bfloat16, head_dim, many, causal=True)
    call.v[:] = torch.nan
    found = run_library(call)
    assert (found["out"][:, :80] == 0).all() and (found["lse"][..., :80] == -torch.inf).all()
    assert found["out"][:, 80:].isnan().all()


@pytest.mark.parametrize("head_dim", MOST_ROWS)
def test_an_infinite_score(device: str, head_dim: int, many: bool) -> None:
    call = short_call(70, 100, device, torch.bfloat16, head_dim, many)
    call.q[..., 0] = call.q[..., 0].abs() + 0.1
    call.k[1, 80, :, 0] = torch.inf
    found = run_library(call)
    assert found["out"][1].isnan().all() and (found["lse"][1] == torch.inf).all()
    assert found["out"][0].isfinite().all()


def test_many_heads(device: str) -> None:
    """More than some dimensions of a grid hold."""
    x = random(1, 2, 70000 if device == "cuda" else 70, 8, dtype=torch.bfloat16, device=device)
    last = x[:, :, -3:]
    assert torch.equal(flash_ext.attention(x, x, x)[:, :, -3:], flash_ext.attention(last, last, last))


def test_calls_that_follow_each_other(device: str) -> None:
    """Each starts beside the end of the one before, whose out it reads: of this kernel, and of the one for longer
    sequences."""
    x = random(2, 600, 16, 128, dtype=torch.bfloat16, device=device)

    def step(x: Tensor) -> Tensor:
        short = flash_ext.attention(x[:, :100].contiguous(), x[:, :100], x[:, :100])
        return flash_ext.attention(torch.cat([short, x[:, 100:]], 1), x, x)

    found, expected = x, x
    for _ in range(6):
        found = step(found)
    for _ in range(6):
        expected = step(expected)
        if device == "cuda":
            torch.cuda.synchronize()
    assert torch.equal(found, expected)
