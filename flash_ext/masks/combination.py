"""Masks made of two, as grids of blocks (``flash_ext.masks.lists``) that broadcast against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flash_ext.masks.lists import FULL, HIDDEN, Lists, lists_of_grid


class GridMask(NamedTuple):
    grid: Tensor
    bitmaps: Tensor


def both(first: GridMask, second: GridMask) -> Lists:
    """The intersection of two masks. The host waits if both have bitmaps."""
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
    pairs, which = torch.unique((ids.long() * other_count + other_ids)[have_both], return_inverse=True)
    grid = torch.maximum(ids, behind).masked_scatter_(have_both, which.int() + count + other_count)
    made = combine(first.bitmaps[pairs // other_count], second.bitmaps[pairs % other_count])
    return grid, torch.cat([first.bitmaps, second.bitmaps, made])
