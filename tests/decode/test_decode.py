"""Decoding from a KV cache: contiguous and paged, appended to and rotated, split over the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_ext
from tests.decode_oracle import Decode, assert_decode_matches, fill_unused_rows, make_decode, packed_queries, paged
from tests.oracle import FLOATS, HALF, far_apart, int32, random, values_are_checked

pytestmark = pytest.mark.op("attention_decode")

SPLITS = (0, 1, 2, 5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("seqlen_q", [1, 7])
def test_dtypes_and_splits(device: str, dtype: torch.dtype, num_splits: int, seqlen_q: int) -> None:
    lengths = int32([75, 1, 40], device)
    call = make_decode(seqlen_q=seqlen_q, dtype=dtype, device=device, cache_seqlens=lengths, window_right=0)
    assert_decode_matches(call, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [*SPLITS, 64, 500])
def test_long_caches(device: str, dtype: torch.dtype, num_splits: int) -> None:
    call = make_decode(2, 2, 1500, dtype=dtype, device=device, cache_seqlens=int32([1500, 700], device), window_right=0)
    assert_decode_matches(call, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", SPLITS)
def test_empty_caches(device: str, dtype: torch.dtype, num_splits: int) -> None:
    call = make_decode(dtype=dtype, device=device, cache_seqlens=int32([0, 75, 0], device))
    out, lse = assert_decode_matches(call, num_splits=num_splits)
    assert (out[0] == 0).all() and torch.isneginf(lse[0]).all()


def test_without_lengths_the_whole_cache_counts(device: str, dtype: torch.dtype) -> None:
    assert_decode_matches(make_decode(dtype=dtype, device=device))


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (8, 8), (6, 2), (16, 1), (7, 1)])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_grouped_heads(device: str, dtype: torch.dtype, heads_q: int, heads_kv: int, seqlen_q: int) -> None:
    call = make_decode(2, seqlen_q, heads_q=heads_q, heads_kv=heads_kv, dtype=dtype, device=device, window_right=0)
    assert_decode_matches(call, num_splits=3)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (64, 128), (128, 64), (256, 256), (72, 40)])
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    assert_decode_matches(
        make_decode(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, device=device), num_splits=2
    )


SCORE_OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"window_right": 0},
    "window": {"window_left": 13, "window_right": 0},
    "both_sides": {"window_left": 20, "window_right": 1},
    "left_only": {"window_left": 5},
    "softcap": {"softcap": 2.0},
    "scale": {"softmax_scale": 0.7},
}


@pytest.mark.parametrize("options", SCORE_OPTIONS.values(), ids=SCORE_OPTIONS.keys())
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("page_size", [None, 16])
def test_score_options(
    device: str, dtype: torch.dtype, options: dict[str, Any], num_splits: int, page_size: int | None
) -> None:
    lengths = int32([75, 2, 40], device)
    call = make_decode(seqlen_q=4, dtype=dtype, device=device, cache_seqlens=lengths, **options)
    assert_decode_matches(call if page_size is None else paged(call, page_size), num_splits=num_splits)


@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=str)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_alibi(device: str, dtype: torch.dtype, shape: tuple[int, ...], num_splits: int) -> None:
    slopes = torch.rand(shape, device=device) * 0.3
    call = make_decode(
        seqlen_q=3, dtype=dtype, device=device, cache_seqlens=int32([75, 2, 40], device), alibi_slopes=slopes
    )
    assert_decode_matches(call, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", SPLITS)
def test_the_sink_counts_once_however_many_splits(device: str, dtype: torch.dtype, num_splits: int) -> None:
    call = make_decode(seqlen_q=3, dtype=dtype, device=device, cache_seqlens=int32([75, 0, 40], device))
    assert_decode_matches(call, num_splits=num_splits, sink=random(4, device=device) + 3)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("apart", ["rows", "entries", "pages"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_caches_further_apart_than_32_bits_can_say(device: str, name: str, apart: str, num_splits: int) -> None:
    lengths = int32([75, 40], device)
    call = make_decode(2, seqlen_q=2, dtype=torch.bfloat16, device=device, cache_seqlens=lengths, num_splits=num_splits)
    call = paged(call, 16) if apart == "pages" else call
    expected = call.run()
    setattr(call, name, far_apart(getattr(call, name), dim=1 if apart == "rows" else 0))
    for found, right in zip(call.run(), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_paged_caches(device: str, dtype: torch.dtype, page_size: int, num_splits: int) -> None:
    call = make_decode(seqlen_q=2, dtype=dtype, device=device, cache_seqlens=int32([75, 0, 40], device), window_right=0)
    assert_decode_matches(paged(call, page_size), num_splits=num_splits)


def test_pages_that_are_not_in_use_may_be_anything(device: str, dtype: torch.dtype) -> None:
    call = paged(make_decode(dtype=dtype, device=device, cache_seqlens=int32([17, 0, 40], device)), 16)
    table = call.options["block_table"]
    table[0, 2:], table[1], table[2, 3:] = -1, 2**31 - 1, -(2**31)
    assert_decode_matches(call, num_splits=2)


def test_sequences_that_share_pages(device: str, dtype: torch.dtype) -> None:
    call = paged(make_decode(2, seqlen_cache=48, dtype=dtype, device=device), 16)
    call.options["block_table"][1, :2] = call.options["block_table"][0, :2]
    assert_decode_matches(call)


def test_page_table_that_is_a_slice(device: str, dtype: torch.dtype) -> None:
    call = paged(make_decode(dtype=dtype, device=device), 16)
    table = call.options["block_table"]
    wide = torch.full((table.shape[0], table.shape[1] + 4), -1, dtype=torch.int32, device=device)
    wide[:, : table.shape[1]] = table
    assert_decode_matches(call, block_table=wide[:, : table.shape[1]])


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_left_padding(device: str, dtype: torch.dtype, num_splits: int, seqlen_q: int) -> None:
    call = make_decode(
        seqlen_q=seqlen_q,
        dtype=dtype,
        device=device,
        cache_seqlens=int32([75, 30, 40], device),
        cache_leftpad=int32([0, 30, 13], device),
        window_left=31,
        window_right=0,
    )
    assert_decode_matches(call, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_batch_index_into_a_larger_cache(device: str, dtype: torch.dtype, num_splits: int) -> None:
    large = make_decode(6, dtype=dtype, device=device)
    call = make_decode(3, dtype=dtype, device=device)
    call.k_cache, call.v_cache = large.k_cache, large.v_cache
    call.options |= {"cache_batch_idx": int32([5, 0, 3], device), "cache_seqlens": int32([75, 9, 40], device)}
    assert_decode_matches(fill_unused_rows(call, torch.nan), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("page_size", [None, 16])
def test_packed_queries(device: str, dtype: torch.dtype, num_splits: int, page_size: int | None) -> None:
    lengths = int32([75, 0, 40, 9], device)
    call = packed_queries(
        make_decode(4, dtype=dtype, device=device, cache_seqlens=lengths, window_right=0), [1, 4, 0, 9]
    )
    assert_decode_matches(call if page_size is None else paged(call, page_size), num_splits=num_splits)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["heads first", "gaps"])
def test_strided_queries(device: str, dtype: torch.dtype, layout: str, packed: bool) -> None:
    """Rows of another order, and rows with gaps of NaN between them."""
    call = make_decode(3, 5, dtype=dtype, device=device, cache_seqlens=int32([75, 2, 40], device), window_right=0)
    call = packed_queries(call, [4, 0, 9]) if packed else call
    if layout == "heads first":
        call.q = call.q.transpose(-3, -2).contiguous().transpose(-3, -2)
    else:
        wide = call.q.new_full((*call.q.shape[:-1], 2 * call.q.shape[-1]), torch.nan)
        wide[..., : call.q.shape[-1]] = call.q
        call.q = wide[..., : call.q.shape[-1]]
    assert not call.q.is_contiguous()
    assert_decode_matches(call)


def test_strided_queries_and_caches(device: str, dtype: torch.dtype) -> None:
    call = make_decode(seqlen_q=3, dtype=dtype, device=device, cache_seqlens=int32([75, 2, 40], device), window_right=0)
    call.q = call.q.transpose(1, 2).contiguous().transpose(1, 2)
    expected = call.run()
    packed = torch.stack([call.k_cache, call.v_cache], dim=3)
    call.k_cache, call.v_cache = packed[:, :, :, 0], packed[:, :, :, 1]
    for got, want in zip(call.run(), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 9, 40, 150])
def test_many_queries(device: str, dtype: torch.dtype, head_dim: int, seqlen_q: int) -> None:
    """From one token to a chunk of a prompt, in caches of a few tiles; page_size and num_splits go along."""
    lengths = int32([613, 150, 258, 31], device)
    call = make_decode(
        4, seqlen_q, 613, 6, 2, head_dim, device=device, dtype=dtype, cache_seqlens=lengths, window_right=0
    )
    assert_decode_matches(call, num_splits=3)
    call.options |= {"window_left": 70, "window_right": 3, "softcap": 3.0}
    assert_decode_matches(paged(call, 32), num_splits=1)
    call.options |= {"softcap": 0.0, "alibi_slopes": torch.rand(6, device=device) * 0.3}
    assert_decode_matches(paged(call, 1), num_splits=0)


@pytest.mark.parametrize("page_size", [None, 16])
def test_chunks_of_prompts(device: str, dtype: torch.dtype, page_size: int | None) -> None:
    """So many queries that CUDA runs them as a forward over the cache."""
    lengths, leftpad = int32([330, 200], device), int32([0, 17], device)
    call = make_decode(2, 200, 330, 36, 4, 64, 40, device=device, dtype=dtype, cache_seqlens=lengths, window_right=0)
    assert_decode_matches(call if page_size is None else paged(call, page_size), num_splits=0)
    call.options |= {"cache_leftpad": leftpad, "window_left": 90}
    call = packed_queries(call, [200, 140])
    assert_decode_matches(call if page_size is None else paged(call, page_size), num_splits=0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(32, 32), (24, 2), (40, 1)])
def test_half_heads_of_any_group(device: str, dtype: torch.dtype, heads_q: int, heads_kv: int) -> None:
    lengths = int32([700, 41], device)
    call = make_decode(2, 2, 700, heads_q, heads_kv, 128, device=device, dtype=dtype, cache_seqlens=lengths)
    assert_decode_matches(call, num_splits=0)
    assert_decode_matches(call, num_splits=4, sink=random(heads_q, device=device))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("seqlen_q", [4, 40])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_values_that_some_queries_see(
    device: str, dtype: torch.dtype, poison: float, seqlen_q: int, num_splits: int
) -> None:
    """An Inf or a NaN reaches the rows that see its key, and no other."""
    call = make_decode(2, seqlen_q, 300, head_dim=64, device=device, dtype=dtype, window_left=250, window_right=0)
    clean, _ = call.run(num_splits=num_splits)
    hidden = 300 - seqlen_q  # the first query is aligned with key 300 - seqlen_q
    call.v_cache[0, hidden + 2, 1, 5] = poison
    call.v_cache[1, hidden - 250 + 1, 0, 7] = poison
    out, _ = call.run(num_splits=num_splits)
    first_sees, last_sees = torch.zeros_like(out, dtype=torch.bool), torch.zeros_like(out, dtype=torch.bool)
    first_sees[0, 2:, 2:, 5], last_sees[1, :2, :2, 7] = True, True
    touched = first_sees | last_sees
    torch.testing.assert_close(out[~touched], clean[~touched])
    assert not out[touched].isfinite().any()


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("page_size", [None, 16])
def test_cuda_graph(device: str, page_size: int | None) -> None:
    """A captured step, replayed as the caches grow, equals the same steps without a graph."""
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    call = make_decode(2, 1, 600, 8, 2, 64, seqlen_new=1, device=device, dtype=torch.float16, window_right=0)
    call.options["cache_seqlens"] = int32([510, 3], device)
    if page_size:
        call = paged(call, page_size)
    lengths = call.options["cache_seqlens"]
    eager = Decode(call.q, call.k_cache.clone(), call.v_cache.clone(), call.k, call.v, dict(call.options))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call.run(num_splits=0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call.run(num_splits=0)
    for _ in range(3):
        call.k.normal_(), call.v.normal_(), call.q.normal_()
        graph.replay()
        for got, want in zip(results, eager.run(num_splits=0), strict=True):
            assert torch.equal(got, want)
        lengths += 1


def with_new_keys(device: str, dtype: torch.dtype, seqlen_q: int, seqlen_new: int, **options: Any) -> Decode:
    lengths = int32([75 - seqlen_new, 0, 40], device)
    return make_decode(
        seqlen_q=seqlen_q, seqlen_new=seqlen_new, dtype=dtype, device=device, cache_seqlens=lengths, **options
    )


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(1, 1), (4, 4), (1, 6), (6, 1)])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_append(
    device: str, dtype: torch.dtype, seqlen_q: int, seqlen_new: int, num_splits: int, page_size: int | None
) -> None:
    call = with_new_keys(device, dtype, seqlen_q, seqlen_new, window_right=0)
    assert_decode_matches(call if page_size is None else paged(call, page_size), num_splits=num_splits)


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 32])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (50, -1)], ids=str)
def test_rotary(device: str, dtype: torch.dtype, interleaved: bool, rotary_dim: int, window: tuple[int, int]) -> None:
    """All queries at the cache's length; with a window, whichever side it has, each at its own position."""
    angles = torch.rand(80, rotary_dim // 2, device=device) * 6
    sides = {"window_left": window[0], "window_right": window[1]}
    call = with_new_keys(device, dtype, 3, 3, **sides, rotary_interleaved=interleaved)
    call.options |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
    assert_decode_matches(call)


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("wide", ["rotary_cos", "rotary_sin"])
def test_rotary_tables_of_other_strides(device: str, dtype: torch.dtype, wide: str) -> None:
    """One of them is a slice of a wider table."""
    angles = torch.rand(80, 8, device=device) * 6
    tables = {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
    tables[wide] = torch.cat([tables[wide], torch.full_like(tables[wide], torch.nan)], dim=1)[:, :8]
    assert_decode_matches(with_new_keys(device, dtype, 3, 3, window_right=0, **tables))


@pytest.mark.op("attention_decode_append")
def test_rotary_and_pages(device: str, dtype: torch.dtype) -> None:
    angles = torch.rand(80, 8, device=device) * 6
    rotary = {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
    call = with_new_keys(device, dtype, 3, 3, window_right=0, **rotary)
    assert_decode_matches(paged(call, 16), num_splits=2)


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("window_right", [-1, 0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_of_packed_queries(
    device: str, dtype: torch.dtype, interleaved: bool, window_right: int, page_size: int | None
) -> None:
    """Sequences have different numbers of queries, none included: each is rotated by its own cache's length."""
    angles = torch.rand(90, 8, device=device) * 6
    lengths = int32([60, 0, 40, 9], device)
    call = make_decode(
        4,
        seqlen_new=2,
        cache_seqlens=lengths,
        window_right=window_right,
        rotary_interleaved=interleaved,
        dtype=dtype,
        device=device,
    )
    call.options |= {"rotary_cos": angles.cos().to(call.q.dtype), "rotary_sin": angles.sin().to(call.q.dtype)}
    call = packed_queries(call, [1, 4, 0, 9])
    assert_decode_matches(call if page_size is None else paged(call, page_size), num_splits=2)


def test_rotary_tables_must_reach_the_last_query(device: str) -> None:
    """The cached rows and the new one fit into the table, later queries do not."""
    q, k = random(1, 6, 2, 16, device=device), random(1, 1, 2, 16, device=device)
    caches = [torch.zeros(1, 32, 2, 16, device=device) for _ in "kv"]
    angles = torch.rand(12, 8, device=device)
    if not values_are_checked(device):
        pytest.skip("values on the device are not read")
    with pytest.raises(RuntimeError, match="rotary_cos"):
        flash_ext.decode(
            q, *caches, k=k, v=k, cache_seqlens=int32([10], device), rotary_cos=angles.cos(), rotary_sin=angles.sin(),
            causal=True,
        )  # fmt: skip


@pytest.mark.parametrize("overlap", ["expanded", "in part"])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_append_refuses_caches_that_overlap(device: str, name: str, overlap: str) -> None:
    q, k, v = (random(2, 1, 2, 16, device=device) for _ in "qkv")
    caches = {n: torch.zeros(2, 8, 2, 16, device=device) for n in ("k_cache", "v_cache")}
    if overlap == "expanded":
        caches[name] = torch.zeros(1, 8, 2, 16, device=device).expand(2, -1, -1, -1)
    else:
        caches[name] = torch.zeros(1000, device=device).as_strided((2, 8, 2, 16), (128, 32, 16, 1))
    with pytest.raises(RuntimeError, match=rf"{name}.*overlap"):
        flash_ext.decode(q, **caches, k=k, v=v, cache_seqlens=int32([1, 2], device))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_score_of_infinity(device: str, dtype: torch.dtype, num_splits: int) -> None:
    """Its row is NaN and its lse +inf, whichever split it lies in; the other sequence is untouched."""
    call = make_decode(2, 2, 300, head_dim=64, dtype=dtype, device=device)
    call.q[..., 0] = 1
    call.k_cache[0, 200, :, 0] = torch.inf
    out, lse = call.run(num_splits=num_splits)
    assert torch.isposinf(lse[0]).all() or (device == "cuda" and lse[0].isnan().all())
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_append_counts_as_a_change_of_both_caches(device: str) -> None:
    for name in ("k_cache", "v_cache"):
        q, k, v = (torch.randn(2, 1, 4, 16, device=device) for _ in "qkv")
        caches = {n: torch.randn(2, 32, 4, 16, device=device) for n in ("k_cache", "v_cache")}
        factor = torch.randn(2, 32, 4, 16, device=device, requires_grad=True)
        product = factor * caches[name]
        flash_ext.decode(q, **caches, k=k, v=v, cache_seqlens=int32([3, 4], device))
        with pytest.raises(RuntimeError, match="inplace"):
            product.sum().backward()


@pytest.mark.parametrize("rotary", [False, True])
def test_append_behind_left_padding(device: str, dtype: torch.dtype, rotary: bool) -> None:
    call = with_new_keys(device, dtype, 2, 2, window_right=0, cache_leftpad=int32([7, 0, 39], device))
    if rotary:
        angles = torch.rand(80, 8, device=device) * 6
        call.options |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
    assert_decode_matches(call, num_splits=2)


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(32, 64), (72, 24)])
@pytest.mark.parametrize("page_size", [None, 16])
def test_append_of_another_head_dim_of_v(
    device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, page_size: int | None
) -> None:
    call = with_new_keys(device, dtype, 2, 3, head_dim=head_dim, head_dim_v=head_dim_v, window_right=0)
    assert_decode_matches(call if page_size is None else paged(call, page_size))


@pytest.mark.op("attention_decode_append")
def test_append_through_a_batch_index(device: str, dtype: torch.dtype) -> None:
    call = with_new_keys(device, dtype, 1, 2, window_right=0)
    large = make_decode(6, dtype=dtype, device=device)
    call.k_cache, call.v_cache = large.k_cache, large.v_cache
    assert_decode_matches(call, cache_batch_idx=int32([4, 1, 5], device))


@pytest.mark.op("attention_decode_append")
def test_append_into_strided_caches(device: str, dtype: torch.dtype) -> None:
    call = with_new_keys(device, dtype, 1, 2, window_right=0)
    expected = call.expected_caches()
    packed = torch.stack([call.k_cache, call.v_cache], dim=3)
    call.k_cache, call.v_cache = packed[:, :, :, 0], packed[:, :, :, 1]
    call.run()
    for got, want in zip((call.k_cache, call.v_cache), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.op("attention_decode_append")
def test_append_into_a_cache_whose_rows_hold_key_and_value(device: str, dtype: torch.dtype) -> None:
    call = with_new_keys(device, dtype, 1, 2, window_right=0)
    expected = call.expected_caches()
    packed = torch.cat([call.k_cache, call.v_cache], dim=3)
    call.k_cache, call.v_cache = packed.split([32, 32], dim=3)
    call.run()
    for got, want in zip((call.k_cache, call.v_cache), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlen_q", [1, 3, 20])
def test_batch_invariant_bits(device: str, page_size: int | None, seqlen_q: int, dtype: torch.dtype) -> None:
    """The first sequence's bits are the same alone, among others, and whatever their lengths and the cache's are."""
    options = {"window_right": 0, "batch_invariant": True, "num_splits": 0}
    lengths = int32([411] * 5, device)
    call = make_decode(5, seqlen_q, 600, device=device, dtype=dtype, cache_seqlens=lengths, **options)
    alone = Decode(call.q[:1], call.k_cache[:1, :411], call.v_cache[:1, :411], options=dict(options))
    alone.options["cache_seqlens"] = int32([411], device)
    expected = (paged(alone, page_size) if page_size else alone).run()
    for lengths in ([411, 0, 0, 0, 0], [411, 600, 1, 599, 3], [411] * 5):
        call.options["cache_seqlens"] = int32(lengths, device)
        call.k_cache[:, 411:], call.v_cache[:, 411:] = 0.5, 0.5
        out, lse = (paged(call, page_size) if page_size else call).run()
        assert torch.equal(out[:1], expected[0]) and torch.equal(lse[:1], expected[1]), lengths


@pytest.mark.parametrize("others", [1, 64, 65, 100])
def test_batch_invariant_bits_of_packed_queries(device: str, dtype: torch.dtype, others: int) -> None:
    """However many queries the other sequence has."""
    options = {"batch_invariant": True, "num_splits": 0}
    call = make_decode(
        2, 1, 700, heads_q=8, heads_kv=1, dtype=dtype, device=device, cache_seqlens=int32([600, 700], device)
    )
    first = Decode(call.q[:1], call.k_cache[:1], call.v_cache[:1], options={"cache_seqlens": int32([600], device)})
    packed = packed_queries(first, [1])
    alone = packed.run(**options)
    q = torch.cat([packed.q, random(others, 8, 32, dtype=dtype, device=device)])
    cu_seqlens_q = int32([0, 1, 1 + others], device)
    both = Decode(q, call.k_cache, call.v_cache, options=call.options | {"cu_seqlens_q": cu_seqlens_q})
    out, lse = both.run(**options)
    assert torch.equal(out[:1], alone[0]) and torch.equal(lse[:, :1], alone[1])


@pytest.mark.parametrize("with_sink", [False, True])
def test_batch_invariant_bits_in_a_wider_block_table(device: str, dtype: torch.dtype, with_sink: bool) -> None:
    call = paged(make_decode(1, 1, 1024, dtype=dtype, device=device, cache_seqlens=int32([300], device)), 64)
    call.options |= {"batch_invariant": True, "num_splits": 0, "sink": random(4, device=device) if with_sink else None}
    table = call.options["block_table"]
    expected = call.run()
    for width in (5, 8, 9):
        for got, want in zip(call.run(block_table=table[:, :width].contiguous()), expected, strict=True):
            assert torch.equal(got, want), width


@pytest.mark.parametrize("num_splits", [1, 4])
def test_an_infinite_sink_takes_everything(device: str, dtype: torch.dtype, num_splits: int) -> None:
    call = make_decode(1, 1, 1024, dtype=dtype, device=device, sink=torch.full((4,), torch.inf, device=device))
    out, lse = call.run(num_splits=num_splits)
    assert (out == 0).all() and torch.isposinf(lse).all()


def test_batch_invariant_decoding_matches_the_oracle(device: str, dtype: torch.dtype) -> None:
    call = make_decode(seqlen_cache=900, dtype=dtype, device=device, cache_seqlens=int32([900, 1, 513], device))
    assert_decode_matches(call, batch_invariant=True, num_splits=0)


def test_batch_invariant_decoding_of_many_sequences(device: str, dtype: torch.dtype) -> None:
    """More splits than CUDA has blocks for."""
    lengths = torch.randint(0, 1201, (70,), dtype=torch.int32, device=device)
    call = make_decode(70, 1, 1200, 16, 16, 8, dtype=dtype, device=device, cache_seqlens=lengths)
    assert_decode_matches(call, batch_invariant=True, num_splits=0)


def test_empty_batch(device: str, dtype: torch.dtype) -> None:
    out, lse = make_decode(0, dtype=dtype, device=device).run()
    assert out.shape == (0, 1, 4, 32) and lse.shape == (0, 4, 1)
