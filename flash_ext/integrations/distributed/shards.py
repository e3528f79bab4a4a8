"""Which rank has which rows, and which of them another one needs. Plain integers: nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Layout = Literal["contiguous", "zigzag"]


class Ranks:
    """A process group, and this process's place in it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group must be one that this process belongs to")

    def peer(self, rank: int) -> int:
        """The rank in the default group, which is what transfers are addressed to."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def chunks_of(rank: int, size: int, layout: Layout) -> tuple[int, ...]:
    """The chunks of the sequence that a rank has, in the order in which it has them."""
    return (rank,) if layout == "contiguous" else (rank, 2 * size - 1 - rank)


def in_order(shards: Sequence[Tensor], layout: Layout, dim: int) -> Tensor:
    """The whole sequence, of the shards of all ranks."""
    if layout == "contiguous":
        return torch.cat(list(shards), dim)
    halves = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)


def rows_of(x: Tensor, rows: slice, dim: int) -> Tensor:
    """A view of some rows; ``x`` itself if they are all."""
    return x if rows == slice(0, x.shape[dim]) else x.narrow(dim, rows.start, rows.stop - rows.start)


@dataclass(frozen=True)
class Problem:
    """What decides which keys a rank needs. Query i sees keys i + offset - left to i + offset + right (-1: all)."""

    size: int  # ranks
    layout: Layout
    rows_q: int  # of each rank
    rows_k: int
    left: int
    right: int
    top_left: bool
    packed: bool = False  # several sequences, whose lengths the host does not know
    same_sequences: bool = True  # of queries and keys, if packed

    @property
    def offset(self) -> int:
        """Of packed sequences, those that are the same for queries and keys: each query has its key in its own row."""
        return 0 if self.top_left or self.packed else self.size * (self.rows_k - self.rows_q)

    @property
    def chunks_per_rank(self) -> int:
        return 1 if self.layout == "contiguous" else 2

    @property
    def chunk_q(self) -> int:
        """Rows of a chunk."""
        return self.rows_q // self.chunks_per_rank

    @property
    def chunk_k(self) -> int:
        return self.rows_k // self.chunks_per_rank

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        return chunks_of(rank, self.size, self.layout)

    def sees(self, chunk_q: int, chunk_k: int) -> bool:
        """Whether some query of a chunk may see some key of another one."""
        if self.packed and not self.same_sequences:
            return True  # the host does not know where a sequence of queries has its keys
        return self.cut(chunk_q, chunk_k) is not None

    def cut(self, chunk_q: int, chunk_k: int) -> Piece | None:
        """What a chunk of queries sees of a chunk of keys, rows counted from the start of each."""
        return band(self, chunk_q * self.chunk_q, self.chunk_q, chunk_k * self.chunk_k, self.chunk_k)

    def number(self, chunk_q: int, chunk_k: int) -> int:
        return chunk_q * self.chunk_q * self.size * self.rows_k + chunk_k * self.chunk_k


class Piece(NamedTuple):
    """One call of ``attention``: some rows of a tensor of queries, and of one of keys."""

    rows: slice
    keys: slice
    window: tuple[int, int]
    top_left: bool
    number: int  # of no other piece, for dropout

    def moved(self, rows: int, keys: int) -> Piece:
        """The same in larger tensors."""
        return self._replace(
            rows=slice(self.rows.start + rows, self.rows.stop + rows),
            keys=slice(self.keys.start + keys, self.keys.stop + keys),
        )


def band(problem: Problem, start_q: int, rows_q: int, start_k: int, rows_k: int) -> Piece | None:
    """What some queries see of some keys, given where both begin in the sequence; None: nothing.

    Rows and keys that see nothing of each other are cut off. Then a window of ``attention``, whose sides cannot be
    negative, says the rest.
    """
    left, right = problem.left, problem.right
    q0, q1, k0, k1 = 0, rows_q, 0, rows_k
    diagonal = start_q + problem.offset - start_k  # the key at query 0
    if left >= 0:
        q1 = min(q1, k1 - diagonal + left)  # who sees the last key
    if right >= 0:
        q0 = max(q0, -(diagonal + right))  # who sees the first one
        k1 = min(k1, q1 + diagonal + right)
    if left >= 0:
        k0 = max(k0, q0 + diagonal - left)
    if q0 >= q1 or k0 >= k1:
        return None
    diagonal += q0 - k0  # in what is left
    shows_left = left < 0 or left - diagonal >= q1 - q0 - 1
    shows_right = right < 0 or right + diagonal >= k1 - k0 - 1
    # attention's own alignment is by the ends; else the window is moved, to be counted from the start.
    by_ends = (k1 - k0) - (q1 - q0) == diagonal
    shift = 0 if by_ends else diagonal
    window = (-1 if shows_left else left - shift, -1 if shows_right else right + shift)
    number = (start_q + q0) * problem.size * problem.rows_k + start_k + k0
    return Piece(slice(q0, q1), slice(k0, k1), window, not (by_ends or window == (-1, -1)), number)


@lru_cache(maxsize=1024)
def needed_chunks(problem: Problem, rank: int, owner: int) -> tuple[int, ...]:
    """Which of an owner's chunks, 0 or 0 and 1, a rank needs."""
    chunks = enumerate(problem.chunks_of(owner))
    return tuple(n for n, k in chunks if any(problem.sees(q, k) for q in problem.chunks_of(rank)))


def rows_of_chunks(chunks: tuple[int, ...], length: int) -> slice:
    """Of neighbouring chunks, 0 or 1 or both."""
    return slice(chunks[0] * length, (chunks[-1] + 1) * length)


@lru_cache(maxsize=1024)
def pieces_by_chunk(problem: Problem, rank: int, owner: int) -> tuple[tuple[Piece, slice], ...]:
    """This rank's queries over the chunks that it needs of an owner's shard, one pair of chunks after the other: the
    pieces, and where their keys lie in the sequence."""
    found = []
    for a, chunk_q in enumerate(problem.chunks_of(rank)):
        for b, n in enumerate(needed_chunks(problem, rank, owner)):
            chunk_k = problem.chunks_of(owner)[n]
            piece = problem.cut(chunk_q, chunk_k)
            if piece is not None:
                start = chunk_k * problem.chunk_k
                columns = slice(piece.keys.start + start, piece.keys.stop + start)
                found.append((piece.moved(a * problem.chunk_q, b * problem.chunk_k), columns))
    return tuple(found)


@lru_cache(maxsize=1024)
def pieces_of_shard(problem: Problem, rank: int, owner: int) -> tuple[Piece, ...]:
    """The same in as few and large pieces as there can be."""
    chunks_q, needed = problem.chunks_of(rank), needed_chunks(problem, rank, owner)
    chunks_k = [problem.chunks_of(owner)[n] for n in needed]
    square = rank == owner and len(chunks_k) == len(chunks_q) and problem.rows_q == problem.rows_k
    if square and (problem.left, problem.right) == (-1, 0):
        rows = slice(0, problem.rows_q)  # later chunks lie behind earlier ones here too
        return (Piece(rows, rows, (-1, 0), False, problem.number(chunks_q[0], chunks_k[0])),)
    pieces = [piece for piece, _ in pieces_by_chunk(problem, rank, owner)]
    pieces = _joined(pieces, "rows", problem.chunk_q)
    return tuple(_joined(pieces, "keys", problem.chunk_k))


def _joined(pieces: list[Piece], side: Literal["rows", "keys"], length: int) -> list[Piece]:
    """Two pieces that show all of two neighbouring chunks, and all of the same of the other side, become one."""
    found: list[Piece] = []
    for piece in pieces:
        before = next((p for p in found if _continues(p, piece, side, length)), None)
        if before is None:
            found.append(piece)
        else:
            both = slice(0, 2 * length)
            joined = before._replace(rows=both) if side == "rows" else before._replace(keys=both)
            found[found.index(before)] = joined
    return found


def _continues(before: Piece, piece: Piece, side: Literal["rows", "keys"], length: int) -> bool:
    if side == "rows":
        same, spans = before.keys == piece.keys, (before.rows, piece.rows)
    else:
        same, spans = before.rows == piece.rows, (before.keys, piece.keys)
    chunks = slice(0, length), slice(length, 2 * length)
    return same and spans == chunks and before.window == piece.window == (-1, -1)
