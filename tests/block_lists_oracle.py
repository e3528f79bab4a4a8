"""Block lists by torch's own operators, on a CPU: what this library's are held against.

The keys that a query sees begin and end at edges. A builder says what the edges of each query are, and at which keys
the blocks of a row may begin to look different; between two such keys all blocks of the row share a bitmap. The bits of
the first block between them say whether it is visited, and whether it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_ext.masks.bitmaps import bits_of, no_bitmaps
from flash_ext.masks.intervals import Blocks, Window
from flash_ext.masks.lists import (
    FULL,
    Lists,
    compacted,
    entries,
    grid_of_lists,
    lists_of_grid,
    no_blocks,
    offsets_of_rows,
    owners,
    running_sum,
)

FAR = 2**30  # behind all keys; its negative, before all


class Edges(NamedTuple):
    """Where what a query sees begins and ends: keys in ascending order, int32 (batch|1, rows * block_m) each."""

    at: Sequence[Tensor]
    sees_first: bool  # a query sees the keys before the first edge, those between the second and the third, ...


# ---- Builders


def lists_of_window(window: Window, offset: int, blocks: Blocks) -> Lists:
    """Query i is at position i + offset."""
    changes = _changes(window, offset, blocks)
    return _lists_of_edges(_edges(window, offset, blocks), changes, blocks)


def lists_of_documents(cu_seqlens: Tensor, blocks: Blocks, causal: bool) -> Lists:
    cu_seqlens = cu_seqlens.clamp(-1, 2**31 - 1).int()  # 64 bits do not wrap
    token = _positions(blocks, 0)[None]
    # A token before the first document or behind the last one finds an empty one.
    bounds = torch.cat([cu_seqlens[:1], cu_seqlens, cu_seqlens[-1:]])
    document = torch.searchsorted(cu_seqlens, token, right=True, out_int32=True)
    begin, end = bounds[document], bounds[1:][document]
    if causal:
        end = torch.minimum(end, token + 1)
        begin = torch.minimum(begin, end)
    return _lists_of_spans(begin, end, 0, blocks)


def lists_of_prefix(prefix: Tensor, blocks: Blocks) -> Lists:
    offset = blocks.seqlen_k - blocks.seqlen_q
    behind = _positions(blocks, offset + 1)
    end = torch.maximum(behind, prefix.clamp(0, blocks.seqlen_k).int()[:, None])
    return _lists_of_spans(None, end, offset, blocks)


def lists_of_bidirectional_spans(spans: Tensor, blocks: Blocks) -> Lists:
    return _lists_of_spans(None, _ends_of_spans(spans, blocks), 0, blocks)


def transposed(lists: Lists, columns: int) -> Lists:
    """With queries and keys in each other's place."""
    grid = grid_of_lists(*lists[:3], columns)
    return lists_of_grid(grid.transpose(2, 3), transposed_bitmaps(lists.bitmaps))


def transposed_bitmaps(bitmaps: Tensor) -> Tensor:
    """int32 (n, block_n, block_m / 32) of (n, block_m, block_n / 32)."""
    count, block_m, words = bitmaps.shape
    if count == 0:
        return bitmaps.new_empty((0, words * 32, block_m // 32))
    bit = bits_of(bitmaps)
    # (n, words of queries, 32 queries, words of keys, 32 keys)
    bits = (bitmaps.view(count, block_m // 32, 32, words, 1) >> bit).bitwise_and_(1)
    by_keys = (bits << bit.view(32, 1, 1)).sum(2, dtype=torch.int32)
    return by_keys.flatten(2).transpose(1, 2).contiguous()


# ---- Edges


def _positions(blocks: Blocks, first: int) -> Tensor:
    """int32 (rows * block_m): first, first + 1, ... for all queries; those behind the last one are like it."""
    at = torch.arange(first, first + blocks.rows * blocks.block_m, dtype=torch.int32)
    return at if blocks.seqlen_q % blocks.block_m == 0 else at.clamp_(max=first + blocks.seqlen_q - 1)


def _moving(blocks: Blocks, firsts: Sequence[int]) -> Tensor:
    """int32 (1, rows, n): the keys at which blocks of a row may begin to look different because of edges that move
    by a key a query, and are at ``firsts`` for the first query; FAR, -FAR: a key behind and before all."""
    columns = []
    for first in firsts:
        count = 1 if abs(first) == FAR else blocks.crossed + 1
        end = first + count * blocks.block_n
        columns.append(torch.arange(first, end, blocks.block_n, dtype=torch.int32))
    rows = torch.arange(0, blocks.seqlen_q, blocks.block_m, dtype=torch.int32)
    return rows.view(1, -1, 1) + (columns[0] if len(columns) == 1 else torch.cat(columns))


def _lists_of_edges(edges: Edges, changes: Tensor, blocks: Blocks) -> Lists:
    """The lists of a mask.

    Args:
        edges: of each query.
        changes: int32 (batch, rows, n), the keys at which blocks of a row may begin to look different, the first and
            the last one of what is listed among them. They ascend, but that some columns may come again.
    """
    batch, rows = changes.shape[0], blocks.rows
    if rows == 0 or blocks.columns == 0:
        return no_blocks(batch, 1, rows, no_bitmaps((blocks.block_m, blocks.block_n), changes))
    columns = changes.div(blocks.block_n, rounding_mode="floor").clamp_(0, blocks.columns).cummax(-1).values
    first, end = columns[..., :-1].contiguous(), columns[..., 1:]
    bitmaps = _bits(edges, first, blocks)
    words = bitmaps.flatten(1)
    lengths = (end - first).view(-1).mul_(words.any(-1))
    is_full = (words == -1).all(-1)
    starts = running_sum(lengths)
    entry = entries(int(starts[-1]), bitmaps)
    segment = owners(starts, entry)
    shift = first.view(-1) - starts[:-1]
    lists = Lists(
        offsets_of_rows(starts, (batch, 1, rows), first.shape[-1]),
        shift.index_select(0, segment).add_(entry),
        segment.masked_fill(is_full.index_select(0, segment), FULL),
        bitmaps,
    )
    return compacted(lists)


def _bits(edges: Edges, columns: Tensor, blocks: Blocks) -> Tensor:
    """int32 (batch * rows * n, block_m, block_n / 32): what the queries of a row see of the blocks in its columns, of
    shape (batch, rows, n)."""
    words = torch.arange(0, blocks.block_n, 32, dtype=torch.int32, device=columns.device)
    first_keys = torch.add(words, columns.view(*columns.shape, 1, 1), alpha=blocks.block_n)
    bits: Tensor | None = None
    for edge in edges.at:
        if blocks.seqlen_k % blocks.block_n:  # keys that are not there do not keep a block from being full
            edge = edge.masked_fill(edge >= blocks.seqlen_k, FAR)
        by_rows = edge.view(-1, blocks.rows, 1, blocks.block_m, 1)
        behind = torch.bitwise_left_shift(-1, (by_rows - first_keys).clamp_(min=0))
        bits = behind if bits is None else bits.bitwise_xor_(behind)
    if bits is None:
        raise ValueError("edges must have at least one")
    return (bits.bitwise_not_() if edges.sees_first else bits).flatten(0, 2)


def _edges(window: Window, offset: int, blocks: Blocks) -> Edges:
    begin = None if window.left is None else _positions(blocks, offset - window.left)
    end = None if window.right is None else _positions(blocks, offset + window.right + 1)
    if window.num_global > 0:
        begin, end, before = _with_global(window, offset, blocks, begin, end)
        if before is not None:
            return Edges([edge for edge in (before, begin, end) if edge is not None], sees_first=True)
    edges = [edge for edge in (begin, end) if edge is not None]
    return Edges(edges or [torch.full_like(_positions(blocks, 0), FAR)], sees_first=begin is None)


def _with_global(
    window: Window, offset: int, blocks: Blocks, begin: Tensor | None, end: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Edges (begin, end) beside the first keys, and the edge behind those, if there is a gap in between."""
    count = window.num_global
    if end is not None and not window.is_causal:
        # Those at the first positions see all.
        position = _positions(blocks, offset)
        end = end.masked_fill((position >= 0) & (position < count), FAR)
    if begin is None:  # the window has the first keys, but where it ends before them
        return None, end if end is None or window.is_causal else end.clamp_(min=count), None
    begin = begin.clamp_(min=count)
    if end is None:
        return begin, None, torch.full_like(begin, count)
    before = end.clamp(max=count) if window.is_causal else torch.full_like(end, count)
    return begin, torch.maximum(begin, end), before


def _changes(window: Window, offset: int, blocks: Blocks) -> Tensor:
    """int32 (1, rows, n): see ``_lists_of_edges``."""
    left, right, count = window.left, window.right, window.num_global
    firsts = [-FAR] if left is None else [offset - left]
    firsts += [] if right is None else [offset + right + 1]
    # Behind the window there is nothing but what tokens see that see all.
    firsts += [FAR] if right is None or (count > 0 and not window.is_causal) else []
    changes = _moving(blocks, firsts)
    if count == 0:
        return changes
    last = (count - 1) // blocks.block_n * blocks.block_n  # of the blocks of first keys
    first_keys = torch.arange(last, last + 2 * blocks.block_n, blocks.block_n, dtype=torch.int32)
    if last > 0:
        first_keys = torch.nn.functional.pad(first_keys, (1, 0))
    # The window of a query among them begins and ends before the last of them.
    return torch.cat([first_keys.expand(1, blocks.rows, -1), changes], 2).sort(-1).values


def _ends_of_spans(spans: Tensor, blocks: Blocks) -> Tensor:
    """int32 (batch, rows * block_m): where what each query sees ends."""
    batch, count = spans.shape[:2]
    end = _positions(blocks, 1).expand(batch, -1)
    if count == 0:
        return end.contiguous()
    begins, ends = spans.int().unbind(-1)
    # Those that are none go behind all tokens.
    begins, order = begins.where(ends > begins, FAR).sort(dim=1)
    # A token before the first span finds one that ends at 0.
    ends = torch.nn.functional.pad(ends.gather(1, order), (1, 0))
    span = torch.searchsorted(begins, (end - 1), right=True)
    return torch.maximum(end, ends.gather(1, span))


def _lists_of_spans(begin: Tensor | None, end: Tensor, offset: int, blocks: Blocks) -> Lists:
    """Queries see the keys from begin, None: all, to end, int32 (batch, rows * block_m). Neither ever decreases; within
    a row of blocks both stay, move with the diagonal, or jump to where it is or to where they are for the row's first
    and last query. Query i is at position i + offset."""
    batch, rows = end.shape[0], blocks.rows
    last = end.view(batch, rows, blocks.block_m)[..., -1:] - 1
    changes = [_moving(blocks, [offset]).expand(batch, -1, -1), last, last + blocks.block_n]
    if begin is None:
        changes = [torch.zeros_like(last), *changes]
    else:
        first = begin.view(batch, rows, blocks.block_m)[..., :1]
        changes = [first, first + blocks.block_n, *changes]
    edges = Edges([end] if begin is None else [begin, end], sees_first=begin is None)
    return _lists_of_edges(edges, torch.cat(changes, -1), blocks)
