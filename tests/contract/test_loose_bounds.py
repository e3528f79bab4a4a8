"""Packed sequences whose max_seqlen is absent or too large: the same bits as with the longest length, no refusal, and
neither memory nor time beyond what the rows that there are ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flash_ext
from tests.decode_oracle import Decode, assert_decode_matches, make_decode, packed_queries
from tests.oracle import (
    Call,
    assert_alike,
    assert_matches_oracle,
    dtypes_of,
    int32,
    make_varlen_call,
    random,
    random_rng,
    run_library,
    values_are_checked,
)

# On CUDA more than a thousand places of a grid by the bound are empty, so that the tiles that there are are listed.
PACKS = {
    "many": [17 * n % 211 for n in range(60)],
    "equal": [128] * 40,
    "one_long": [1500, *[5, 0, 16] * 70],
    "the_last_is_long": [*[3, 0, 40] * 20, 1100],
}
SMALL_PACKS = {
    "many": [17 * n % 211 for n in range(7)],
    "equal": [70] * 4,
    "one_long": [300, *[5, 0, 16] * 3],
    "the_last_is_long": [*[3, 0, 40] * 3, 300],
}
Bound = Callable[[int, int], int | None]
BOUNDS: dict[str, Bound] = {
    "absent": lambda longest, total: None,
    "ten_times": lambda longest, total: 10 * longest,
    "all_rows": lambda longest, total: total,
    "largest": lambda longest, total: 2**31 - 1,
}
ABSENT = {"absent": BOUNDS["absent"]}
DTYPES = (torch.bfloat16, torch.float32)  # of kernels of their own


def lengths_of(pack: str, device: str) -> list[int]:
    return (SMALL_PACKS if device == "cpu" else PACKS)[pack]


def options_of(name: str, lengths: list[int], device: str) -> dict[str, Any]:
    batch = len(lengths)
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "causal": lambda: {"causal": True},
        "top_left_window": lambda: {"window_size": (70, 3), "top_left": True},
        "softcap": lambda: {"softcap": 3.0, "causal": True},
        "alibi": lambda: {"alibi_slopes": torch.rand(batch, 4, device=device), "causal": True},
        "sink": lambda: {"sink": random(4, device=device)},
        "dropout": lambda: {"dropout_p": 0.2, "rng_state": random_rng(device)},
        "bias_of_heads": lambda: {"bias": random(1, 4, 1, 1, device=device)},
        "bias_of_sequences": lambda: {"bias": random(batch, 1, 1, 1, device=device)},
        "seqused": lambda: {
            "seqused_q": int32([n * 7 % (length + 1) for n, length in enumerate(lengths)], device),
            "seqused_k": int32([n * 31 % (length + 1) for n, length in enumerate(lengths)], device),
            "causal": True,
        },
    }
    return made[name]()


OPTIONS = ("plain", "causal", "top_left_window", "softcap", "alibi", "sink", "dropout", "bias_of_heads",
           "bias_of_sequences", "seqused")  # fmt: skip


def make_pack(lengths: list[int], device: str, dtype: torch.dtype = torch.float32, **arguments: Any) -> Call:
    keys = [length + 20 * (n % 3) for n, length in enumerate(lengths)]
    call = make_varlen_call(lengths, keys, device, spare=3, dtype=dtype, **arguments)
    return call.with_random_gradients()


def with_bound(call: Call, bound: Bound) -> Call:
    o = call.options
    return call.with_options(
        max_seqlen_q=bound(o["max_seqlen_q"], call.q.shape[0]), max_seqlen_k=bound(o["max_seqlen_k"], call.k.shape[0])
    )


def assert_same_bits_whatever_the_bound(call: Call, bounds: dict[str, Bound]) -> None:
    """Additions to dQ have no order on CUDA unless `deterministic`."""
    names = tuple(call.inputs())
    ordered = call.q.device.type == "cpu" or call.options.get("deterministic", False)
    want = run_library(call, names)
    for bound in bounds.values():
        found = run_library(with_bound(call, bound), names)
        for name in want:
            if ordered or name in ("out", "lse"):
                assert torch.equal(found[name], want[name]), name
            else:
                assert_alike(found[name], want[name])


@pytest.mark.parametrize("dtype", dtypes_of("cuda"), ids=str)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(device: str, dtype: torch.dtype, pack: str, causal: bool) -> None:
    call = make_pack(lengths_of(pack, device), device, dtype, causal=causal)
    assert_same_bits_whatever_the_bound(call, BOUNDS)
    assert_matches_oracle(with_bound(call, BOUNDS["absent"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: str, dtype: torch.dtype, name: str) -> None:
    lengths = lengths_of("many", device)
    call = make_pack(lengths, device, dtype, **options_of(name, lengths, device))
    assert_same_bits_whatever_the_bound(call, ABSENT)
    assert_same_bits_whatever_the_bound(call.with_options(deterministic=True), ABSENT)
    assert_matches_oracle(with_bound(call, BOUNDS["absent"]))


@pytest.mark.parametrize("dtype", dtypes_of("cuda"), ids=str)
@pytest.mark.parametrize(("head_dim", "heads_kv"), [(64, 4), (96, 1), (128, 2), (192, 4), (256, 2)])
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int, heads_kv: int) -> None:
    lengths = lengths_of("one_long", device)
    call = make_pack(lengths, device, dtype, head_dim=head_dim, heads_kv=heads_kv, causal=True)
    for deterministic in (False, True):
        assert_same_bits_whatever_the_bound(call.with_options(deterministic=deterministic), ABSENT)


@pytest.mark.parametrize("broadcast", ["rows", "columns", "sequences", "rows_and_sequences"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_a_broadcast_bias(device: str, dtype: torch.dtype, broadcast: str) -> None:
    """A bound that bias does not give is loose; the sums over sequences, rows and columns keep their order."""
    lengths = lengths_of("many", device)
    call = make_pack(lengths, device, dtype)
    longest = [call.options[name] for name in ("max_seqlen_q", "max_seqlen_k")]
    shape = [len(lengths), 4, *longest]
    for dim in {"rows": (2,), "columns": (3,), "sequences": (0,), "rows_and_sequences": (0, 2)}[broadcast]:
        shape[dim] = 1
    call = call.with_options(bias=random(*shape, dtype=dtype, device=device), deterministic=True)
    loose = call.with_options(
        max_seqlen_q=None if shape[2] == 1 else longest[0], max_seqlen_k=None if shape[3] == 1 else longest[1]
    )
    want, found = (run_library(c, ("q", "k", "v", "bias")) for c in (call, loose))
    for name in want:
        assert torch.equal(found[name], want[name]), name
    assert_matches_oracle(loose)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_of_keys(device: str, dtype: torch.dtype) -> None:
    """It bounds the keys, and leaves the queries without a bound."""
    lengths = lengths_of("many", device)
    call = make_pack(lengths, device, dtype)
    mask = torch.rand(len(lengths), 1, 1, call.options["max_seqlen_k"], device=device) < 0.8
    call = call.with_options(mask=mask)
    assert_same_bits_whatever_the_bound(
        call, {"absent": lambda longest, total: None if total == len(call.q) else longest}
    )
    assert_matches_oracle(call.with_options(max_seqlen_q=None))


def test_more_sequences_than_are_sorted_together(device: str) -> None:
    """The list is made of chunks of 4096 sequences."""
    if device == "cpu":
        pytest.skip("the list is CUDA's")
    lengths = [1 + n % 2 for n in range(9000)]
    lengths[5000] = 700
    call = make_pack(lengths, device, torch.bfloat16, causal=True)
    assert_same_bits_whatever_the_bound(call, ABSENT)


def test_every_sequence_is_empty(device: str) -> None:
    call = make_pack([0] * 50, device).with_options(cu_seqlens_k=int32([0] * 51, device))
    result = run_library(with_bound(call, BOUNDS["largest"]), ("q", "k", "v"))
    assert (result["out"] == 0).all() and torch.isneginf(result["lse"]).all()
    assert all((result[name] == 0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.op("attention_decode")
@pytest.mark.parametrize("dtype", dtypes_of("cuda"), ids=str)
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"num_splits": 5}, {"window_right": 0}], ids=str)
@pytest.mark.parametrize("longest", [3, 400])
def test_decoding_packed_queries(device: str, dtype: torch.dtype, options: dict[str, Any], longest: int) -> None:
    """Few queries, and so many that they go through the forward."""
    batch = 40 if device == "cuda" else 6
    lengths = [n * 173 % (longest + 1) for n in range(batch)]
    call = packed_queries(make_decode(batch, 1, 300, 8, 2, device=device, dtype=dtype, **options), lengths)
    want = assert_decode_matches(call)
    for bound in (10 * longest, len(call.q)):
        found = assert_decode_matches(call, max_seqlen_q=bound)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("dtype", dtypes_of("cuda"), ids=str)
def test_appending_rotates_packed_queries(device: str, dtype: torch.dtype) -> None:
    """Rows of q are rotated as they lie in memory where the bound would make a row of most sequences."""
    call = make_decode(
        40, 1, 90, seqlen_new=2, device=device, dtype=dtype, window_right=0,
        cache_seqlens=int32([n * 7 % 88 for n in range(40)], device),
        rotary_cos=random(120, 8, dtype=dtype, device=device), rotary_sin=random(120, 8, dtype=dtype, device=device),
    )  # fmt: skip
    call = packed_queries(call, [n * 13 % 30 for n in range(40)])
    want = assert_decode_matches(
        Decode(call.q, call.k_cache.clone(), call.v_cache.clone(), call.k, call.v, call.options)
    )
    found = assert_decode_matches(call, max_seqlen_q=len(call.q))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_weights_of_packed_sequences(device: str) -> None:
    call, bound = make_pack(lengths_of("many", device)[:7], device), 400
    o = call.options
    lse = run_library(call)["lse"]
    exact = flash_ext.attention_weights(call.q, call.k, lse, **o)
    loose = flash_ext.attention_weights(call.q, call.k, lse, **{**o, "max_seqlen_q": bound, "max_seqlen_k": bound})
    rows, columns = exact.shape[-2:]
    assert torch.equal(loose[..., :rows, :columns], exact)
    assert (loose[..., rows:, :] == 0).all() and (loose[..., columns:] == 0).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("wrong", ["random", "falling", "overlapping"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_that_make_no_sense(device: str, dtype: torch.dtype, wrong: str, deterministic: bool) -> None:
    """More tiles than a list has room for, or rows that several sequences have: wrong numbers, and an end."""
    if values_are_checked(device):
        pytest.skip("they raise")
    call = with_bound(make_pack(PACKS["many"], device, dtype, deterministic=deterministic), BOUNDS["absent"])
    before = run_library(call, ("q", "k", "v"))
    places, rows = len(PACKS["many"]) + 1, len(call.q)
    lengths = {
        "random": torch.randint(-(2**31), 2**31 - 1, (places,), device=device, dtype=torch.int32),
        "falling": torch.arange(places, 0, -1, device=device, dtype=torch.int32) * (rows // places),
        "overlapping": torch.arange(places, device=device, dtype=torch.int32) % 2 * rows,
    }[wrong]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        run_library(call.with_options(**{name: lengths}), ("q", "k", "v"))
    torch.cuda.synchronize()
    after = run_library(call, ("q", "k", "v"))
    assert torch.equal(after["out"], before["out"]) and torch.equal(after["lse"], before["lse"])


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_no_bound_is_refused(device: str, operation: str) -> None:
    call = make_pack(lengths_of("many", device), device)
    for bound in BOUNDS.values():
        options = with_bound(call, bound).options
        assert flash_ext.supports(call.q, call.k, call.v, operation=operation, **options) == (True, "")


@pytest.mark.op("attention_backward")
@pytest.mark.parametrize("dtype", dtypes_of("cuda"), ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_does_not_grow_with_the_bound(device: str, dtype: torch.dtype, deterministic: bool) -> None:
    if device == "cpu":
        pytest.skip("measured by torch's allocator of CUDA memory")
    call = make_pack([64] * 1000, device, dtype, deterministic=deterministic)
    rows = sum(t.nbytes for t in (call.q, call.k, call.v, call.grad_out) if t is not None)

    def peak(bound: Bound) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_library(with_bound(call, bound), ("q", "k", "v"))
        return torch.cuda.max_memory_allocated() - before

    exact = peak(lambda longest, total: longest)
    for bound in BOUNDS.values():
        assert peak(bound) <= exact + rows // 8


@pytest.mark.op("attention_backward")
@pytest.mark.parametrize("dtype", dtypes_of("cuda"), ids=str)
@pytest.mark.parametrize("lengths", [[64] * 2000, [4096, *[16] * 2000]], ids=["short", "one_long"])
def test_time_does_not_grow_with_the_bound(device: str, dtype: torch.dtype, lengths: list[int]) -> None:
    """A grid of the bound takes a hundred times as long. Of turns of some calls each, the fastest counts, which is one
    that nothing else on the GPU has slowed down. The list of tiles is the only price: up to 0.05 ms of a call."""
    if device == "cpu":
        pytest.skip("measured by CUDA events")
    call, calls = make_pack(lengths, device, dtype, head_dim=64, causal=True), 10
    exact: Bound = lambda longest, total: longest  # noqa: E731
    times: dict[str, list[float]] = {}
    for _ in range(8):
        for name, bound in {"exact": exact, **BOUNDS}.items():
            loose = with_bound(call, bound)
            torch.cuda._sleep(10_000_000)  # the device waits for the host, which then no longer shows in the time
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                run_library(loose, ("q", "k", "v"))
            end.record()
            end.synchronize()
            times.setdefault(name, []).append(start.elapsed_time(end) / calls)
    fastest = {name: min(found) for name, found in times.items()}
    for name in BOUNDS:
        assert fastest[name] < 1.3 * fastest["exact"] + 0.05, fastest
