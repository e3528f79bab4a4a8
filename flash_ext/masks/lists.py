"""The lists of a block mask, and grids of its blocks: torch operations on the device of their inputs, without a wait of
the host. Shapes follow what the host knows; where it may read values (``can_read``), lists are cut to what is there.

A grid is int32 (batch, heads, rows, columns), batch and heads 1 where all are the same: of each block the number of its
bitmap, ``FULL`` or ``HIDDEN``. `rows` and `columns` count blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_ext.libraries import OPS
from flash_ext.tracing import can_read

FULL = -1  # every pair of the block is visible
HIDDEN = -2  # none is: the block is not listed


class Lists(NamedTuple):
    """The tensors of a ``BlockMask``."""

    offsets: Tensor
    indices: Tensor
    bitmap_ids: Tensor
    bitmaps: Tensor


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def lists_of_grid(grid: Tensor, bitmaps: Tensor, waits: bool = False) -> Lists:
    """The lists of a grid. They have room for all blocks, and anything behind the last one, unless they are cut: where
    that takes no waiting, or the host waits."""
    batch, heads, rows, columns = grid.shape
    if grid.numel() == 0:
        return no_blocks(batch, heads, rows, bitmaps)
    blocks = grid.reshape(-1)
    starts = running_sum(blocks > HIDDEN)
    block = owners(starts, entries(grid.numel(), grid))
    offsets = offsets_of_rows(starts, (batch, heads, rows), columns)
    lists = Lists(offsets, block % columns, blocks.index_select(0, block), bitmaps)
    return compacted(lists) if waits or can_read(grid) else lists


def transposed_lists(lists: Lists, columns: int) -> Lists:
    """The lists with queries and keys in each other's place, of so many columns of blocks."""
    batch, heads, offsets = lists.offsets.shape
    # Heads may share entries, rows of one head do not.
    room = batch * heads * min(len(lists.indices), (offsets - 1) * columns)
    made = Lists(*OPS.block_lists_transposed.default(*lists, columns, room))
    return compacted(made) if can_read(made.offsets) else made


def no_blocks(batch: int, heads: int, rows: int, bitmaps: Tensor) -> Lists:
    """The lists of a mask without rows or columns."""
    nothing = bitmaps.new_empty(0)
    return Lists(bitmaps.new_zeros((batch, heads, rows + 1)), nothing, nothing.clone(), bitmaps[:0])


def running_sum(counts: Tensor) -> Tensor:
    """int32 (n + 1): the sum of all of (n) that stand before each, and of all."""
    return torch.nn.functional.pad(counts, (1, 0)).cumsum(0, dtype=torch.int32)


def entries(count: int, like: Tensor) -> Tensor:
    """The places of a list that has room for ``count``."""
    return torch.arange(count, dtype=torch.int32, device=like.device)


def owners(starts: Tensor, entry: Tensor) -> Tensor:
    """int32: of each entry of a list, which of (n) segments it belongs to, by a running sum of their lengths; the last
    one for an entry behind the list."""
    return torch.searchsorted(starts[1:-1], entry, right=True, out_int32=True)


def offsets_of_rows(starts: Tensor, sizes: tuple[int, int, int], segments: int) -> Tensor:
    """int32 (batch, heads, rows + 1) of sizes (batch, heads, rows), by a running sum of `segments` lengths a row."""
    batch, heads, rows = sizes
    of_head = rows * segments
    return starts.as_strided((batch, heads, rows + 1), (heads * of_head, of_head, segments)).contiguous()


def compacted(lists: Lists) -> Lists:
    """Lists cut to their lengths, and each bitmap that they have, once. The host waits for that."""
    count = int(lists.offsets.max()) if lists.offsets.numel() else 0
    indices, ids = lists.indices[:count].contiguous(), lists.bitmap_ids[:count].clone()
    if len(lists.bitmaps) == 0:
        return Lists(lists.offsets, indices, ids, lists.bitmaps)
    used, which = torch.unique(ids[ids >= 0].long(), return_inverse=True)
    bitmaps, same = torch.unique(lists.bitmaps[used], dim=0, return_inverse=True)
    ids[ids >= 0] = same[which].int()
    return Lists(lists.offsets, indices, ids, bitmaps)


def grid_of_lists(offsets: Tensor, indices: Tensor, bitmap_ids: Tensor, columns: int) -> Tensor:
    """The grid of some lists. Rows of different heads may share entries, so each row looks up its own."""
    shape = (offsets.shape[0], offsets.shape[1], offsets.shape[2] - 1)
    if len(indices) == 0 or columns == 0:
        return torch.full((*shape, columns), HIDDEN, dtype=torch.int32, device=offsets.device)
    # A row has one entry a column at most. What is not there goes to a column behind all.
    entry = offsets[..., :-1, None] + entries(columns, offsets)
    missing = entry >= offsets[..., 1:, None]
    entry.clamp_(max=len(indices) - 1)
    column = indices[entry].masked_fill_(missing, columns).long()
    grid = torch.full((*shape, columns + 1), HIDDEN, dtype=torch.int32, device=offsets.device)
    return grid.scatter_(3, column, bitmap_ids[entry])[..., :columns]
