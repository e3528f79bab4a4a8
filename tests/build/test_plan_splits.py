"""The planner: into how many splits, chunks and tiles a call is cut, and which heads share a tile."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from flash_ext import _plan, planning
from tests.build.plans import plan
from tests.decode.test_prompts import MANY_KEYS, PAGE_SIZES

ITEMS, WORKERS, KEYS = (0, 1, 2, 7, 64, 1000), (1, 2, 16, 132), (0, 1, 255, 256, 511, 4096, 2**20)


def test_splits_are_capped() -> None:
    for items, workers, keys in itertools.product(ITEMS, WORKERS, KEYS):
        splits = _plan.choose_num_splits(items, workers, keys)
        assert 1 <= splits <= _plan.CPU_MAX_SPLITS
        assert splits == 1 or keys // splits >= _plan.CPU_MIN_SPLIT_SIZE
        assert splits == 1 or max(items, 1) < workers, "enough work needs no splitting"


def test_splits_fill_the_workers_where_the_keys_suffice() -> None:
    for items in range(1, 200):
        assert items * _plan.choose_num_splits(items, 132, 2**20) >= min(132, items * _plan.CPU_MAX_SPLITS)


def test_splits_are_monotonic() -> None:
    for workers in WORKERS:
        for items in ITEMS:
            over_keys = [_plan.choose_num_splits(items, workers, keys) for keys in KEYS]
            assert over_keys == sorted(over_keys)
        for keys in KEYS:
            over_items = [_plan.choose_num_splits(items, workers, keys) for items in ITEMS]
            assert over_items == sorted(over_items, reverse=True)
    for items in ITEMS:
        for keys in KEYS:
            over_workers = [_plan.choose_num_splits(items, workers, keys) for workers in WORKERS]
            assert over_workers == sorted(over_workers)


def decode_plan(**fields: Any) -> _plan.Plan:
    return plan(**{"operation": "decode", "seqlen_k": 8192, "num_workers": 16, "num_splits": 0, **fields})


def test_decoding_splits_a_long_cache_of_few_heads() -> None:
    found = decode_plan()
    assert found.num_splits == 16 and found.split_size == 0
    assert any("16 splits: 1 tile" in reason for reason in found.reasons)
    assert any("1 split: 64 tiles" in reason for reason in decode_plan(batch=64).reasons)
    assert decode_plan(batch=64).num_splits == 1
    assert decode_plan(seqlen_k=100).num_splits == 1


def test_splits_do_not_depend_on_the_number_of_threads() -> None:
    assert {decode_plan(num_workers=n).num_splits for n in (1, 2, 8, 64)} == {16}


def test_a_number_of_splits_is_obeyed_up_to_one_tile_each() -> None:
    assert decode_plan(num_splits=1).num_splits == 1
    assert decode_plan(num_splits=5).num_splits == 5
    few = decode_plan(num_splits=50, seqlen_k=100)
    assert few.num_splits == math.ceil(100 / few.block_n)
    assert decode_plan(num_splits=10**9).num_splits == _plan.CPU_MAX_SPLITS
    assert decode_plan(num_splits=7, seqlen_k=0).num_splits == 1


@pytest.mark.parametrize("batch", [1, 2, 64])
@pytest.mark.parametrize("num_workers", [1, 2, 132])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_batch_invariant_splits_depend_on_nothing_else(batch: int, num_workers: int, num_splits: int) -> None:
    found = decode_plan(batch=batch, num_workers=num_workers, num_splits=num_splits, batch_invariant=True)
    assert found.split_size == _plan.BATCH_INVARIANT_SPLIT_SIZE
    assert found.num_splits == math.ceil(8192 / found.split_size)
    assert (found.block_m, found.block_n) == (32, 64)


def cuda_decode_plan(**fields: Any) -> _plan.Plan:
    h200 = {"device": "cuda", "compute_capability": 90, "num_workers": 132, "dtype": "bfloat16"}
    heads = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128}
    return decode_plan(**{**h200, **heads, **fields})


def test_cuda_decoding_gives_every_sm_work() -> None:
    for batch, seqlen_k in itertools.product((1, 2, 5, 16, 100), (16384, 65536, 2**20)):
        blocks = 8 * batch * cuda_decode_plan(batch=batch, seqlen_k=seqlen_k).num_splits
        assert blocks >= 0.9 * 132, (batch, seqlen_k)


def test_short_caches_are_one_launch_on_cuda() -> None:
    for seqlen_k in (0, 1, 64, 128, 200):
        assert cuda_decode_plan(seqlen_k=seqlen_k).num_splits == 1
    assert cuda_decode_plan(seqlen_k=2**20, window_left=100, window_right=0).num_splits == 1


def test_sequences_of_different_lengths_are_cut_on_cuda() -> None:
    assert (
        cuda_decode_plan(batch=64, seqlen_k=65536).num_splits
        < cuda_decode_plan(batch=64, seqlen_k=65536, varlen=True).num_splits
    )


def test_chunks_of_prompts_run_as_a_forward_on_cuda() -> None:
    assert cuda_decode_plan(seqlen_q=127).kernel == "sm80/decode"
    found = cuda_decode_plan(seqlen_q=128)
    assert (found.kernel, found.head_group, found.num_splits) == ("sm90/forward", 1, 1)
    for fields in ({"batch_invariant": True}, {"num_splits": 2}):
        told = cuda_decode_plan(seqlen_q=1024, **fields)
        assert told.kernel == "sm80/decode"
        assert any("num_splits > 1 or batch_invariant" in reason for reason in told.reasons)
        assert not any("so few queries" in reason for reason in told.reasons)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float32"},
        {"softcap": 30.0},
        {"has_alibi": True},
        {"softmax_scale": -1.0},
        {"broadcast": True},
        {"paged": True, "page_size": 12},
        {"paged": True, "page_size": 16, "has_leftpad": True},
        {"own_kernels": False},
        {"compute_capability": 80},
    ],
    ids=str,
)
def test_chunks_of_prompts_that_hopper_leaves_to_the_kernels_for_all_gpus(fields: dict[str, Any]) -> None:
    """Those need a tile of 128 queries for each SM, because they do not split the keys."""
    found = cuda_decode_plan(seqlen_q=1024, **fields)
    assert (found.kernel, found.head_group, found.num_splits) == ("sm80/forward", 1, 1)
    assert cuda_decode_plan(seqlen_q=128, **fields).kernel == "sm80/decode"


def test_chunks_of_prompts_over_a_cache_on_hopper() -> None:
    """Few query tiles share their keys among CTAs."""
    for fields in ({}, {"has_leftpad": True}, {"paged": True, "page_size": 8}, {"paged": True, "page_size": 256}):
        found = cuda_decode_plan(seqlen_q=512, seqlen_k=32768, varlen=True, **fields)
        assert found.kernel == "sm90/forward"
        assert found.variant == "a cache, contiguous or paged"
        assert found.key_splits.tiles > 0
    assert cuda_decode_plan(seqlen_q=512, num_splits=1).key_splits.tiles == 0
    assert cuda_decode_plan(seqlen_q=512, total_q=1024, varlen=True, batch=2).key_splits.tiles == 0


@pytest.mark.parametrize("paged", [{}, {"paged": True, "page_size": 16}], ids=["contiguous", "paged"])
def test_tiles_of_long_caches_have_as_many_keys_as_those_of_tensors(paged: dict[str, Any]) -> None:
    for head_dim, long_cache in ((64, 64), (96, 80), (128, 80), (256, 80)):
        fields = {"head_dim": head_dim, "head_dim_v": head_dim, "seqlen_q": 512, "varlen": True, **paged}
        assert cuda_decode_plan(seqlen_k=32768, **fields).block_n == long_cache, head_dim
        assert cuda_decode_plan(seqlen_k=512, **fields).block_n == 64, head_dim


def test_the_prompts_that_are_tested_have_wide_tiles_with_any_pages() -> None:
    sizes = {"batch": 4, "heads_q": 6, "heads_kv": 2, "seqlen_q": 150, "varlen": True, "window_right": 0}
    for head_dim, page_size in itertools.product((128, 256), PAGE_SIZES):
        fields = {**sizes, "head_dim": head_dim, "head_dim_v": head_dim, "seqlen_k": MANY_KEYS}
        if page_size is not None:
            fields |= {"paged": True, "page_size": page_size, "seqlen_k": -(-MANY_KEYS // page_size) * page_size}
        assert cuda_decode_plan(**fields).block_n == 80, (head_dim, page_size)


def test_pages_fill_tiles_by_copies_of_their_common_rows() -> None:
    for page_size, in_long_cache, in_short_cache in (
        (8, 8, 8),
        (16, 16, 16),
        (24, 8, 8),
        (64, 16, 64),
        (96, 16, 32),
        (256, 16, 64),
    ):
        for seqlen_k, rows in ((32768, in_long_cache), (512, in_short_cache)):
            found = cuda_decode_plan(seqlen_q=512, seqlen_k=seqlen_k, paged=True, page_size=page_size)
            assert f"pages of {page_size} rows: TMA copies {rows} at a time" in found.reasons


def test_few_packed_chunks_of_prompts_on_hopper() -> None:
    """The list of packed queries has no splits: the kernel that splits keys is faster."""
    packed = {"seqlen_q": 512, "varlen": True, "paged": True, "page_size": 16}
    assert cuda_decode_plan(batch=1, total_q=512, **packed).kernel == "sm80/decode"
    assert cuda_decode_plan(batch=4, total_q=2048, **packed).kernel == "sm90/forward"


def test_tiles_of_cuda_decoding() -> None:
    assert cuda_decode_plan().block_m == cuda_decode_plan(seqlen_q=4).block_m == 16
    assert cuda_decode_plan(seqlen_q=5).block_m == cuda_decode_plan(seqlen_q=100).block_m == 64
    assert {cuda_decode_plan(seqlen_q=n, batch_invariant=True).block_m for n in (1, 5, 500)} == {16}
    assert cuda_decode_plan(seqlen_q=100, dtype="float32").block_m == 16


@pytest.mark.parametrize(
    ("batch", "fewest"),
    [(1, 64), (3, 64), (4, 256), (15, 256), (16, 1024), (100, 1024)],  # 8 tiles each
)
def test_short_sequences_are_split_less_where_there_are_many(batch: int, fewest: int) -> None:
    found = cuda_decode_plan(batch=batch, seqlen_k=65536, varlen=True)
    assert found.num_splits > 1 and (found.min_split_size, found.split_size) == (fewest, 0)
    said = f"a split has {fewest} keys at least, with {8 * batch} tiles: short sequences have fewer splits"
    assert said in found.reasons
    told = cuda_decode_plan(batch=batch, num_splits=4)
    assert (told.num_splits, told.min_split_size) == (4, fewest)
    whole = cuda_decode_plan(batch=batch, num_splits=1)
    assert whole.min_split_size == 0 and not any("keys at least" in reason for reason in whole.reasons)


def test_packed_sequences_are_split_by_their_mean_length() -> None:
    def fewest(longest: int) -> int:
        lengths = {"seqlen_q": longest, "total_q": 4 * 4, "varlen": True}
        return cuda_decode_plan(batch=4, seqlen_k=65536, **lengths).min_split_size

    assert {fewest(longest) for longest in (4, 60, 120)} == {256}


@pytest.mark.parametrize(
    ("batch", "ctas"),
    [(1, 128), (2, 128), (4, 64), (100, 2), (1000, 1)],  # 2048 among 8 tiles each, of 128 splits
)
def test_splits_of_a_fixed_size_share_ctas(batch: int, ctas: int) -> None:
    found = cuda_decode_plan(batch=batch, seqlen_k=65536, batch_invariant=True)
    assert (found.num_splits, found.split_ctas, found.min_split_size) == (128, ctas, 0)
    assert any(reason.startswith(f"{ctas} CTA") for reason in found.reasons)
    assert cuda_decode_plan(batch=batch, seqlen_k=65536).split_ctas == 0


def test_a_cpu_knows_no_ctas() -> None:
    for fields in ({"num_splits": 4}, {"batch_invariant": True}):
        found = decode_plan(seqlen_k=65536, **fields)
        assert (found.min_split_size, found.split_ctas, found.section_heads) == (0, 0, 0)


@pytest.mark.parametrize("operation", ["forward", "backward", "weights", "weights_backward"])
def test_only_decoding_splits(operation: str) -> None:
    found = plan(operation=operation, seqlen_k=2**20, num_workers=64)
    assert (found.num_splits, found.split_size) == (1, 0)


def test_backward_chunks_come_from_shapes_alone() -> None:
    def chunks(**fields: int) -> int:
        return plan(operation="backward", **fields).num_chunks

    for seqlen_k, batch in itertools.product((0, 1, 512, 513, 4096, 10**6), (0, 1, 3, 16, 100)):
        found = chunks(seqlen_k=seqlen_k, batch=batch)
        assert 1 <= found <= max(1, math.ceil(seqlen_k / 512))
        assert found == 1 or (found - 1) * batch < 16
        assert {chunks(seqlen_k=seqlen_k, batch=batch, num_workers=n) for n in (1, 2, 64)} == {found}
    assert plan(operation="forward", seqlen_k=10**6).num_chunks == 1
    assert plan(operation="weights_backward", seqlen_k=10**6).num_chunks == 1


def test_tiles_shrink_where_there_is_little_work() -> None:
    sizes = [plan(seqlen_q=seqlen_q, batch=batch).block_m for batch in (1, 4, 64) for seqlen_q in (16, 512, 4096)]
    assert set(sizes) == {32, 64, 128, 256}
    assert plan(seqlen_q=8192).block_m == 256 and plan(seqlen_q=1).block_m == 32
    assert plan(operation="backward", seqlen_q=1).block_m == 256


def test_heads_that_share_keys_share_a_tile_when_queries_are_few() -> None:
    def head_group(**fields: Any) -> int:
        return plan(**{"heads_q": 8, "heads_kv": 2, "seqlen_q": 4, **fields}).head_group

    assert head_group() == head_group(operation="decode") == 4
    assert head_group(seqlen_q=65) == 1
    assert head_group(dropout_p=0.5) == 1
    assert head_group(has_block_mask=True) == 1
    assert head_group(operation="backward") == head_group(operation="weights") == 1
    assert head_group(heads_kv=8) == 1
    # The longest sequence of the batch must not change how the others are worked on.
    assert {head_group(operation="decode", seqlen_q=n, batch_invariant=True) for n in (1, 64, 65, 500)} == {4}


def test_tiles_that_the_plan_does_not_choose_are_not_named() -> None:
    problem = _plan.Problem(operation="backward", device="cuda", dtype="bfloat16", compute_capability=80)
    found = _plan.make_plan(problem)
    assert found.block_m == found.block_n == 0
    assert "tiles of the kernel's own" in str(planning.Explanation(problem, found))


@pytest.mark.parametrize("operation", ["forward", "backward", "weights", "weights_backward", "decode"])
def test_every_plan_names_its_kernel_and_says_why(operation: str) -> None:
    found = plan(operation=operation)
    assert found.kernel.startswith("cpu/")
    assert found.block_m > 0 and found.block_n > 0
    assert found.reasons and all(reason.strip() for reason in found.reasons)
