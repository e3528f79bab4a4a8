"""All keys that this rank's queries see are brought here first, and put in the order of the sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flash_ext.integrations.distributed.passes import (
    Gradients,
    Inputs,
    Passes,
    Result,
    Sum,
    backward_piece,
    forward_piece,
)
from flash_ext.integrations.distributed.shards import Piece, Problem, band, needed_chunks, rows_of, rows_of_chunks
from flash_ext.masks import BlockMask

# Options of whole sequences, of which each chunk of queries gets its own.
_OF_THE_WHOLE = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_mask"}


class Gather(Passes):
    """One call of attention for each chunk of queries."""

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        k, v, first = self.gather(x)
        out = x.q.new_zeros(*x.q.shape[:-1], v.shape[-1])
        lse_shape = (
            (out.shape[1], out.shape[0]) if self.problem.packed else (*out.shape[:1], out.shape[2], out.shape[1])
        )
        lse = out.new_full(lse_shape, -torch.inf, dtype=torch.promote_types(out.dtype, torch.float32))
        for piece, options in self.pieces(x, first, k.shape[self.dim]):
            q, keys, values = self.rows(piece, x.q, k, v)
            part_out, part_lse = forward_piece(q, keys, values, options)
            if q is x.q:
                return part_out, part_lse
            rows_of(out, piece.rows, self.dim).copy_(part_out)
            rows_of(lse, piece.rows, -1).copy_(part_lse)
        return out, lse

    def backward(self, x: Inputs, result: Result, needed: Sequence[bool]) -> Gradients:
        need_dq, _, _, need_dbias, need_dsink = needed
        k, v, first = self.gather(x)
        dq, dk, dv = Sum(x.q), Sum(k), Sum(v)
        dbias = Sum(x.bias) if x.bias is not None and need_dbias else None
        dsink = Sum(x.sink) if x.sink is not None and need_dsink else None
        flags = (need_dq, True, True, need_dbias, need_dsink)  # whose keys they are may need what this rank does not
        for piece, options in self.pieces(x, first, k.shape[self.dim]):
            tensors = self.rows(piece, x.q, k, v)
            parts = backward_piece(*tensors, result.rows(piece.rows, self.dim), options, self.deterministic, flags)
            if need_dq:
                dq.add(parts[0], piece.rows, self.dim)
            dk.add(parts[1], piece.keys, self.dim)
            dv.add(parts[2], piece.keys, self.dim)
            if dbias is not None:
                dbias.add_of_bias(parts[3], piece.rows, self.columns(piece, first))
            if dsink is not None:
                dsink.add(parts[4], slice(0, len(parts[4])), 0)
        own_dk, own_dv = self.scatter(x, dk.result(), dv.result(), first)
        return dq.result(), own_dk, own_dv, *(None if total is None else total.result() for total in (dbias, dsink))

    def rows(self, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim = self.dim
        return rows_of(q, piece.rows, dim), rows_of(k, piece.keys, dim), rows_of(v, piece.keys, dim)

    def columns(self, piece: Piece, first: int) -> slice:
        """Where a piece's keys lie in the sequence."""
        start = first * self.problem.chunk_k
        return slice(piece.keys.start + start, piece.keys.stop + start)

    # ---- Travelling

    def needed_chunks(self, rank: int, owner: int) -> tuple[int, ...]:
        if "block_mask" not in self.options:
            return super().needed_chunks(rank, owner)
        visited = _visited_chunks(self.options["block_mask"], self.problem)
        chunks = enumerate(self.problem.chunks_of(owner))
        return tuple(n for n, k in chunks if any(visited[q][k] for q in self.problem.chunks_of(rank)))

    def gather(self, x: Inputs) -> tuple[Tensor, Tensor, int]:
        """(k, v, the chunk that they begin with). What lies between chunks that are needed may be anything."""
        rank, size = self.ranks.rank, self.ranks.size
        x = x._replace(k=x.k.contiguous(), v=x.v.contiguous())  # copied once, and not for each rank that gets them
        transfer = self.transfer()
        shards = {rank: self.own_chunks(x)}
        for step in range(1, size):
            self.send_chunks(transfer, x, (rank + step) % size)
            owner = (rank - step) % size
            shards[owner] = self.receive_chunks(transfer, x, owner)
        transfer.start().wait()
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for owner, (k, v) in shards.items():
            for place, n in enumerate(self.needed_chunks(rank, owner)):
                rows = rows_of_chunks((place,), self.problem.chunk_k)
                found[self.problem.chunks_of(owner)[n]] = rows_of(k, rows, self.dim), rows_of(v, rows, self.dim)
        first, last = self.span(found)
        if len(found) < last - first:
            shapes = ([*t.shape[: self.dim], self.problem.chunk_k, *t.shape[self.dim + 1 :]] for t in (x.k, x.v))
            k, v = (unfilled(x.k, shape) for shape in shapes)
            found = {chunk: found.get(chunk, (k, v)) for chunk in range(first, last)}
        in_order = [found[chunk] for chunk in range(first, last)]
        if len(in_order) > 1:
            return torch.cat([k for k, _ in in_order], self.dim), torch.cat([v for _, v in in_order], self.dim), first
        return *in_order[0], first

    def span(self, chunks: Collection[int]) -> tuple[int, int]:
        """The first chunk, and the one behind the last; block masks count from the start."""
        if "block_mask" in self.options:
            return 0, self.problem.size * self.problem.chunks_per_rank
        return _span(chunks)

    def scatter(self, x: Inputs, dk: Tensor, dv: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """This rank's dk and dv, of the shares of all ranks that needed its rows; ``first`` as ``gather`` has it."""
        rank, size, length = self.ranks.rank, self.ranks.size, self.problem.chunk_k
        transfer = self.transfer()
        shares: list[tuple[int, tuple[Tensor, Tensor]]] = []
        for step in range(size):
            owner, taker = (rank - step) % size, (rank + step) % size
            for n in self.needed_chunks(rank, owner):
                rows = rows_of_chunks((self.problem.chunks_of(owner)[n] - first,), length)
                k, v = rows_of(dk, rows, self.dim), rows_of(dv, rows, self.dim)
                if owner == rank:
                    shares.append((n, (k, v)))
                else:
                    transfer.send(k, owner)
                    transfer.send(v, owner)
            for n in self.needed_chunks(taker, rank) if taker != rank else ():
                k, v = (transfer.receive(own, length, self.dim, taker) for own in (x.k, x.v))
                shares.append((n, (k, v)))
        transfer.start().wait()
        totals = Sum(x.k), Sum(x.v)
        for n, parts in shares:
            for total, part in zip(totals, parts, strict=True):
                total.add(part, rows_of_chunks((n,), length), self.dim)
        return totals[0].result(), totals[1].result()

    # ---- Pieces

    def pieces(self, x: Inputs, first: int, rows_k: int) -> Iterator[tuple[Piece, dict[str, Any]]]:
        """A piece for each chunk of queries, and its options."""
        problem, length = self.problem, self.problem.chunk_q
        for n, chunk in enumerate(problem.chunks_of(self.ranks.rank)):
            piece: Piece | None = Piece(
                slice(0, length), slice(0, rows_k), (problem.left, problem.right), False, problem.number(chunk, first)
            )
            given: dict[str, Any] = {}
            if problem.packed:
                given = self.lengths(chunk, first * problem.chunk_k, rows_k)
            elif "block_mask" in self.options:
                given = {"block_mask": rows_of_block_mask(self.options["block_mask"], chunk, problem)}
            else:
                piece = band(problem, chunk * length, length, first * problem.chunk_k, rows_k)
            if piece is not None:
                piece = piece.moved(n * length, 0)
                options = self.options_of(piece, x.bias, self.columns(piece, first))
                options = {name: value for name, value in options.items() if name not in _OF_THE_WHOLE}
                yield piece, {**options, **given, "sink": x.sink}

    def lengths(self, chunk: int, start_k: int, rows_k: int) -> dict[str, Any]:
        """Where the sequences begin in a chunk of queries and in the keys that are here, and how far they see those.
        Computed on the device. Keys in front of the first one here are hidden by a window, which counts from the last
        one."""
        problem, options = self.problem, self.options
        cu_seqlens_q, cu_seqlens_k = options["cu_seqlens_q"], options["cu_seqlens_k"]
        start, stop = chunk * problem.chunk_q, (chunk + 1) * problem.chunk_q
        used = lengths_k = cu_seqlens_k.diff()
        if problem.right == 0:
            # The last query of a sequence in this chunk sees the key at its own place and none behind it.
            place = cu_seqlens_q[1:].clamp(start, stop) - cu_seqlens_q[:-1]
            used = torch.minimum((place + lengths_k - cu_seqlens_q.diff()).clamp(min=0), lengths_k)
        here = cu_seqlens_k.clamp(start_k, start_k + rows_k)
        used = (cu_seqlens_k[:-1] + used).clamp(start_k, start_k + rows_k) - here[:-1]
        return dict(
            cu_seqlens_q=(cu_seqlens_q.clamp(start, stop) - start).to(torch.int32),
            cu_seqlens_k=(here - start_k).to(torch.int32),
            seqused_k=used.to(torch.int32),
            max_seqlen_q=min(problem.chunk_q, options.get("max_seqlen_q", problem.chunk_q)),
            max_seqlen_k=options.get("max_seqlen_k"),
        )


def _span(chunks: Collection[int]) -> tuple[int, int]:
    return (min(chunks), max(chunks) + 1) if chunks else (0, 1)


@lru_cache(maxsize=1024)
def counts_alibi_distances(problem: Problem) -> bool:
    """Whether pieces count them right, on all ranks: from where the ends of queries and keys meet. Packed sequences
    have ends of their own."""
    return problem.packed or all(_counts_alibi_distances(problem, rank) for rank in range(problem.size))


def _counts_alibi_distances(problem: Problem, rank: int) -> bool:
    owners = range(problem.size)
    needed = [problem.chunks_of(owner)[n] for owner in owners for n in needed_chunks(problem, rank, owner)]
    first, last = _span(needed)
    for chunk in problem.chunks_of(rank):
        start_q, start_k = chunk * problem.chunk_q, first * problem.chunk_k
        piece = band(problem, start_q, problem.chunk_q, start_k, (last - first) * problem.chunk_k)
        if piece is None:
            continue
        ends = (piece.keys.stop - piece.keys.start) - (piece.rows.stop - piece.rows.start)
        diagonal = start_q + piece.rows.start + problem.offset - (start_k + piece.keys.start)
        if piece.top_left or ends != diagonal:
            return False
    return True


def unfilled(like: Tensor, shape: Sequence[int]) -> Tensor:
    """In place of chunks that no query sees: whatever is in it, kernels keep it out of results and gradients."""
    return like.new_empty(shape)


# ---- Block masks ----------------------------------------------------------------------------------------------------

_read_already: Any = WeakIdKeyDictionary()  # by a mask's offsets: what the host has read once


def _visited_chunks(mask: BlockMask, problem: Problem) -> list[list[bool]]:
    """Of each chunk of queries, which chunks of keys the mask visits. The host reads a mask once."""
    known = _read_already.setdefault(mask.offsets, {})
    if problem not in known:
        known[problem] = _read_visited_chunks(mask.to("cpu"), problem)
    visited: list[list[bool]] = known[problem]
    return visited


def _read_visited_chunks(mask: BlockMask, problem: Problem) -> list[list[bool]]:
    count = problem.size * problem.chunks_per_rank
    row, entry = mask._entries()
    query = row % (mask.offsets.shape[-1] - 1) * mask.block_size[0] // problem.chunk_q
    key = mask.indices[entry].long() * mask.block_size[1]
    last = (key + mask.block_size[1]).clamp(max=mask.seqlen_k) - 1
    # +1 where a block of keys begins, -1 behind where it ends
    edges = torch.zeros(count, count + 1, dtype=torch.long)
    edges.index_put_((query, key // problem.chunk_k), torch.ones_like(key), accumulate=True)
    edges.index_put_((query, last // problem.chunk_k + 1), -torch.ones_like(key), accumulate=True)
    visited: list[list[bool]] = (edges.cumsum(1)[:, :count] > 0).tolist()
    return visited


def check_lengths(mask: BlockMask, problem: Problem) -> None:
    block_m, made_for = mask.block_size[0], (mask.seqlen_q, mask.seqlen_k)
    whole = (problem.size * problem.rows_q, problem.size * problem.rows_k)
    if made_for != whole:
        raise ValueError(f"block_mask must be made for the whole sequences, {whole}, got one for {made_for}")
    if not divides_chunks(mask, problem):
        raise ValueError(
            f"block_mask must have rows of blocks that divide the {problem.chunk_q} queries of a chunk, got {block_m}: "
            "method 'ulysses' takes any, with heads that the ranks divide"
        )


def divides_chunks(mask: BlockMask, problem: Problem) -> bool:
    return problem.chunk_q % mask.block_size[0] == 0


def rows_of_block_mask(mask: BlockMask, chunk: int, problem: Problem) -> BlockMask:
    """The mask of a chunk of queries and all keys."""
    count = problem.chunk_q // mask.block_size[0]
    return replace(mask, offsets=mask.offsets.narrow(-1, chunk * count, count + 1), seqlen_q=problem.chunk_q)
