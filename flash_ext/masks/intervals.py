"""Lists of masks in which each query sees intervals of keys, such as windows and documents.

The keys that a query sees begin and end at edges. The builder says what the edges of each query are, and at which keys
the blocks of a row may begin to look different; between two such keys all blocks of the row share a bitmap. The bits of
the first block between them say whether it is visited, and whether it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_ext.masks.bitmaps import no_bitmaps
from flash_ext.masks.lists import (
    FULL,
    Lists,
    can_read,
    ceil_div,
    compacted,
    entries,
    no_blocks,
    offsets_of_rows,
    owners,
    running_sum,
)

FAR = 2**30  # behind all keys; its negative, before all


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
        """How many columns an edge may lie in that moves by a key a query, within a row."""
        return (self.block_m + self.block_n - 2) // self.block_n + 1

    def most_below(self, first_end: int) -> int:
        """No fewer blocks than there are if the first query sees the keys before first_end, the next one a key more."""
        end = first_end + self.block_m - 1  # of the first row, then block_m further in each
        blind = min(max(ceil_div(1 - end, self.block_m), 0), self.rows)
        growing = min(max(ceil_div(self.columns * self.block_n + 1 - end, self.block_m), blind), self.rows)
        keys = (growing - blind) * (2 * (end + self.block_n - 1) + self.block_m * (blind + growing - 1)) // 2
        return min(keys // self.block_n + (self.rows - growing) * self.columns, self.rows * self.columns)

    def most_between(self, keys: int) -> int:
        """No fewer blocks than there are if a query sees so many neighbouring keys, and the next one a key further."""
        return self.rows * min((keys + self.block_m + self.block_n - 3) // self.block_n + 1, self.columns)

    def positions(self, first: int, device: torch.device | str) -> Tensor:
        """int32 (rows * block_m): first, first + 1, ... for all queries; those behind the last one are like it."""
        at = torch.arange(first, first + self.rows * self.block_m, dtype=torch.int32, device=device)
        return at if self.seqlen_q % self.block_m == 0 else at.clamp_(max=first + self.seqlen_q - 1)

    def moving(self, firsts: Sequence[int], device: torch.device | str) -> Tensor:
        """int32 (1, rows, n): the keys at which blocks of a row may begin to look different because of edges that move
        by a key a query, and are at ``firsts`` for the first query; FAR, -FAR: a key behind and before all."""
        columns = []
        for first in firsts:
            count = 1 if abs(first) == FAR else self.crossed + 1
            end = first + count * self.block_n
            columns.append(torch.arange(first, end, self.block_n, dtype=torch.int32, device=device))
        rows = torch.arange(0, self.seqlen_q, self.block_m, dtype=torch.int32, device=device)
        return rows.view(1, -1, 1) + (columns[0] if len(columns) == 1 else torch.cat(columns))


class Edges(NamedTuple):
    """Where what a query sees begins and ends: keys in ascending order, int32 (batch|1, rows * block_m) each."""

    at: Sequence[Tensor]
    sees_first: bool  # a query sees the keys before the first edge, those between the second and the third, ...


def lists_of_edges(edges: Edges, changes: Tensor, blocks: Blocks, room: int) -> Lists:
    """The lists of a mask.

    Args:
        edges: of each query.
        changes: int32 (batch, rows, n), the keys at which blocks of a row may begin to look different, the first and
            the last one of what is listed among them. They ascend, but that some columns may come again.
        room: for how many blocks, at least as many as there are.
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
    entry = entries(room, bitmaps)
    segment = owners(starts, entry)
    shift = first.view(-1) - starts[:-1]
    lists = Lists(
        offsets_of_rows(starts, (batch, 1, rows), first.shape[-1]),
        shift.index_select(0, segment).add_(entry),
        segment.masked_fill(is_full.index_select(0, segment), FULL),
        bitmaps,
    )
    return compacted(lists) if can_read(bitmaps) else lists


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
