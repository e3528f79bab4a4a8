"""Sizes that 32 bits cannot count: products of them that kernels go by, and those that are refused.

Tensors with strides of 0 are as large as one likes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import int32, random

TOO_MANY = 2**31 + 1


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0)], ids=["by_length", "by_position"])
def test_every_query_is_rotated_whatever_the_bound(
    device: str, dtype: torch.dtype, window_size: tuple[int, int]
) -> None:
    """Without max_seqlen_q each sequence might have all queries: 8192 sequences x 8192 queries x 64 heads are 2^32."""
    batch, heads = (8192, 64) if device == "cuda" else (512, 4)  # a CPU has no grid, and takes longer
    angles = torch.rand(4, 4, device=device) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q = random(batch, heads, 8, dtype=dtype, device=device)
    k, v = (random(batch, 1, 1, 8, dtype=dtype, device=device) for _ in range(2))
    cache = [random(batch, 3, 1, 8, dtype=dtype, device=device) for _ in range(2)]
    lengths = torch.randint(0, 3, (batch,), device=device, dtype=torch.int32)

    def decode(**options: Any) -> Tensor:
        caches = [t.clone() for t in cache]
        return flash_ext.decode(q, *caches, k=k, v=v, cache_seqlens=lengths, rotary_cos=cos, rotary_sin=sin,
                                window_size=window_size, **options)  # fmt: skip

    cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device)
    bounded = decode(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=1)
    torch.testing.assert_close(decode(cu_seqlens_q=cu_seqlens_q), bounded)


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("lengths", [[5], [0, 3, 0, 0, 2], [1] * 40, [0] * 33 + [7], [2, 0] * 600], ids=len)
def test_which_sequence_a_packed_query_belongs_to(device: str, dtype: torch.dtype, lengths: list[int]) -> None:
    batch = len(lengths)
    cu_seqlens_q = int32([0, *torch.tensor(lengths).cumsum(0).tolist()], device)
    angles = torch.rand(60, 4, device=device) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q = random(sum(lengths), 2, 8, dtype=dtype, device=device)
    padded = torch.zeros(batch, max(lengths), 2, 8, dtype=dtype, device=device)
    place = [(b, t) for b, n in enumerate(lengths) for t in range(n)]
    entries, rows = (torch.tensor(index, device=device) for index in zip(*place, strict=True))
    padded[entries, rows] = q
    k, v = (random(batch, max(lengths), 2, 8, dtype=dtype, device=device) for _ in range(2))
    cache = [random(batch, 60, 2, 8, dtype=dtype, device=device) for _ in range(2)]
    used = torch.randint(0, 50, (batch,), device=device, dtype=torch.int32)

    def decode(q: Tensor, **options: Any) -> Tensor:
        # A left window of any length: queries are rotated by their positions, and see all keys.
        return flash_ext.decode(q, *(t.clone() for t in cache), k=k, v=v, cache_seqlens=used, rotary_cos=cos,
                                rotary_sin=sin, window_size=(1000, -1), **options)  # fmt: skip

    expected = decode(padded)[entries, rows]
    torch.testing.assert_close(decode(q, cu_seqlens_q=cu_seqlens_q), expected)


def many(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], Tensor]:
    """-1 stands for TOO_MANY."""
    return lambda device: torch.zeros(*(abs(n) for n in shape), device=device).expand(
        *(TOO_MANY if n == -1 else n for n in shape)
    )


def fails_with_cache(q: Tensor, cache: Tensor, match: str, **options: Any) -> None:
    with pytest.raises(RuntimeError, match=match):
        flash_ext.decode(q, cache, cache, **options)


@pytest.mark.op("attention_decode")
@pytest.mark.parametrize(
    ("shape", "what"),
    [((-1, 16, 2, 8), r"k_cache.size\(0\), the number of pages"), ((3, -1, 2, 8), r"k_cache.size\(1\), .* of a page"),
     ((3, 16, -1, 8), r"k_cache.size\(2\), the number of heads")],
    ids=["pages", "page_size", "heads"],
)  # fmt: skip
def test_too_large_a_pool_of_pages(device: str, shape: tuple[int, ...], what: str) -> None:
    q, table = random(1, 1, 2, 8, device=device), int32([[0]], device)
    match = f"{what}, must be at most 2147483647, got {TOO_MANY}"
    fails_with_cache(q, many(*shape)(device), match, block_table=table, cache_seqlens=int32([1], device))


@pytest.mark.op("attention_decode")
@pytest.mark.parametrize(
    ("shape", "what"),
    [((-1, 16, 2, 8), r"k_cache.size\(0\), the number of batch entries"),
     ((1, -1, 2, 8), r"k_cache.size\(1\), the number of rows")],
    ids=["entries", "rows"],
)  # fmt: skip
def test_too_large_a_cache(device: str, shape: tuple[int, ...], what: str) -> None:
    q = random(1, 1, 2, 8, device=device)
    match = f"{what}, must be at most 2147483647, got {TOO_MANY}"
    fails_with_cache(q, many(*shape)(device), match, cache_batch_idx=int32([0], device))


ATTENTION = {
    "rows of q": (dict(q=many(1, -1, 2, 8)), r"q.size\(1\), the number of rows"),
    "heads of q": (dict(q=many(1, 3, -1, 8)), r"q.size\(2\), the number of heads"),
    "rows of k": (dict(k=many(1, -1, 2, 8), v=many(1, -1, 2, 8)), r"k.size\(1\), the number of rows"),
    "heads of k": (dict(k=many(1, 3, -1, 8), v=many(1, 3, -1, 8)), r"k.size\(2\), the number of heads"),
    "batch": ({name: many(-1, 3, 2, 8) for name in "qkv"}, "batch"),
}


@pytest.mark.parametrize(("tensors", "what"), ATTENTION.values(), ids=ATTENTION.keys())
def test_too_large_for_attention(device: str, tensors: dict[str, Callable[[str], Tensor]], what: str) -> None:
    arguments = {name: random(1, 3, 2, 8, device=device) for name in "qkv"}
    arguments |= {name: make(device) for name, make in tensors.items()}
    with pytest.raises(RuntimeError, match=f"{what}.* must be at most"):
        flash_ext.attention(**arguments)


@pytest.mark.parametrize("lengths", ["cu_seqlens_q", "cu_seqlens_k"])
def test_too_many_packed_rows(device: str, lengths: str) -> None:
    arguments: dict[str, Any] = {name: random(3, 2, 8, device=device) for name in "qkv"}
    arguments |= dict(cu_seqlens_q=int32([0, 3], device), cu_seqlens_k=int32([0, 3], device), max_seqlen_q=3,
                      max_seqlen_k=3)  # fmt: skip
    for name in "q" if lengths == "cu_seqlens_q" else "kv":
        arguments[name] = many(-1, 2, 8)(device)
    with pytest.raises(RuntimeError, match=r"size\(0\), the number of rows, must be at most 2147483647"):
        flash_ext.attention(**arguments)
