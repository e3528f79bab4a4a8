"""dQ of packed sequences, in scratch memory that holds NaN or -1 before: all sums of dQ are zeroed before something is
added to them or read, also those of sequences and tiles that have nothing to add."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle import (
    Call,
    assert_kernel_on_hopper,
    assert_matches_oracle,
    explained_on_hopper,
    int32,
    make_varlen_call,
    run_library,
    values_are_checked,
)

OWN = {64: "sm90/backward_persistent", 128: "sm90/backward", 256: "sm90/backward_wide"}
HEADS = {64: 16, 128: 16, 256: 8}
# Lengths of queries and of keys. On a GPU these are more tiles than run at once.
PACKS: dict[str, tuple[list[int], list[int]]] = {
    "equal": ([256] * 40, [256] * 40),
    "mixed": ([17 * n % 311 for n in range(90)], [17 * n % 311 for n in range(90)]),
    "empty_sides": ([200, 0, 130, 77] * 25, [300, 260, 0, 129] * 25),
    "no_keys_at_the_end": ([256] * 60, [256] * 40 + [0] * 20),
    "one_long": ([64] * 40 + [4096] + [64] * 40, [64] * 40 + [4096] + [64] * 40),
    "more_than_a_chunk": ([3] * 4200 + [200] * 30, [5] * 4200 + [150] * 30),
    "many_keys": ([5] * 30, [900] * 30),
    "many_queries": ([900] * 60, [130] * 60),
}
SMALL = {name: (queries[:3] + queries[-2:], keys[:3] + keys[-2:]) for name, (queries, keys) in PACKS.items()}
SMALL["one_long"] = ([64, 300, 64], [64, 300, 64])
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "keys_of_nobody": {"window_size": (-1, 20), "top_left": True},
    "queries_of_nobody": {"window_size": (30, 0), "top_left": True},
}


def make_pack(name: str, device: str, head_dim: int, heads_kv: int | None = None, **options: Any) -> Call:
    queries, keys = (SMALL if device == "cpu" else PACKS)[name]
    heads = 2 if device == "cpu" else HEADS[head_dim]
    call = make_varlen_call(
        queries, keys, device, spare=9, heads_q=heads, heads_kv=heads // 2 if heads_kv is None else heads_kv,
        head_dim=head_dim, dtype=torch.bfloat16, **options,
    ).with_random_gradients()  # fmt: skip
    assert_kernel_on_hopper(call, OWN[head_dim], "backward")
    return call


def leave_in_memory(value: float, device: str) -> None:
    """What torch hands out next holds `value`, as a float or an int."""
    if device == "cuda":
        dtype = torch.int32 if value == -1 else torch.float32
        torch.full((2**28,), value, dtype=dtype, device=device)


def assert_dq_is_right(call: Call) -> None:
    """As in turns, which give the same bits whatever memory held."""
    if explained := explained_on_hopper(call, "backward"):
        assert explained.plan.schedule.head_splits == explained.plan.schedule.query_splits == 1
    want = run_library(call.with_options(deterministic=True), ("q", "k", "v"))
    loose = {"max_seqlen_q": None, "max_seqlen_k": None}
    for bounds in ({}, loose):
        for value in (torch.nan, -1):
            leave_in_memory(value, call.q.device.type)
            found = run_library(call.with_options(deterministic=False, **bounds), ("q", "k", "v"))
            for name in ("dq", "dk", "dv"):
                torch.testing.assert_close(found[name], want[name], rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("head_dim", OWN)
def test_lengths(device: str, head_dim: int, pack: str, mask: dict[str, Any]) -> None:
    assert_dq_is_right(make_pack(pack, device, head_dim, **mask))


@pytest.mark.parametrize("bounds", [{}, {"max_seqlen_q": None, "max_seqlen_k": None}], ids=["tight", "none"])
@pytest.mark.parametrize("pack", ["equal", "empty_sides"])
@pytest.mark.parametrize("head_dim", OWN)
def test_oracle(device: str, head_dim: int, pack: str, bounds: dict[str, Any]) -> None:
    call = make_pack(pack, device, head_dim, causal=True).with_options(**bounds)
    leave_in_memory(torch.nan, device)
    assert_matches_oracle(call, ("q", "k", "v"))


@pytest.mark.parametrize("heads_kv", [1, "all"])
@pytest.mark.parametrize("head_dim", OWN)
def test_groups(device: str, head_dim: int, heads_kv: int | str) -> None:
    heads = 2 if device == "cpu" else HEADS[head_dim]
    name = "mixed" if heads_kv == "all" else "more_than_a_chunk"
    assert_dq_is_right(make_pack(name, device, head_dim, heads if heads_kv == "all" else 1))


@pytest.mark.parametrize("option", ["softcap", "alibi_slopes", "key_mask"])
@pytest.mark.parametrize("head_dim", OWN)
def test_options(device: str, head_dim: int, option: str) -> None:
    call = make_pack("equal", device, head_dim)
    heads, batch = call.q.shape[1], len(call.options["cu_seqlens_q"]) - 1
    seen = torch.rand(batch, 1, 1, 256, device=device) < 0.7
    seen[1::3] = False  # key tiles without steps
    options: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 3.0},
        "alibi_slopes": {"alibi_slopes": torch.rand(heads, device=device)},
        "key_mask": {"mask": seen},
    }
    assert_matches_oracle(call.with_options(**options[option]), ("q", "k", "v"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", OWN)
def test_lengths_in_use(device: str, head_dim: int, packed: bool) -> None:
    call = make_pack("equal", device, head_dim)
    if not packed:
        batch = len(call.options["cu_seqlens_q"]) - 1
        for name in "qkv":
            setattr(call, name, getattr(call, name)[: batch * 256].unflatten(0, (batch, 256)))
        for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
            del call.options[name]
        call = call.with_random_gradients()
    batch = len(call.options["cu_seqlens_q"]) - 1 if packed else call.q.shape[0]
    used = {
        "seqused_q": int32([n * 67 % 257 for n in range(batch)], device),
        "seqused_k": int32([n * 31 % 257 if n % 4 else 0 for n in range(batch)], device),
    }
    leave_in_memory(torch.nan, device)
    assert_matches_oracle(call.with_options(**used), ("q", "k", "v"))


@pytest.mark.skipif(not torch.cuda.is_available() or values_are_checked("cuda"), reason="a GPU checks no values")
@pytest.mark.parametrize("bounds", [{}, {"max_seqlen_q": None, "max_seqlen_k": None}], ids=["tight", "none"])
@pytest.mark.parametrize("head_dim", OWN)
def test_lengths_that_make_no_sense_end(head_dim: int, bounds: dict[str, Any]) -> None:
    """They give wrong numbers, but no CTA waits for ever."""
    call = make_pack("equal", "cuda", head_dim).with_options(**bounds)
    batch, rows = len(call.options["cu_seqlens_q"]) - 1, call.q.shape[0]
    for wrong in ([n % 2 * rows for n in range(batch + 1)], [rows - 256 * n for n in range(batch + 1)],
                  [n * 977 % rows for n in range(batch + 1)]):  # fmt: skip
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            leave_in_memory(-1, "cuda")
            run_library(call.with_options(**{name: int32(wrong, "cuda")}), ("q", "k", "v"))
    torch.cuda.synchronize()
