"""Malformed input of decoding raises before anything is computed or written, and the message names the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.malformed import (
    NAN,
    Case,
    Change,
    assert_raises_naming,
    case,
    ids,
    int32,
    make_decode,
    not_last_contiguous,
    random,
    replaced,
    to_meta,
)
from tests.decode_oracle import Decode, paged


def operator_arguments(call: Decode) -> dict[str, Any]:
    new = {} if call.k is None else {"k": call.k, "v": call.v}
    new["max_seqlen_q"] = call.q.shape[1]
    return dict(q=call.q, k_cache=call.k_cache, v_cache=call.v_cache) | new | dict(call.options)


def decode_arguments() -> dict[str, Any]:
    return operator_arguments(make_decode(seqlen_q=2, cache_seqlens=int32([75, 9, 40])))


def append_arguments() -> dict[str, Any]:
    return operator_arguments(make_decode(seqlen_q=2, seqlen_new=2, cache_seqlens=int32([73, 0, 40])))


def rotary_arguments() -> dict[str, Any]:
    return append_arguments() | dict(rotary_cos=torch.rand(75, 8), rotary_sin=torch.rand(75, 8))


def paged_arguments() -> dict[str, Any]:
    return operator_arguments(paged(make_decode(seqlen_q=2, cache_seqlens=int32([75, 9, 40])), 16))


def run_decode(arguments: dict[str, Any]) -> Any:
    names = ("q", "k_cache", "v_cache", "k", "v")
    options = {name: value for name, value in arguments.items() if name not in names}
    return Decode(*(arguments.get(name) for name in names), options=options).run()


DECODE: list[Case] = [
    case("q", "integer", q=lambda t: t.int()),
    case("q", "three dimensions without cu_seqlens_q", q=lambda t: t[0]),
    case("q", "last dimension strided", q=not_last_contiguous),
    case("q", "heads do not divide", q=random(3, 2, 3, 32)),
    case("k_cache", "dtype", k_cache=lambda t: t.double()),
    case("k_cache", "dimensions", k_cache=lambda t: t[0]),
    case("k_cache", "head_dim", k_cache=lambda t: t[..., :16]),
    case("k_cache", "batch", k_cache=lambda t: t[:2], v_cache=lambda t: t[:2]),
    case("k_cache", "last dimension strided", k_cache=not_last_contiguous),
    case("k_cache", "on another device", k_cache=to_meta),
    case("v_cache", "dtype", v_cache=lambda t: t.half()),
    case("v_cache", "seqlen", v_cache=lambda t: t[:, :70]),
    case("v_cache", "heads", v_cache=lambda t: t[:, :, :1]),
    case("v_cache", "on another device", v_cache=to_meta),
    case("cache_seqlens", "dtype", cache_seqlens=lambda t: t.long()),
    case("cache_seqlens", "shape", cache_seqlens=int32([1, 2])),
    case("cache_seqlens", "too long", cache_seqlens=int32([76, 1, 1])),
    case("cache_seqlens", "negative", cache_seqlens=int32([-1, 1, 1])),
    case("cache_seqlens", "on another device", cache_seqlens=to_meta),
    case("cache_leftpad", "dtype", cache_leftpad=torch.tensor([0, 1, 2])),
    case("cache_leftpad", "shape", cache_leftpad=int32([0, 1])),
    case("cache_leftpad", "negative", cache_leftpad=int32([0, -1, 1])),
    case("cache_leftpad", "beyond the length", cache_leftpad=int32([0, 10, 1])),
    case("cache_batch_idx", "dtype", cache_batch_idx=torch.tensor([0, 1, 2])),
    case("cache_batch_idx", "shape", cache_batch_idx=int32([0, 1])),
    case("cache_batch_idx", "too large", cache_batch_idx=int32([0, 1, 3])),
    case("cache_batch_idx", "negative", cache_batch_idx=int32([0, -1, 2])),
    case("alibi_slopes", "heads", alibi_slopes=torch.rand(3)),
    case("sink", "heads", sink=torch.rand(3)),
    case("softmax_scale", "nan", softmax_scale=NAN),
    case("softcap", "negative", softcap=-1.0),
    case("softcap", "nan", softcap=NAN),
    case("window_left", "below -1", window_left=-2),
    case("window_right", "below -1", window_right=-2),
    case("num_splits", "negative", num_splits=-1),
    case("rotary_cos|rotary", "without new keys", rotary_cos=torch.rand(75, 8), rotary_sin=torch.rand(75, 8)),
    case("cu_seqlens_q", "decreasing", q=random(6, 4, 32), cu_seqlens_q=int32([0, 4, 3, 6])),
    case("cu_seqlens_q", "beyond the total", q=random(6, 4, 32), cu_seqlens_q=int32([0, 2, 4, 7])),
    case("cu_seqlens_q", "batch", q=random(6, 4, 32), cu_seqlens_q=int32([0, 2, 6])),
    case("cu_seqlens_q", "dtype", q=random(6, 4, 32), cu_seqlens_q=torch.tensor([0, 2, 4, 6])),
    case("cu_seqlens_q|q", "with four dimensions", cu_seqlens_q=int32([0, 2, 4, 6])),
    case("max_seqlen_q", "too small", q=random(6, 4, 32), cu_seqlens_q=int32([0, 2, 2, 6]), max_seqlen_q=3),
]


@pytest.mark.parametrize(("name", "wrong", "change"), DECODE, ids=ids(DECODE))
def test_decode(name: str, wrong: str, change: Change) -> None:
    arguments = decode_arguments()
    run_decode(arguments)
    assert_raises_naming(name, lambda: run_decode({**arguments, **change({"softcap": 0.0, **arguments})}))


PAGED: list[Case] = [
    case("block_table", "dtype", block_table=lambda t: t.long()),
    case("block_table", "dimensions", block_table=lambda t: t[0]),
    case("block_table", "batch", block_table=lambda t: t[:2]),
    case("block_table", "on another device", block_table=to_meta),
    case("block_table", "columns strided", block_table=lambda t: t.t().contiguous().t()),
    case("block_table", "page beyond the pool", block_table=replaced(4, 1000)),
    case("block_table", "negative page", block_table=replaced(0, -1)),
    case("cache_seqlens", "beyond the table", cache_seqlens=int32([81, 9, 40])),
    case("k_cache", "no pages", k_cache=lambda t: t[:0], v_cache=lambda t: t[:0]),
    case("cache_batch_idx", "with pages", cache_batch_idx=int32([0, 1, 2])),
]


@pytest.mark.parametrize(("name", "wrong", "change"), PAGED, ids=ids(PAGED))
def test_paged_decode(name: str, wrong: str, change: Change) -> None:
    arguments = paged_arguments()
    run_decode(arguments)
    assert_raises_naming(name, lambda: run_decode({**arguments, **change(arguments)}))


SHARED = torch.zeros(3, 80, 2, 32)  # memory for caches that overlap

APPEND: list[Case] = [
    case("k", "dtype", k=lambda t: t.double()),
    case("k", "batch", k=lambda t: t[:2], v=lambda t: t[:2]),
    case("k", "heads", k=lambda t: t[:, :, :1]),
    case("k", "head_dim", k=lambda t: t[..., :16]),
    case("k", "dimensions", k=lambda t: t[0]),
    case("k", "last dimension strided", k=not_last_contiguous),
    case("k", "on another device", k=to_meta),
    case("k", "more rows than the cache holds", k=random(3, 76, 2, 32), v=random(3, 76, 2, 32)),
    case("v", "seqlen", v=lambda t: t[:, :1]),
    case("v", "heads", v=lambda t: t[:, :, :1]),
    case("v", "head_dim", v=lambda t: t[..., :16]),
    case("v", "on another device", v=to_meta),
    case("cache_seqlens", "no room for the new keys", cache_seqlens=int32([74, 0, 0])),
    case("cache_seqlens", "negative", cache_seqlens=int32([0, -3, 0])),
    case("cache_batch_idx", "too large", cache_batch_idx=int32([0, 1, 3])),
    case("cache_batch_idx", "two sequences into one", cache_batch_idx=int32([0, 1, 1])),
    case("v_cache", "is k_cache", v_cache=SHARED[:, :75], k_cache=SHARED[:, :75]),
    case("v_cache", "overlaps k_cache", v_cache=SHARED[:, 4:79], k_cache=SHARED[:, :75]),
    case("v_cache", "overlaps k_cache from below", v_cache=SHARED[:, :75], k_cache=SHARED[:, 4:79]),
    case("v_cache", "other strides in one memory", k_cache=SHARED.flatten()[: 3 * 75 * 64].view(3, 75, 2, 32),
         v_cache=SHARED.flatten()[64 : 3 * 75 * 64 + 64].view(3, 2, 75, 32).transpose(1, 2)),
    case("softmax_scale", "nan", softmax_scale=NAN),
    case("window_left", "below -1", window_left=-5),
    case("sink", "heads", sink=torch.rand(5)),
]  # fmt: skip

ROTARY: list[Case] = [
    case("rotary_sin", "missing", rotary_sin=None),
    case("rotary_cos", "missing", rotary_cos=None),
    case("rotary_cos", "dtype", rotary_cos=lambda t: t.double()),
    case("rotary_sin", "dtype", rotary_sin=lambda t: t.half()),
    case("rotary_cos", "dimensions", rotary_cos=lambda t: t[0]),
    case("rotary_sin", "shape", rotary_sin=lambda t: t[:, :4]),
    case("rotary_cos", "wider than head_dim", rotary_cos=torch.rand(75, 17), rotary_sin=torch.rand(75, 17)),
    case("rotary_cos", "too few positions", rotary_cos=torch.rand(74, 8), rotary_sin=torch.rand(74, 8)),
    case("rotary_cos", "no positions", rotary_cos=torch.rand(0, 8), rotary_sin=torch.rand(0, 8)),
    case("rotary_cos", "on another device", rotary_cos=to_meta),
]


@pytest.mark.parametrize(("name", "wrong", "change"), APPEND + ROTARY, ids=ids(APPEND + ROTARY))
def test_append_raises_before_it_writes(name: str, wrong: str, change: Change) -> None:
    arguments = rotary_arguments() if (name, wrong, change) in ROTARY else append_arguments()
    good = {key: t.clone() if isinstance(t, Tensor) else t for key, t in arguments.items()}
    run_decode(good)
    before = arguments["k_cache"].clone(), arguments["v_cache"].clone()
    assert_raises_naming(name, lambda: run_decode({**arguments, **change(arguments)}))
    torch.testing.assert_close((arguments["k_cache"], arguments["v_cache"]), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lengths", [(3, 3), (3, 2), (14, 0)], ids=str)
def test_two_sequences_that_append_to_one_place(lengths: tuple[int, int]) -> None:
    """Sharing a page is fine as long as the rows that are written differ."""
    call = paged(make_decode(2, seqlen_new=3, seqlen_cache=32, cache_seqlens=int32(list(lengths))), 16)
    table = call.options["block_table"]
    table[1, 0] = table[0, (lengths[0] + 2) // 16]
    before = call.k_cache.clone()
    assert_raises_naming("block_table", call.run)
    torch.testing.assert_close(call.k_cache, before, rtol=0, atol=0, equal_nan=True)
    table[1, 0] = table[0, 0]
    call.options["cache_seqlens"] = int32([3, 6])
    call.run()
