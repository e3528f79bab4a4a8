"""Lists of masks in which each query sees the first keys and an interval of keys, such as windows and documents: a call
of ``flash_ext::interval_block_lists``, for which the device is not waited for.

What that writes into is allocated beforehand, so a builder says how many blocks and bitmaps there may be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_ext.libraries import OPS
from flash_ext.masks.lists import Lists, ceil_div, compacted
from flash_ext.tracing import can_read


class Blocks(NamedTuple):
    """The grid of blocks of a mask."""

    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int

    @property
    def rows(self) -> int:
        return ceil_div(self.seqlen_q, self.block_m)

    @property
    def columns(self) -> int:
        return ceil_div(self.seqlen_k, self.block_n)

    @property
    def crossed(self) -> int:
        """The most columns of a row that an edge crosses, if it moves by one key per query."""
        return (self.block_m + self.block_n - 2) // self.block_n + 1

    def most_below(self, first_end: int) -> int:
        """A bound on the blocks, if the first query sees the keys before first_end and each next one a key more."""
        end = first_end + self.block_m - 1  # of the first row, then block_m further in each
        blind = min(max(ceil_div(1 - end, self.block_m), 0), self.rows)
        growing = min(max(ceil_div(self.columns * self.block_n + 1 - end, self.block_m), blind), self.rows)
        keys = (growing - blind) * (2 * (end + self.block_n - 1) + self.block_m * (blind + growing - 1)) // 2
        return min(keys // self.block_n + (self.rows - growing) * self.columns, self.rows * self.columns)

    def most_between(self, keys: int) -> int:
        """A bound on the blocks, if a query sees so many neighbouring keys, and the next one those a key further."""
        return self.rows * min((keys + self.block_m + self.block_n - 3) // self.block_n + 1, self.columns)


class Window(NamedTuple):
    """A query at position p sees the keys from p - left to p + right and the first num_global ones, but, where it is
    causal, none behind p. Otherwise the tokens at the first num_global positions see all keys."""

    left: int | None = None  # None: unlimited
    right: int | None = None
    num_global: int = 0
    is_causal: bool = False


class Room(NamedTuple):
    """The room of lists: bounds on what they will hold."""

    blocks: int  # all of them
    bitmaps: int  # of a row of blocks


def lists_of_intervals(rule: str, bounds: Tensor, window: Window, offset: int, blocks: Blocks, room: Room) -> Lists:
    """The lists of a mask.

    Args:
        rule: what ``bounds`` say, as in the operator's schema: "window", "documents", "prefix" or "spans".
        bounds: integers; those of a rule that has none are empty, on the device of the result.
        offset: query i is at position i + offset.
    """
    if bounds.dtype not in (torch.int32, torch.int64):
        bounds = bounds.long()
    left, right = (-1 if side is None else side for side in (window.left, window.right))
    room = room._replace(bitmaps=min(room.bitmaps, max(blocks.columns, 1)))  # a row has a block a column at most
    lists = Lists(
        *OPS.interval_block_lists.default(
            bounds, rule, *blocks, offset, left, right, window.num_global, window.is_causal, *room
        )
    )
    return compacted(lists) if can_read(lists.offsets) else lists
