"""The backward where there are fewer tiles of keys than SMs: CTAs share a tile, along heads and queries, and their dK
and dV are added up. On a CPU these are problems like any other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flash_ext
from tests.oracle import (
    Call,
    assert_matches_oracle,
    int32,
    make_call,
    make_varlen_call,
    random,
    random_rng,
    run_library,
)

QKV = ("q", "k", "v")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GROUPS = [2, 3, 4, 5, 7, 8, 16]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "top_left": True},
    "window": {"window_size": (90, 40)},
}


def splits_of(call: Call) -> int:
    schedule = flash_ext.explain(call.q, call.k, call.v, operation="backward", **call.options).plan.schedule
    return int(schedule.head_splits * schedule.query_splits)


def check(call: Call, device: str, shares: bool = True) -> None:
    """``deterministic`` is said, so that poisoned scratch memory does not ask for another kernel."""
    if "deterministic" not in call.options:
        call = call.with_options(deterministic=False)
    assert not shares or device == "cpu" or splits_of(call) > 1
    assert_matches_oracle(call, QKV)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups(device: str, dtype: torch.dtype, group: int, mask: dict[str, Any]) -> None:
    check(make_call(1, 410, 330, group, 1, 128, dtype=dtype, device=device, **mask), device)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("head_dim", [64, 96, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int, mask: dict[str, Any]) -> None:
    check(make_call(1, 390, 450, 6, 2, head_dim, dtype=dtype, device=device, **mask), device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 40), (128, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_head_dims_that_differ(
    device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, deterministic: bool
) -> None:
    call = make_call(
        1, 300, 290, 4, 1, head_dim, head_dim_v, dtype=dtype, device=device, causal=True, deterministic=deterministic
    )
    check(call, device)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(65, 900), (900, 65), (1, 300), (300, 1), (64, 128), (129, 129)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lengths(device: str, head_dim: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    """Tiles of keys that few queries see, or none, have fewer splits than others."""
    call = make_call(1, seqlen_q, seqlen_k, 8, 1, head_dim, dtype=torch.bfloat16, device=device, causal=causal)
    check(call, device, shares=False)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ungrouped_heads(device: str, dtype: torch.dtype, mask: dict[str, Any]) -> None:
    check(make_call(1, 800, 700, 1, 1, 128, dtype=dtype, device=device, **mask), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_behind_a_full_wave(device: str, head_dim: int) -> None:
    """Those of the wave stay whole, the others are split."""
    if device == "cpu":
        pytest.skip("a CPU has no waves")
    sms, block_n = torch.cuda.get_device_properties(device).multi_processor_count, 128
    slots = sms // 2 if head_dim == 256 else sms
    call = make_call(1, 512, 2 * block_n, slots // 2 + 2, slots // 2 + 2, head_dim, dtype=torch.bfloat16, device=device)
    plan = flash_ext.explain(call.q, call.k, call.v, operation="backward", deterministic=False).plan
    assert not plan.kernel.startswith("sm90/backward") or plan.schedule.unsplit_tiles == slots
    check(call, device)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (60, 20)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_packed_sequences(device: str, dtype: torch.dtype, head_dim: int, mask: dict[str, Any]) -> None:
    call = make_varlen_call(
        [200, 0, 1, 330], [260, 7, 0, 410], device, spare=11, heads_q=8, heads_kv=1, head_dim=head_dim, dtype=dtype,
        **mask,
    )  # fmt: skip
    call.k[-11:] = call.v[-11:] = torch.nan
    check(call, device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_seqlen", [500, 20000])
def test_packed_sequences_without_a_bound(
    device: str, dtype: torch.dtype, max_seqlen: int, deterministic: bool
) -> None:
    """The bound on the lengths decides neither how many CTAs there are nor how much scratch memory."""
    call = make_varlen_call(
        [300, 5, 410], [310, 90, 400], device, heads_q=4, heads_kv=2, head_dim=64, causal=True, dtype=dtype
    )
    bounds = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen, "deterministic": deterministic}
    check(call.with_options(**bounds), device)


def test_lengths_in_use(device: str) -> None:
    call = make_call(
        2, 400, 420, 6, 2, 128, dtype=torch.bfloat16, device=device, causal=True,
        seqused_q=int32([400, 130], device), seqused_k=int32([70, 420], device),
    )  # fmt: skip
    check(call, device)


OPTIONS = ["softcap", "alibi", "bias", "key_bias", "mask", "key_mask", "dropout", "sink", "all"]


def options_of(name: str, device: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    batch, heads, seqlen_q, seqlen_k = shape
    if name == "all":
        chosen = ("softcap", "alibi", "bias", "mask", "dropout", "sink")
        return {k: v for each in chosen for k, v in options_of(each, device, dtype, shape).items()}
    mask = torch.rand(batch, heads, seqlen_q, seqlen_k, device=device) < 0.7
    mask[:, 0, :200], mask[:, -1, 128:] = False, False  # some heads have no steps in some splits
    return {
        "softcap": {"softcap": 4.0},
        "alibi": {"alibi_slopes": torch.rand(heads, device=device) * 0.2, "causal": True},
        "bias": {"bias": random(1, heads, seqlen_q, seqlen_k, dtype=dtype, device=device)},
        "key_bias": {"bias": random(batch, heads, 1, seqlen_k, dtype=dtype, device=device)},
        "mask": {"mask": mask},
        "key_mask": {"mask": mask[:, :, 300:301]},
        "dropout": {"dropout_p": 0.3, "rng_state": random_rng(device)},
        "sink": {"sink": random(heads, device=device)},
    }[name]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_options(device: str, dtype: torch.dtype, head_dim: int, name: str) -> None:
    shape = (1, 6, 400, 330)
    options = options_of(name, device, dtype, shape)
    check(make_call(1, 400, 330, 6, 1, head_dim, dtype=dtype, device=device, **options), device)


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("k", "v")], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_some_gradients_alone(
    device: str, dtype: torch.dtype, head_dim: int, causal: bool, wanted: tuple[str, ...]
) -> None:
    call = make_call(1, 300, 290, 4, 1, head_dim, dtype=dtype, device=device, causal=causal, deterministic=False)
    assert_matches_oracle(call, wanted)


@pytest.mark.parametrize("seqlen", [300, 2000])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_dk_and_dv_repeat_bit_for_bit(device: str, dtype: torch.dtype, head_dim: int, seqlen: int) -> None:
    """Splits are added up in one order, whichever of them ends first."""
    seqlen, runs = (150, 3) if device == "cpu" else (seqlen, 30)
    assert_dk_and_dv_repeat(make_call(1, seqlen, seqlen, 8, 2, head_dim, dtype=dtype, device=device), runs)


@pytest.mark.slow
@pytest.mark.parametrize("heads_kv", [2, 32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_dk_and_dv_repeat_a_thousand_times(device: str, dtype: torch.dtype, head_dim: int, heads_kv: int) -> None:
    """Few key heads, whose tiles are split, and more tiles of keys than SMs."""
    batch, heads_kv, seqlen, runs = (1, 2, 150, 10) if device == "cpu" else (2, heads_kv, 1000, 1000)
    call = make_call(batch, seqlen, seqlen, max(8, heads_kv), heads_kv, head_dim, dtype=dtype, device=device)
    if device == "cuda":
        assert (splits_of(call.with_options(causal=True)) > 1) == (heads_kv == 2)
    assert_dk_and_dv_repeat(call, runs)


def assert_dk_and_dv_repeat(call: Call, runs: int) -> None:
    call = call.with_options(causal=True, deterministic=False).with_random_gradients()
    first = run_library(call, QKV)
    for _ in range(runs):
        again = run_library(call, QKV)
        assert torch.equal(again["dk"], first["dk"]) and torch.equal(again["dv"], first["dv"])


def test_scratch_memory_follows_the_splits(device: str) -> None:
    """Slots are those of tiles that exist."""
    if device == "cpu":
        pytest.skip("a CPU has no splits")
    call = make_varlen_call([256] * 3, [256] * 3, device, heads_q=8, heads_kv=1, head_dim=128, dtype=torch.bfloat16)
    call = call.with_options(max_seqlen_q=768, max_seqlen_k=768, deterministic=False).with_random_gradients()
    run_library(call, QKV)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_library(call, QKV)
    tiles, slot_bytes = math.ceil((768 + 3 * 127) / 128), 2 * 128 * 128 * 4
    inputs_and_results = 12 * 768 * 8 * 128 * 4
    assert torch.cuda.max_memory_allocated(device) - before < splits_of(call) * tiles * slot_bytes + inputs_and_results
