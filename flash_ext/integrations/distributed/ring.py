"""One remote shard at a time, while the next one travels; the results over different keys are merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flash_ext.functional import merge
from flash_ext.integrations.distributed.passes import (
    Gradients,
    Inputs,
    Passes,
    Result,
    Sum,
    backward_piece,
    forward_piece,
)
from flash_ext.integrations.distributed.shards import (
    Piece,
    Problem,
    pieces_by_chunk,
    pieces_of_shard,
    rows_of,
    rows_of_chunks,
)

_MOST_PARTS = 8  # results that wait to be merged


class Ring(Passes):
    """Step s computes with the shard of the rank s before this one."""

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        results = _Results(x, self.problem)
        for owner, k, v in self.travel(x):
            for piece, columns in self.pieces(owner, x.bias):
                options = self.options_of(piece, x.bias, columns)
                q = rows_of(x.q, piece.rows, 1)
                results.add(piece, *forward_piece(q, rows_of(k, piece.keys, 1), rows_of(v, piece.keys, 1), options))
        out, lse = results.merged()
        return (out, lse) if x.sink is None else _with_sink(out, lse, x.sink)

    def backward(self, x: Inputs, result: Result, needed: Sequence[bool]) -> Gradients:
        need_dq, _, _, need_dbias, need_dsink = needed
        dq, returned = Sum(x.q), _ReturnedGradients(self, x)
        dbias = Sum(x.bias) if x.bias is not None and need_dbias else None
        flags = (need_dq, True, True, need_dbias, False)  # whose keys they are may need what this rank does not
        for owner, k, v in self.travel(x):
            shares = Sum(k), Sum(v)
            for piece, columns in self.pieces(owner, x.bias):
                options = self.options_of(piece, x.bias, columns)
                tensors = rows_of(x.q, piece.rows, 1), rows_of(k, piece.keys, 1), rows_of(v, piece.keys, 1)
                parts = backward_piece(*tensors, result.rows(piece.rows, 1), options, self.deterministic, flags)
                if need_dq:
                    dq.add(parts[0], piece.rows, 1)
                if dbias is not None:
                    dbias.add_of_bias(parts[3], piece.rows, columns)
                for share, part in zip(shares, parts[1:3], strict=True):
                    share.add(part, piece.keys, 1)
            returned.send(owner, *(share.result() for share in shares))
        dk, dv = returned.result()
        dsink = _sink_gradient(result, x.sink) if x.sink is not None and need_dsink else None
        return dq.result(), dk, dv, None if dbias is None else dbias.result(), dsink

    def travel(self, x: Inputs) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(owner, k, v) of each step, perhaps without rows. What the next one needs travels while the caller computes
        with them."""
        rank, size = self.ranks.rank, self.ranks.size
        k, v = self.own_chunks(x)
        for step in range(size):
            transfer = self.transfer()
            next_k, next_v = k, v
            if step + 1 < size:
                self.send_chunks(transfer, x, (rank + step + 1) % size)
                next_k, next_v = self.receive_chunks(transfer, x, (rank - step - 1) % size)
                transfer.start()
            yield (rank - step) % size, k, v
            transfer.wait()
            k, v = next_k, next_v

    def pieces(self, owner: int, bias: Tensor | None) -> Iterator[tuple[Piece, slice]]:
        """Pieces, and where their keys lie in the sequence, which only a bias or mask asks for."""
        if bias is not None or "mask" in self.options:
            yield from pieces_by_chunk(self.problem, self.ranks.rank, owner)
        else:
            yield from ((piece, slice(0)) for piece in pieces_of_shard(self.problem, self.ranks.rank, owner))


class _ReturnedGradients:
    """Gradients of keys and values on their way to whose they are, one step behind the kernels."""

    def __init__(self, ring: Ring, x: Inputs) -> None:
        self._ring = ring
        self._sums = Sum(x.k), Sum(x.v)
        self._transfer = ring.transfer()
        self._coming: tuple[slice, tuple[Tensor, Tensor]] | None = None

    def send(self, owner: int, share_k: Tensor, share_v: Tensor) -> None:
        """This rank's share to ``owner``; who computed in this step with our keys sends us his."""
        self._take_in()
        ring, rank, size = self._ring, self._ring.ranks.rank, self._ring.ranks.size
        taker = (2 * rank - owner) % size
        chunks = ring.needed_chunks(taker, rank)
        rows = rows_of_chunks(chunks, ring.problem.chunk_k) if chunks else slice(0, 0)
        if owner == rank:
            self._coming = (rows, (share_k, share_v))
            return
        transfer = ring.transfer()
        if share_k.shape[1] > 0:
            transfer.send(share_k, owner)
            transfer.send(share_v, owner)
        if chunks:
            count = rows.stop - rows.start
            k, v = transfer.receive(share_k, count, 1, taker), transfer.receive(share_v, count, 1, taker)
            self._coming = (rows, (k, v))
        self._transfer = transfer.start()

    def _take_in(self) -> None:
        self._transfer.wait()
        if self._coming is not None:
            rows, shares = self._coming
            for total, share in zip(self._sums, shares, strict=True):
                total.add(share, rows, 1)
        self._coming = None

    def result(self) -> tuple[Tensor, Tensor]:
        self._take_in()
        dk, dv = (total.result() for total in self._sums)
        return dk, dv


class _Results:
    """Results over different keys for each chunk of queries, merged when they are many and at the end."""

    def __init__(self, x: Inputs, problem: Problem) -> None:
        self._x, self._length = x, problem.chunk_q
        self._parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(problem.chunks_per_rank)]

    def add(self, piece: Piece, out: Tensor, lse: Tensor) -> None:
        length = self._length
        for n, parts in enumerate(self._parts):
            start, stop = max(piece.rows.start, n * length), min(piece.rows.stop, (n + 1) * length)
            if start >= stop:
                continue
            rows = slice(start - piece.rows.start, stop - piece.rows.start)
            part_out, part_lse = rows_of(out, rows, 1), rows_of(lse, rows, 2)
            if stop - start < length:
                whole_out, whole_lse = self._nothing()
                whole_out[:, start - n * length : stop - n * length] = part_out
                whole_lse[:, :, start - n * length : stop - n * length] = part_lse
                part_out, part_lse = whole_out, whole_lse
            parts.append((part_out, part_lse))
            if len(parts) == _MOST_PARTS:
                parts[:] = [_merge(parts)]

    def merged(self) -> tuple[Tensor, Tensor]:
        chunks = [_merge(parts) if parts else self._nothing() for parts in self._parts]
        if len(chunks) == 1:
            return chunks[0]
        return torch.cat([out for out, _ in chunks], dim=1), torch.cat([lse for _, lse in chunks], dim=2)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        """Of queries that see no key."""
        q, v = self._x.q, self._x.v
        dtype = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_full((q.shape[0], q.shape[2], self._length), -torch.inf, dtype=dtype)
        return q.new_zeros(q.shape[0], self._length, q.shape[2], v.shape[-1]), lse


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return merge([out for out, _ in parts], [lse for _, lse in parts])


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The result with exp(sink) in the denominator too. A query that sees nothing keeps its lse of -inf."""
    nothing = torch.isneginf(lse)
    with_sink = torch.where(nothing, lse, torch.logaddexp(lse, sink.to(lse.dtype)[:, None]))
    share = torch.where(nothing, 0, torch.exp(lse - with_sink))
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype), with_sink


def _sink_gradient(result: Result, sink: Tensor) -> Tensor:
    """The sum over rows of exp(sink - lse) * (grad_lse - <grad_out, out>)."""
    wide = result.lse.dtype
    slope = torch.zeros_like(result.lse) if result.grad_lse is None else result.grad_lse
    if result.grad_out is not None:
        slope = slope - torch.linalg.vecdot(result.grad_out.to(wide), result.out.to(wide)).transpose(1, 2)
    share = torch.where(torch.isneginf(result.lse), 0, torch.exp(sink.to(wide)[:, None] - result.lse))
    return (share * slope).sum(dim=(0, 2)).to(sink.dtype)
