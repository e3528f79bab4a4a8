"""Masks made of two, as grids of blocks (``flash_ext.masks.lists``) that broadcast against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flash_ext.masks.lists import (
    FULL,
    HIDDEN,
    Lists,
    entries,
    grid_of_lists,
    lists_of_grid,
    owners,
    running_sum,
)
from flash_ext.tracing import can_read

MOST_BITMAP_BYTES = 64 << 20  # room that is worth no wait of the host


class GridMask(NamedTuple):
    grid: Tensor
    bitmaps: Tensor
    room: int  # bound on the blocks with a bitmap, of one batch entry and head; blocks may share one

    @classmethod
    def of_lists(cls, lists: Lists, columns: int) -> GridMask:
        grid = grid_of_lists(lists.offsets, lists.indices, lists.bitmap_ids, columns)
        return cls(grid, lists.bitmaps, min(len(lists.indices), grid.shape[2] * columns))


def both(first: GridMask, second: GridMask) -> Lists:
    """The intersection of two masks. The host waits if so many blocks may have a bitmap in both that there is no room
    for all of them (MOST_BITMAP_BYTES)."""
    grid, bitmaps = _combined(first, second, torch.bitwise_and)
    hidden = (first.grid == HIDDEN) | (second.grid == HIDDEN)
    return lists_of_grid(grid.masked_fill_(hidden, HIDDEN), bitmaps)


def either(first: GridMask, second: GridMask) -> Lists:
    """What one of two shows, as ``both``."""
    grid, bitmaps = _combined(first, second, torch.bitwise_or)
    full = (first.grid == FULL) | (second.grid == FULL)
    return lists_of_grid(grid.masked_fill_(full, FULL), bitmaps)


def _combined(first: GridMask, second: GridMask, combine: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The bitmap of each block: of the mask that has one, or of both, combined; else the higher of FULL and HIDDEN."""
    count, other_count = len(first.bitmaps), len(second.bitmaps)
    if count == 0 or other_count == 0:
        return torch.maximum(first.grid, second.grid), first.bitmaps if count else second.bitmaps
    ids, other_ids = torch.broadcast_tensors(first.grid, second.grid)
    behind = torch.where(other_ids >= 0, other_ids + count, other_ids)
    have_both = (ids >= 0) & (other_ids >= 0)
    grid = torch.maximum(ids, behind)
    room = ids.shape[0] * ids.shape[1] * min(first.room, second.room)
    if not can_read(ids) and room * first.bitmaps[0].nbytes <= MOST_BITMAP_BYTES:
        return _with_a_bitmap_each(first, second, combine, grid, have_both, room)
    pairs, which = torch.unique((ids.long() * other_count + other_ids)[have_both], return_inverse=True)
    grid.masked_scatter_(have_both, which.int() + count + other_count)
    made = combine(first.bitmaps[pairs // other_count], second.bitmaps[pairs % other_count])
    return grid, torch.cat([first.bitmaps, second.bitmaps, made])


def _with_a_bitmap_each(
    first: GridMask,
    second: GridMask,
    combine: Callable[[Tensor, Tensor], Tensor],
    grid: Tensor,
    have_both: Tensor,
    room: int,
) -> tuple[Tensor, Tensor]:
    """Gives each block of ``have_both`` a bitmap of its own, of which there is room for so many: nobody has to know how
    many blocks there are, or which of them have the same bits."""
    starts = running_sum(have_both.reshape(-1))
    block = owners(starts, entries(room, grid))
    made = combine(*(_bitmaps_of(mask, block, grid) for mask in (first, second)))
    number = starts[:-1].view_as(grid) + (len(first.bitmaps) + len(second.bitmaps))
    return torch.where(have_both, number, grid), torch.cat([first.bitmaps, second.bitmaps, made])


def _bitmaps_of(mask: GridMask, block: Tensor, grid: Tensor) -> Tensor:
    """The bitmaps of some blocks of a grid to which the mask's is broadcast; of one without a bitmap, any."""
    ids = mask.grid.expand_as(grid).reshape(-1).index_select(0, block)
    return mask.bitmaps.index_select(0, ids.clamp_(min=0))
