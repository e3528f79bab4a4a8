"""Chunks of prompts over a KV cache: so many queries that a GPU runs its forward, on Hopper by TMA from the cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.decode_oracle import (
    Decode,
    assert_decode_matches,
    fill_unused_rows,
    make_decode,
    packed_queries,
    paged,
)
from tests.oracle import HALF, int32, random

pytestmark = pytest.mark.op("attention_decode")

PAGE_SIZES = (None, 8, 16, 24, 64, 256)  # None: a contiguous cache
MANY_KEYS = 1250  # with pages of any of these sizes, tiles of 80 keys at head_dim 128 and 256 (test_plan_splits.py)


def in_pages(call: Decode, page_size: int | None) -> Decode:
    return call if page_size is None else paged(call, page_size)


def assert_prompt_matches(call: Decode, kernel: str = "sm90/forward") -> tuple[Tensor, Tensor]:
    """Against the oracle; and where there is a Hopper GPU, that it is the kernel that is meant. Returns the result."""
    result = assert_decode_matches(call, num_splits=0)
    assert_kernel(call, kernel)
    return result


def assert_kernel(call: Decode, kernel: str, block_n: int | None = None) -> None:
    """And its number of keys a tile, where one is given."""
    options = {name: value for name, value in call.options.items() if not name.startswith("window_")}
    window = (call.options.get("window_left", -1), call.options.get("window_right", -1))
    found = flash_ext.explain(
        call.q, call.k_cache, call.v_cache, operation="decode", window_size=window, **options
    ).plan
    if call.device == "cpu":
        assert found.kernel == "cpu/forward"
    elif torch.cuda.get_device_capability() == (9, 0) and call.q.dtype in HALF:
        if "90a" in flash_ext.build_info()["cuda_archs"]:
            assert found.kernel == kernel and block_n in (None, found.block_n)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_caches_and_pages(device: str, dtype: torch.dtype, head_dim: int, page_size: int | None) -> None:
    """Lengths that end within a tile, behind no key at all, and at the cache's end; unused rows hold NaN. Hopper has
    other tiles where keys are many, which a CPU has not."""
    for capacity in (512, MANY_KEYS) if device == "cuda" else (512,):
        lengths = int32([capacity, 0, 258, 31], device)
        options = dict(cache_seqlens=lengths, window_right=0)
        call = in_pages(make_decode(4, 150, capacity, 6, 2, head_dim, device=device, dtype=dtype, **options), page_size)
        assert_prompt_matches(call)
        if capacity == MANY_KEYS:
            assert_kernel(call, "sm90/forward", block_n=64 if head_dim == 64 else 80)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_few_query_tiles(device: str, dtype: torch.dtype, page_size: int | None) -> None:
    """A tile of 128 queries for nearly each of 132 SMs, on Hopper."""
    heads = 2 if device == "cpu" else 32
    options = dict(cache_seqlens=int32([1003], device), window_right=0)
    sizes = (1, 512, 1152, heads, heads // 2, 128)
    call = in_pages(make_decode(*sizes, device=device, dtype=dtype, **options), page_size)
    assert_decode_matches(call, num_splits=0)
    assert_kernel(call, "sm90/forward", block_n=128)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 40), (128, 64), (24, 136), (200, 256)])
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, page_size: int | None) -> None:
    lengths = int32([330, 200], device)
    call = make_decode(2, 200, 330, 4, 2, head_dim, head_dim_v, device=device, dtype=dtype, cache_seqlens=lengths)
    assert_prompt_matches(in_pages(call, page_size))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (90, 0), (300, 20), (40, -1), (0, 0)], ids=lambda window: f"{window[0]},{window[1]}"
)
def test_windows(device: str, dtype: torch.dtype, window: tuple[int, int], page_size: int | None) -> None:
    lengths = int32([700, 333], device)
    call = make_decode(2, 270, 700, 4, 1, 128, device=device, dtype=dtype, cache_seqlens=lengths)
    call.options |= {"window_left": window[0], "window_right": window[1]}
    assert_prompt_matches(in_pages(call, page_size))


@pytest.mark.parametrize("page_size", [None, 64])
def test_long_caches_are_split(device: str, dtype: torch.dtype, page_size: int | None) -> None:
    """So few query tiles that CTAs share their keys: each split is a share of the keys that a sequence has."""
    for length in (4000, 517, 3):
        lengths = int32([length], device)
        call = make_decode(1, 130, 4000, 4, 2, 64, device=device, dtype=dtype, cache_seqlens=lengths, window_right=0)
        assert_prompt_matches(in_pages(call, page_size))


@pytest.mark.parametrize("page_size", [None, 16])
def test_packed_queries(device: str, dtype: torch.dtype, page_size: int | None) -> None:
    lengths = int32([330, 200, 0, 41], device)
    call = make_decode(4, 1, 330, 48, 6, 64, device=device, dtype=dtype, cache_seqlens=lengths, window_right=0)
    assert_prompt_matches(in_pages(packed_queries(call, [300, 140, 90, 41]), page_size))


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_tiles_than_ctas(device: str, dtype: torch.dtype, head_dim: int, page_size: int | None) -> None:
    """CTAs go from tile to tile; some tiles meet an Inf that a part of their rows does not see, and are computed
    again."""
    heads = 24 if device == "cuda" else 2
    lengths = int32([420, 300, 64, 419, 97, 333, 0, 420], device)
    call = make_decode(8, 400, 420, heads, 2, head_dim, device=device, dtype=dtype, cache_seqlens=lengths)
    call.options |= {"window_left": 200, "window_right": 0}
    clean, _ = assert_prompt_matches(in_pages(call, page_size))
    call.v_cache[0, 150, 1, 5] = torch.inf  # the queries 130 to 330 of the upper heads see it
    out, _ = in_pages(call, page_size).run(num_splits=0)
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[0, 130:331, heads // 2 :, 5] = True
    torch.testing.assert_close(out[~touched], clean[~touched])
    assert not out[touched].isfinite().any()  # a weight of 0 makes a NaN of it


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_sink(device: str, dtype: torch.dtype, page_size: int | None) -> None:
    call = make_decode(2, 150, 300, 4, 2, 64, device=device, dtype=dtype, cache_seqlens=int32([300, 0], device))
    call.options["sink"] = random(4, device=device) + 3
    assert_prompt_matches(in_pages(call, page_size))


def test_left_padding(device: str, dtype: torch.dtype) -> None:
    lengths, leftpad = int32([613, 330, 200], device), int32([77, 330, 0], device)
    call = make_decode(3, 150, 613, 4, 2, 128, device=device, dtype=dtype, cache_seqlens=lengths, window_right=0)
    call.options["cache_leftpad"] = leftpad
    assert_prompt_matches(fill_unused_rows(call, torch.nan))
    call.options["window_left"] = 100
    assert_prompt_matches(paged(call, 16), kernel="sm80/forward" if has_many_tiles(call) else "sm80/decode")


def has_many_tiles(call: Decode) -> bool:
    """Whether there is a tile of 128 queries for each SM."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count if call.device != "cpu" else 1
    return call.batch * call.q.shape[2] * -(-call.q.shape[1] // 128) >= sms


def test_a_batch_index_into_a_larger_cache(device: str, dtype: torch.dtype) -> None:
    large, call = (make_decode(n, 150, 300, 4, 2, 64, dtype=dtype, device=device, window_right=0) for n in (6, 3))
    call.k_cache, call.v_cache = large.k_cache, large.v_cache
    call.options |= {"cache_batch_idx": int32([5, 0, 3], device), "cache_seqlens": int32([300, 9, 140], device)}
    assert_prompt_matches(fill_unused_rows(call, torch.nan))
    del call.options["cache_seqlens"]
    call.k_cache, call.v_cache = (random(*cache.shape, dtype=dtype, device=device) for cache in (large.k_cache,) * 2)
    assert_prompt_matches(call)


def test_caches_of_other_strides(device: str, dtype: torch.dtype) -> None:
    """Keys and values interleaved in one tensor, heads before rows, and pages of both."""
    call = make_decode(2, 150, 320, 4, 2, 64, dtype=dtype, device=device, window_right=0)
    expected = call.run(num_splits=0)
    both = torch.stack([call.k_cache, call.v_cache], dim=3)
    heads_first = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (call.k_cache, call.v_cache)]
    for caches in ((both[:, :, :, 0], both[:, :, :, 1]), heads_first):
        moved = Decode(call.q, *caches, options=dict(call.options))
        for got, want in zip(moved.run(num_splits=0), expected, strict=True):
            assert torch.equal(got, want)
    pages = paged(call, 32)
    expected = assert_prompt_matches(pages)
    pages.k_cache, pages.v_cache = torch.stack([pages.k_cache, pages.v_cache], dim=1).unbind(1)
    assert not pages.k_cache.is_contiguous()
    for got, want in zip(pages.run(num_splits=0), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("page_size", [None, 16])
def test_expanded_caches(device: str, dtype: torch.dtype, page_size: int | None) -> None:
    """A stride of 0, which TMA does not take: another kernel runs."""
    call = in_pages(make_decode(2, 150, 320, 4, 2, 64, dtype=dtype, device=device, window_right=0), page_size)
    expanded = [cache[:, :, :1].expand_as(cache) for cache in (call.k_cache, call.v_cache)]
    call.k_cache, call.v_cache = (cache.contiguous() for cache in expanded)
    expected = assert_prompt_matches(call)
    call.k_cache, call.v_cache = expanded
    assert_kernel(call, "sm80/decode")
    out, lse = call.run(num_splits=0)
    torch.testing.assert_close(out, expected[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, expected[1])


def test_table_entries_that_are_not_in_use_may_be_anything(device: str, dtype: torch.dtype) -> None:
    call = make_decode(3, 150, 500, 4, 2, 64, dtype=dtype, device=device, cache_seqlens=int32([170, 0, 400], device))
    call = paged(call, 16)
    table = call.options["block_table"]
    table[0, 11:], table[1], table[2, 25:] = -1, 2**31 - 1, -(2**31)
    assert_prompt_matches(call)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_values_that_some_queries_see(device: str, dtype: torch.dtype, poison: float, page_size: int | None) -> None:
    """An Inf or a NaN reaches the rows that see its key, and no other; also where keys are split."""
    call = make_decode(1, 200, 3000, 4, 2, 64, device=device, dtype=dtype, window_left=2500, window_right=0)
    clean, _ = in_pages(call, page_size).run(num_splits=0)
    hidden = 2900  # query 100 is the first that sees it
    call.v_cache[0, hidden, 1, 5] = poison
    call.v_cache[0, 310, 0, 7] = poison  # query 10 is the last that sees it
    out, _ = in_pages(call, page_size).run(num_splits=0)
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[0, 100:, 2:, 5], touched[0, :11, :2, 7] = True, True
    torch.testing.assert_close(out[~touched], clean[~touched])
    assert not out[touched].isfinite().any()


@pytest.mark.parametrize("softmax_scale", [0.0, 1e-300, -0.1])
@pytest.mark.parametrize("seqlen_q", [1, 150])
def test_scales_that_are_not_positive_in_float(
    device: str, dtype: torch.dtype, seqlen_q: int, softmax_scale: float
) -> None:
    """Not Hopper's for prompts: 0 times -inf, the score of a hidden key, would be NaN."""
    lengths = int32([0, 1, 40], device)
    call = make_decode(3, seqlen_q, 40, 1, 1, 64, device=device, dtype=dtype, cache_seqlens=lengths)
    call.options["softmax_scale"] = softmax_scale
    assert_prompt_matches(call, "sm80/decode")


@pytest.mark.parametrize("page_size", [24, 40])
def test_pages_that_end_within_a_tile(device: str, dtype: torch.dtype, page_size: int) -> None:
    """Without lengths all pages are in use. What fills the last tile is hidden, whatever the last page holds."""
    seqlen = 5 * page_size
    call = paged(make_decode(1, 130, seqlen, 4, 2, 64, device=device, dtype=dtype, window_right=0), page_size)
    del call.options["cache_seqlens"]
    clean, _ = call.run(num_splits=0)
    page = int(call.options["block_table"][0, -1])
    call.v_cache[page, -1, 1, 3] = torch.nan  # of the last key, which the last query alone sees
    out, _ = call.run(num_splits=0)
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[0, -1, 2:, 3] = True
    torch.testing.assert_close(out[~touched], clean[~touched])
    assert out[touched].isnan().all()


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("rotary", [False, True])
def test_prompts_that_are_appended(device: str, dtype: torch.dtype, rotary: bool, page_size: int | None) -> None:
    """The chunk's own keys are written into the cache first, and rotated."""
    lengths = int32([170, 0, 40], device)
    call = make_decode(
        3, 150, 400, 4, 2, 64, seqlen_new=150, dtype=dtype, device=device, cache_seqlens=lengths, window_right=0
    )
    if rotary:
        angles = torch.rand(400, 16, device=device) * 6
        call.options |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
    assert_decode_matches(in_pages(call, page_size), num_splits=0)


def test_repeated_calls_give_the_same_bits(device: str, dtype: torch.dtype) -> None:
    call = paged(make_decode(2, 300, 3000, 8, 2, 128, device=device, dtype=dtype, window_right=0), 64)
    expected = call.run(num_splits=0)
    for _ in range(20):
        for got, want in zip(call.run(num_splits=0), expected, strict=True):
            assert torch.equal(got, want)
