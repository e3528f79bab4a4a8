"""The backward at the ends of sequences: tiles of which few queries see the keys, and rows of dK and dV behind the last
key of a tile. On a CPU these are problems like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle import Call, assert_matches_oracle, int32, make_call, make_varlen_call, random_rng, run_library

QKV = ("q", "k", "v")
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (70, 40)},
    "left": {"window_size": (45, -1)},
    "top_left": {"causal": True, "top_left": True},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("seqlen_q", [1, 33, 64, 96, 97, 128, 161, 288, 320])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2)], ids=str)
def test_queries_of_the_last_tile(device: str, heads: tuple[int, int], seqlen_q: int, mask: dict[str, Any]) -> None:
    """Tiles of 96 queries at head_dim 64: 32 or 64 of the last one may be computed, for each head of a group."""
    dtype = torch.float16 if seqlen_q in (97, 128) else torch.bfloat16
    call = make_call(2, seqlen_q, 300, *heads, 64, dtype=dtype, device=device, deterministic=False, **mask)
    assert_matches_oracle(call, QKV)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(288, 448), (320, 512), (416, 700)])
@pytest.mark.parametrize("right", [0, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_keys_of_nobody_beside_a_last_tile(
    device: str, dtype: torch.dtype, right: int, seqlen_q: int, seqlen_k: int
) -> None:
    """Half of a tile of keys may be seen by no query at all, while 32 or 64 queries see the other half."""
    call = make_call(2, seqlen_q, seqlen_k, 4, 2, 64, dtype=dtype, device=device, deterministic=False)
    assert_matches_oracle(call.with_options(window_size=(-1, right), top_left=True), QKV)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("length", [97, 130, 200])
def test_packed_last_tiles(device: str, length: int, mask: dict[str, Any]) -> None:
    """Behind the last query of a sequence lie those of the next one, to which nothing may be added."""
    lengths = [length, length + 40, 1, length + 7]
    call = make_varlen_call(lengths, lengths[::-1], device, head_dim=64, dtype=torch.bfloat16, **mask)
    assert_matches_oracle(call.with_options(deterministic=False), QKV)


def many_heads(device: str, heads_kv: int, *sizes: Any, **options: Any) -> Call:
    """On a GPU more tiles of keys than run at a time."""
    batch = 2 if device == "cpu" else 320 // heads_kv
    return make_call(batch, *sizes, device=device, deterministic=False, **options)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (300, 130), (130, 400), (192, 256)])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
def test_many_heads(device: str, heads: tuple[int, int], seqlen_q: int, seqlen_k: int, mask: dict[str, Any]) -> None:
    dtype = torch.float16 if seqlen_q == 192 else torch.bfloat16
    assert_matches_oracle(many_heads(device, heads[1], seqlen_q, seqlen_k, *heads, 128, dtype=dtype, **mask), QKV)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 72), (96, 128), (128, 40)])
def test_many_heads_of_other_head_dims(device: str, head_dim: int, head_dim_v: int) -> None:
    call = many_heads(device, 4, 200, 190, 4, 4, head_dim, head_dim_v, dtype=torch.bfloat16, causal=True)
    assert_matches_oracle(call, QKV)


def test_many_heads_of_unequal_lengths(device: str) -> None:
    call = many_heads(device, 4, 300, 290, 4, 4, 128, dtype=torch.bfloat16)
    repeats = call.q.shape[0] // 2
    used = {"seqused_q": int32([300, 65] * repeats, device), "seqused_k": int32([290, 150] * repeats, device)}
    assert_matches_oracle(call.with_options(**used), QKV)


@pytest.mark.parametrize("option", ["alibi_slopes", "softcap", "dropout", "mask", "key_mask"])
def test_many_heads_with_options(device: str, option: str) -> None:
    """A mask of pairs leaves some tiles of keys without steps."""
    keys = torch.arange(260, device=device)
    options: dict[str, Any] = {
        "alibi_slopes": {"alibi_slopes": torch.rand(4, device=device)},
        "softcap": {"softcap": 3.0},
        "dropout": {"dropout_p": 0.2, "rng_state": random_rng(device)},
        "mask": {"mask": (keys <= torch.arange(200, device=device)[:, None] // 2)[None, None]},
        "key_mask": {"mask": (keys < 140)[None, None, None]},
    }[option]
    assert_matches_oracle(many_heads(device, 4, 200, 260, 4, 4, 128, dtype=torch.bfloat16, **options), QKV)


def test_many_heads_again(device: str) -> None:
    """Calls that follow each other share scratch memory."""
    call = many_heads(device, 8, 256, 256, 8, 8, 128, dtype=torch.bfloat16, causal=True)
    first = run_library(call, QKV)
    for _ in range(5):
        again = run_library(call, QKV)
        assert torch.equal(again["dk"], first["dk"]) and torch.equal(again["dv"], first["dv"])
        torch.testing.assert_close(again["dq"], first["dq"], rtol=2**-6, atol=2**-6)
