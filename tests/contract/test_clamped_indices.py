"""Lengths and indices on a GPU are clamped to what the tensors hold: a wrong one gives what the nearest right one does.

On a CPU, and with FLASH_EXT_CHECK=1, they raise (test_malformed.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.decode_oracle import Decode, fill_unused_rows, make_decode, packed_queries, paged
from tests.oracle import int32, make_call, run_library, values_are_checked

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or values_are_checked("cuda"), reason="needs a GPU, whose values are not checked"
)

LOWEST, HIGHEST = -(2**31), 2**31 - 1
ROWS_Q, ROWS_K, BATCH = 150, 210, 3

# (wrong, the nearest right ones)
PACKED: dict[str, list[tuple[list[int], list[int]]]] = {
    "cu_seqlens_q": [
        ([0, 40, 100, 100_000], [0, 40, 100, ROWS_Q]),
        ([0, 40, HIGHEST, HIGHEST], [0, 40, ROWS_Q, ROWS_Q]),
        ([LOWEST, 40, 100, 150], [0, 40, 100, 150]),
    ],
    "cu_seqlens_k": [
        ([0, 70, 130, 100_000], [0, 70, 130, ROWS_K]),
        ([0, 70, HIGHEST, HIGHEST], [0, 70, ROWS_K, ROWS_K]),
        ([-9, 70, 130, 210], [0, 70, 130, 210]),
    ],
    "seqused_q": [([-1, 1000, LOWEST], [0, 60, 0]), ([HIGHEST, 5, 50], [40, 5, 50])],
    "seqused_k": [([-1, 1000, LOWEST], [0, 60, 0]), ([HIGHEST, 5, 80], [70, 5, 80])],
}
CASES = [(name, *pair) for name, pairs in PACKED.items() for pair in pairs]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("name", "wrong", "right"), CASES)
def test_packed_sequences(
    name: str, wrong: list[int], right: list[int], deterministic: bool, dtype: torch.dtype
) -> None:
    call = make_call(
        seqlen_q=ROWS_Q, seqlen_k=ROWS_K, head_dim=64, dtype=dtype, device="cuda", max_seqlen_q=ROWS_Q,
        max_seqlen_k=ROWS_K, cu_seqlens_q=int32([0, 40, 100, 150], "cuda"),
        cu_seqlens_k=int32([0, 70, 130, 210], "cuda"),
        deterministic=deterministic,
    ).with_random_gradients()  # fmt: skip
    results = [
        run_library(call.with_options(**{name: int32(values, "cuda")}), ("q", "k", "v")) for values in (wrong, right)
    ]
    for key in results[0]:
        torch.testing.assert_close(results[0][key], results[1][key], rtol=1e-2, atol=1e-2)
    assert torch.equal(results[0]["out"], results[1]["out"])


@pytest.mark.op("attention_weights")
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("name", "wrong", "right"), CASES)
def test_weights_of_packed_sequences(
    name: str, wrong: list[int], right: list[int], signed: bool, dtype: torch.dtype
) -> None:
    """And their gradients."""
    call = make_call(
        seqlen_q=ROWS_Q, seqlen_k=ROWS_K, head_dim=64, dtype=dtype, device="cuda", max_seqlen_q=ROWS_Q,
        max_seqlen_k=ROWS_K, cu_seqlens_q=int32([0, 40, 100, 150], "cuda"),
        cu_seqlens_k=int32([0, 70, 130, 210], "cuda"),
    )  # fmt: skip
    lse = torch.full((call.q.shape[1], ROWS_Q), 3.0, device="cuda")
    leaves = [t.requires_grad_() for t in (call.q, call.k, lse)]
    results = []
    for values in (wrong, right):
        options = {**call.options, name: int32(values, "cuda")}
        weights = flash_ext.attention_weights(*leaves, signed=signed, **options)
        results.append((weights, *torch.autograd.grad(weights.float().square().sum(), leaves)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-2, atol=1e-2)
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.op("attention_weights")
@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_weights_of_dense_sequences(name: str, dtype: torch.dtype) -> None:
    call = make_call(BATCH, 90, 90, head_dim=64, dtype=dtype, device="cuda")
    leaves = [t.requires_grad_() for t in (call.q, call.k, torch.full((BATCH, 4, 90), 3.0, device="cuda"))]
    results = []
    for values in ([-3, HIGHEST, 91], [0, 90, 90]):
        weights = flash_ext.attention_weights(*leaves, **{name: int32(values, "cuda")})
        results.append((weights, *torch.autograd.grad(weights.float().square().sum(), leaves)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-2, atol=1e-2)
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_lengths_of_dense_sequences(name: str, dtype: torch.dtype) -> None:
    call = make_call(BATCH, 90, 90, head_dim=64, dtype=dtype, device="cuda", deterministic=True)
    call = call.with_random_gradients()
    wrong, right = ([-3, HIGHEST, 91], [0, 90, 90])
    results = [
        run_library(call.with_options(**{name: int32(values, "cuda")}), ("q", "k", "v")) for values in (wrong, right)
    ]
    for key in results[0]:
        assert torch.equal(results[0][key], results[1][key]), key


CACHED: dict[str, tuple[list[int], list[int]]] = {
    "cache_seqlens": ([-7, HIGHEST, 20], [0, 75, 20]),
    "cache_leftpad": ([-7, HIGHEST, 5], [0, 40, 5]),
    "cache_batch_idx": ([-7, HIGHEST, 1], [0, 2, 1]),
}


@pytest.mark.op("attention_decode")
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("name", CACHED)
def test_caches(name: str, num_splits: int, dtype: torch.dtype) -> None:
    call = make_decode(BATCH, 2, 75, dtype=dtype, device="cuda", cache_seqlens=int32([75, 40, 20], "cuda"))
    call.k_cache.nan_to_num_(0.5), call.v_cache.nan_to_num_(0.5)
    wrong, right = (call.run(num_splits=num_splits, **{name: int32(values, "cuda")}) for values in CACHED[name])
    assert all(torch.equal(got, want) for got, want in zip(wrong, right, strict=True))


APPENDED: dict[str, tuple[list[int], list[int]]] = {
    "cache_leftpad": ([-7, HIGHEST, 5], [0, 42, 5]),  # of the lengths behind the append
    "cache_batch_idx": ([-7, HIGHEST, 1], [0, 2, 1]),
}


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("name", APPENDED)
def test_caches_that_are_appended_to(name: str, num_splits: int, dtype: torch.dtype) -> None:
    call = make_decode(
        BATCH, 2, 75, seqlen_new=2, dtype=dtype, device="cuda", cache_seqlens=int32([73, 40, 20], "cuda"),
    )  # fmt: skip
    call.k_cache.nan_to_num_(0.5), call.v_cache.nan_to_num_(0.5)
    wrong, right = (
        run_on_copies(call, num_splits=num_splits, **{name: int32(values, "cuda")}) for values in APPENDED[name]
    )
    assert all(torch.equal(got, want) for got, want in zip(wrong, right, strict=True))


def run_on_copies(call: Decode, **options: Any) -> tuple[Tensor, ...]:
    """out, lse and, where there are new keys, the caches behind the append."""
    one = Decode(call.q, call.k_cache.clone(), call.v_cache.clone(), call.k, call.v, dict(call.options))
    return (*one.run(**options), one.k_cache, one.v_cache)


PACKED_QUERIES = [
    ([0, 3, 5, 100_000], [0, 3, 5, 9]),
    ([0, 3, HIGHEST, HIGHEST], [0, 3, 9, 9]),
    ([LOWEST, 3, 5, 9], [0, 3, 5, 9]),
]


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("seqlen_new", [0, 2])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("wrong", "right"), PACKED_QUERIES)
def test_packed_queries(
    wrong: list[int], right: list[int], num_splits: int, page_size: int, seqlen_new: int, dtype: torch.dtype
) -> None:
    lengths = int32([73, 40, 20], "cuda")
    call = make_decode(BATCH, 2, 75, seqlen_new=seqlen_new, dtype=dtype, device="cuda", cache_seqlens=lengths)
    call.k_cache.nan_to_num_(0.5), call.v_cache.nan_to_num_(0.5)
    call = packed_queries(paged(call, page_size) if page_size else call, [3, 2, 4])
    found, expected = (
        run_on_copies(call, num_splits=num_splits, max_seqlen_q=9, cu_seqlens_q=int32(values, "cuda"))
        for values in (wrong, right)
    )
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.op("attention_decode")
@pytest.mark.parametrize(
    ("seqlen_q", "heads_q", "num_splits"), [(2, 4, 1), (2, 4, 3), (200, 36, 1)], ids=["one", "splits", "prompt"]
)
def test_pages(seqlen_q: int, heads_q: int, num_splits: int, dtype: torch.dtype) -> None:
    call = paged(make_decode(BATCH, seqlen_q, 75, heads_q, dtype=dtype, device="cuda"), 16)
    call.k_cache.nan_to_num_(0.5), call.v_cache.nan_to_num_(0.5)
    table = call.options["block_table"].clone()
    wrong, right = table.clone(), table.clone()
    wrong[0, 1], wrong[1, 0], wrong[2, 4] = LOWEST, HIGHEST, len(call.k_cache)
    right[0, 1], right[1, 0], right[2, 4] = 0, len(call.k_cache) - 1, len(call.k_cache) - 1
    found, expected = (call.run(num_splits=num_splits, block_table=t) for t in (wrong, right))
    assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


def inside_of_an_arena(t: Tensor) -> tuple[Tensor, Tensor]:
    """(arena, the same tensor in its middle)."""
    arena = torch.full((3 * t.numel(),), 7.0, dtype=t.dtype, device=t.device)
    place = arena[t.numel() : 2 * t.numel()].view(t.shape)
    place.copy_(t)
    return arena, place


def wild_lengths(call: Decode) -> dict[str, Any]:
    return {"cache_seqlens": int32([LOWEST, HIGHEST, 74], "cuda")}


def wild_entries(call: Decode) -> dict[str, Any]:
    return {"cache_batch_idx": int32([LOWEST, HIGHEST, 1], "cuda")}


def wild_leftpad(call: Decode) -> dict[str, Any]:
    return {"cache_leftpad": int32([LOWEST, HIGHEST, 75], "cuda")}


def wild_packing(call: Decode) -> dict[str, Any]:
    """The queries of each sequence, where these are packed; new rows do not depend on them."""
    call.q = call.q.flatten(0, 1)
    return {"cu_seqlens_q": int32([LOWEST, HIGHEST, -3, HIGHEST], "cuda"), "max_seqlen_q": len(call.q)}


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("wild", [wild_lengths, wild_entries, wild_leftpad, wild_packing])
def test_appended_rows_stay_in_the_caches(wild: Callable[[Decode], dict[str, Any]], dtype: torch.dtype) -> None:
    call = make_decode(BATCH, 1, 75, seqlen_new=2, dtype=dtype, device="cuda", cache_seqlens=int32([7, 0, 73], "cuda"))
    k_arena, call.k_cache = inside_of_an_arena(call.k_cache)
    v_arena, call.v_cache = inside_of_an_arena(call.v_cache)
    call.run(**wild(call))
    for arena in (k_arena, v_arena):
        third = arena.numel() // 3
        assert (arena[:third] == 7).all() and (arena[2 * third :] == 7).all()


@pytest.mark.op("attention_decode_append")
def test_appended_rows_stay_in_the_pages(dtype: torch.dtype) -> None:
    call = make_decode(BATCH, 1, 75, seqlen_new=2, dtype=dtype, device="cuda", cache_seqlens=int32([7, 0, 73], "cuda"))
    call = paged(call, 16)
    k_arena, call.k_cache = inside_of_an_arena(call.k_cache)
    v_arena, call.v_cache = inside_of_an_arena(call.v_cache)
    table = torch.randint(LOWEST, HIGHEST, call.options["block_table"].shape, dtype=torch.int32, device="cuda")
    call.run(block_table=table, **wild_lengths(call))
    for arena in (k_arena, v_arena):
        third = arena.numel() // 3
        assert (arena[:third] == 7).all() and (arena[2 * third :] == 7).all()


@pytest.mark.op("attention_decode_append")
def test_rotary_tables_that_are_too_short(dtype: torch.dtype) -> None:
    """Later positions are rotated by the last row."""
    call = make_decode(BATCH, 3, 75, seqlen_new=2, dtype=dtype, device="cuda", window_right=0)
    call.options["cache_seqlens"] = int32([70, 3, 40], "cuda")
    fill_unused_rows(call, 0.5)
    angles = torch.rand(50, 8, device="cuda")
    longer = torch.cat([angles, angles[-1:].expand(40, -1)])
    results = []
    for table in (angles, longer):
        caches = call.k_cache.clone(), call.v_cache.clone()
        one = Decode(call.q, *caches, call.k, call.v, dict(call.options))
        rotary: dict[str, Any] = {"rotary_cos": table.cos().to(dtype), "rotary_sin": table.sin().to(dtype)}
        results.append((*one.run(**rotary), *caches))
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [(64, 64), (128, 128), (48, 96)], ids=str)
@pytest.mark.parametrize("part", ["offsets", "indices", "bitmap_ids"])
def test_lists_of_block_masks(
    device: str, part: str, block_size: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    """They may show anything, and leave the next call alone."""
    if values_are_checked(device):
        pytest.skip("values are checked")
    call = make_call(2, 200, 200, head_dim=head_dim, dtype=dtype, device=device).with_random_gradients()
    mask = flash_ext.BlockMask.sliding_window(200, 200, (70, 5), block_size=block_size, device="cuda")
    before = run_library(call.with_options(block_mask=mask))["out"]
    for low, high in ((LOWEST, HIGHEST), (-5, 5), (0, 10_000)):
        wild = torch.randint(low, high, getattr(mask, part).shape, dtype=torch.int32, device="cuda")
        tensors = {name: getattr(mask, name) for name in ("offsets", "indices", "bitmap_ids", "bitmaps")} | {part: wild}
        wrong = flash_ext.BlockMask(**tensors, seqlen_q=200, seqlen_k=200)
        run_library(call.with_options(block_mask=wrong), ("q", "k", "v"))
        torch.cuda.synchronize()
    assert torch.equal(run_library(call.with_options(block_mask=mask))["out"], before)
