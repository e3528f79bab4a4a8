"""Lists and bitmaps of block masks, from grids of blocks and from intervals of keys: torch operations on the device of
their inputs, without a wait of the host. Shapes follow what the host knows; on a CPU they are cut to what is there.

Tensors here have a leading (batch, heads), 1 where all are the same. `rows` and `columns` count blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Lists(NamedTuple):
    """The tensors of a ``BlockMask``."""

    offsets: Tensor
    indices: Tensor
    bitmap_ids: Tensor
    bitmaps: Tensor


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def from_grid(visited: Tensor, ids: Tensor | None, bitmaps: Tensor, waits: bool = False) -> Lists:
    """Which blocks are visited, bool (batch, heads, rows, columns), and the bitmap of each; None: all of them are full.

    On a GPU, in compiled code and of fake tensors, the lists have room for all blocks, and zeros behind the last one,
    unless the host waits to cut them.
    """
    batch, heads, rows, columns = visited.shape
    ends = visited.flatten().cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])  # blocks before each block
    first = torch.arange(batch * heads, device=visited.device)[:, None] * rows
    row = first + torch.arange(rows + 1, device=visited.device)
    offsets = starts[row * columns].view(batch, heads, rows + 1).int()
    # What is not visited goes to a place behind all lists.
    place = torch.where(visited.flatten(), starts[:-1], visited.numel())
    column = torch.arange(columns, dtype=torch.int32, device=visited.device)
    indices = _scatter(column.expand(visited.shape), place)
    bitmap_ids = torch.full_like(indices, -1) if ids is None else _scatter(ids.int(), place, -1)
    lists = Lists(offsets, indices, bitmap_ids, bitmaps)
    has_values = type(visited) is Tensor and not torch.compiler.is_compiling()
    return compacted(lists) if waits or (visited.device.type == "cpu" and has_values) else lists


def _scatter(values: Tensor, place: Tensor, nothing: int = 0) -> Tensor:
    """int32 values at their places, of which there are as many as values, and one more, which is left out."""
    there = torch.full((values.numel() + 1,), nothing, dtype=torch.int32, device=values.device)
    return there.scatter_(0, place, values.flatten())[:-1]


def compacted(lists: Lists) -> Lists:
    """Lists cut to their lengths, and each bitmap that they have, once. The host waits for that."""
    count = int(lists.offsets.max()) if lists.offsets.numel() else 0
    indices, ids = lists.indices[:count].contiguous(), lists.bitmap_ids[:count].clone()
    used, which = torch.unique(ids[ids >= 0].long(), return_inverse=True)
    bitmaps, same = torch.unique(lists.bitmaps[used], dim=0, return_inverse=True)
    ids[ids >= 0] = same[which].int()
    return Lists(lists.offsets, indices, ids, bitmaps)


def grid_of(offsets: Tensor, indices: Tensor, bitmap_ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Which blocks are visited, bool (batch, heads, rows, columns), and the bitmap of each, int32, -1: none."""
    batch, heads, rows = offsets.shape[0], offsets.shape[1], offsets.shape[2] - 1
    # Rows of different heads may share entries, so each looks for its own, of which there is one a column at most.
    starts, ends = offsets[..., :-1].reshape(-1, 1), offsets[..., 1:].reshape(-1, 1)
    at = starts + torch.arange(columns, device=indices.device)
    exists = at < ends
    ids = torch.full((batch * heads * rows, columns + 1), -2, dtype=torch.int32, device=indices.device)
    if len(indices):
        at = at.clamp_max(len(indices) - 1).long()
        ids.scatter_(1, indices[at].long().where(exists, columns), bitmap_ids[at].where(exists, -2))
    ids = ids[:, :columns].reshape(batch, heads, rows, columns)
    return ids > -2, ids.clamp_min(-1)


class Intervals(NamedTuple):
    """The keys that queries see, int64 (batch, seqlen_q) each: [begin, end) and [0, before), which do not overlap."""

    begin: Tensor
    end: Tensor
    before: Tensor | None = None

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        begin = torch.minimum(self.begin, self.end)
        if self.before is None:
            return [(begin, self.end)]
        return [(begin, self.end), (torch.zeros_like(self.before), self.before)]


def from_intervals(intervals: Intervals, seqlen_k: int, block_size: tuple[int, int], most_bitmaps: int) -> Lists:
    """What queries see in one or two intervals of keys.

    Neighbouring blocks of a row share a bitmap where no interval of the row begins or ends in them. most_bitmaps: that
    a row of blocks can have then.
    """
    block_m, block_n = block_size
    batch, seqlen_q = intervals.begin.shape
    device = intervals.begin.device
    rows, columns = ceil_div(seqlen_q, block_m), ceil_div(seqlen_k, block_n)
    row = torch.arange(seqlen_q, device=device) // block_m
    visited, full, marked = _classify(intervals, row, seqlen_k, block_size, rows, columns)
    partial = visited & ~full
    new = (partial & marked).int()
    number = (new.cumsum(-1) - 1).clamp(0, most_bitmaps - 1)  # of the bitmap, in its row
    first = torch.arange(batch * rows, device=device).view(batch, rows, 1) * most_bitmaps
    ids = torch.where(partial, first + number, -1)
    # The column of each bitmap: that of the first block that has it.
    column = torch.zeros(batch, rows, most_bitmaps + 1, dtype=torch.int64, device=device)
    at = torch.where(new > 0, number, most_bitmaps)
    column.scatter_(2, at, torch.arange(columns, device=device).expand(batch, rows, columns))
    bitmaps = _bitmaps(intervals, column[..., :-1], block_m, block_n, rows)
    return from_grid(visited[:, None], ids[:, None], bitmaps)


def _classify(
    intervals: Intervals, row: Tensor, seqlen_k: int, block_size: tuple[int, int], rows: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Bool (batch, rows, columns): which blocks some query sees some of, which all see all of, and where an interval
    begins or ends, or did so in the block before."""
    block_m, block_n = block_size
    batch = intervals.begin.shape[0]
    device = row.device
    width = columns + 2
    # In one dimension, where integers are added in any order under torch.use_deterministic_algorithms() too.
    seen, whole, marks = torch.zeros(3, batch * rows * width, dtype=torch.int32, device=device).unbind(0)
    first = (torch.arange(batch, device=device)[:, None] * rows + row) * width  # place of column 0 of each query

    def add(counts: Tensor, column: Tensor, weight: Tensor) -> None:
        counts.scatter_add_(0, (first + column.clamp(0, width - 1)).flatten(), weight.flatten())

    for begin, end in intervals.parts():
        some = (end > begin).int()
        add(seen, begin // block_n, some)
        add(seen, (end + block_n - 1) // block_n, -some)
        inner_begin = (begin + block_n - 1) // block_n
        inner_end = torch.where(end >= seqlen_k, columns, end // block_n)
        inner = ((inner_end > inner_begin) & (end > begin)).int()
        add(whole, inner_begin, inner)
        add(whole, inner_end, -inner)
        for column in (begin // block_n, end // block_n):
            add(marks, column, some)
            add(marks, column + 1, some)
    queries = (row.numel() - torch.arange(rows, device=device) * block_m).clamp_max(block_m)
    grid = [counts.view(batch, rows, width)[..., :columns] for counts in (seen, whole, marks)]
    return grid[0].cumsum(-1) > 0, grid[1].cumsum(-1) == queries[:, None], grid[2] > 0


def _bitmaps(intervals: Intervals, column: Tensor, block_m: int, block_n: int, rows: int) -> Tensor:
    """int32 (batch * rows * bitmaps, block_m, block_n / 32) of the blocks in columns (batch, rows, bitmaps)."""
    words = torch.arange(block_n // 32, device=column.device) * 32
    first_key = (column * block_n)[..., None, None] + words  # (batch, rows, bitmaps, 1, words)
    bits: Tensor | None = None
    for begin, end in intervals.parts():
        part = _low_bits(_by_rows(end, rows, block_m) - first_key) & ~_low_bits(
            _by_rows(begin, rows, block_m) - first_key
        )
        bits = part if bits is None else bits | part
    assert bits is not None
    return bits.int().flatten(0, 2)


def _by_rows(of_queries: Tensor, rows: int, block_m: int) -> Tensor:
    """(batch, seqlen_q) as (batch, rows, 1, block_m, 1), 0 beyond seqlen_q."""
    padded = torch.nn.functional.pad(of_queries, (0, rows * block_m - of_queries.shape[1]))
    return padded.view(of_queries.shape[0], rows, 1, block_m, 1)


def _low_bits(count: Tensor) -> Tensor:
    """int64: so many of 32 bits, from the lowest on."""
    return (torch.ones_like(count) << count.clamp(0, 32)) - 1


def transposed_bitmaps(bitmaps: Tensor) -> Tensor:
    """int32 (n, block_n, block_m / 32) of (n, block_m, block_n / 32)."""
    return pack_bits(unpack_bits(bitmaps).transpose(1, 2))


def pack_bits(blocks: Tensor) -> Tensor:
    """bool (n, block_m, block_n) as int32 (n, block_m, block_n / 32)."""
    words = blocks.unflatten(-1, (blocks.shape[-1] // 32, 32))
    return (words.int() << torch.arange(32, dtype=torch.int32, device=blocks.device)).sum(-1, dtype=torch.int32)


def unpack_bits(bitmaps: Tensor) -> Tensor:
    """The reverse: bool (n, block_m, block_n)."""
    return ((bitmaps[..., None] >> torch.arange(32, device=bitmaps.device)) & 1).bool().flatten(-2)


def both(first: tuple[Tensor, Tensor, Tensor], second: tuple[Tensor, Tensor, Tensor]) -> Lists:
    """What two masks show, each as (visited, ids, bitmaps) of grids that broadcast against each other."""
    (seen, ids, bitmaps), (other_seen, other_ids, other_bitmaps) = first, second
    combined, all_bitmaps = _of_either(ids, bitmaps, other_ids, other_bitmaps, torch.bitwise_and)
    return from_grid(seen & other_seen, combined, all_bitmaps)


def either(first: tuple[Tensor, Tensor, Tensor], second: tuple[Tensor, Tensor, Tensor]) -> Lists:
    """What one of two masks shows, as ``both``."""
    (seen, ids, bitmaps), (other_seen, other_ids, other_bitmaps) = first, second
    combined, all_bitmaps = _of_either(ids, bitmaps, other_ids, other_bitmaps, torch.bitwise_or)
    is_full = (seen & (ids < 0)) | (other_seen & (other_ids < 0))
    return from_grid(seen | other_seen, combined.where(~is_full, -1), all_bitmaps)


def _of_either(
    ids: Tensor, bitmaps: Tensor, other_ids: Tensor, other_bitmaps: Tensor, combine: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The bitmap of each block: of the mask that has one, or combined. The host waits where both masks have bitmaps."""
    ids, other_ids = torch.broadcast_tensors(ids.long(), other_ids.long())
    count, other_count = len(bitmaps), len(other_bitmaps)
    combined = torch.where(ids >= 0, ids, torch.where(other_ids >= 0, other_ids + count, -1))
    if count == 0 or other_count == 0:
        return combined, torch.cat([bitmaps, other_bitmaps])
    have_both = (ids >= 0) & (other_ids >= 0)
    pairs, which = torch.unique((ids * other_count + other_ids)[have_both], return_inverse=True)
    combined = combined.masked_scatter(have_both, which + count + other_count)
    new = combine(bitmaps[pairs // other_count], other_bitmaps[pairs % other_count])
    return combined, torch.cat([bitmaps, other_bitmaps, new])
