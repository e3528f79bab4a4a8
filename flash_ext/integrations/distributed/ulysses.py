"""Rows are exchanged for heads: each rank computes the whole sequence of a part of the heads, one section of them while
another one travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_ext.integrations.distributed.passes import (
    Gradients,
    Inputs,
    Result,
    Sum,
    backward_piece,
    forward_piece,
    own_rng_state,
    taken_in,
)
from flash_ext.integrations.distributed.placements import change_tensors
from flash_ext.integrations.distributed.sections import (
    Section,
    join_heads,
    of_heads,
    of_own_heads,
    options_of,
    sections_of,
)
from flash_ext.integrations.distributed.shards import Problem, Ranks, in_order


def attend_by_heads(
    ranks: Ranks, problem: Problem, q: Tensor, k: Tensor, v: Tensor, deterministic: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's rows."""
    own = _options_of_own_heads(ranks, problem, q.shape[-2], options)
    bias, sink = own.pop("bias", None), own.pop("sink", None)
    own |= dict(window_size=(problem.left, problem.right), top_left=problem.top_left)
    out, lse = _Attention.apply(_Passes(ranks, problem, deterministic, own), q, k, v, bias, sink)
    return out, lse


# ---- Passes ---------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """All rows of a section of this rank's heads, which the backward needs."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class _Passes:
    """The forward and the backward of one rank. Options, bias and sink are those of its heads."""

    def __init__(self, ranks: Ranks, problem: Problem, deterministic: bool, options: dict[str, Any]) -> None:
        self.ranks, self.problem, self.deterministic, self.options = ranks, problem, deterministic, options
        self.dim = 0 if problem.packed else 1  # that of rows
        self.sections: list[Section] = []
        self.exchanges: list[_Exchange] = []  # of the forward, or of the backward

    def exchange(self, tensors: Sequence[Tensor]) -> _Exchange:
        self.exchanges.append(_Exchange(self.ranks, tensors))
        return self.exchanges[-1]

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor, list[_Kept]]:
        """(out, lse) of all heads and this rank's rows, and what the backward needs."""
        size, rows = self.ranks.size, x.q.shape[: self.dim + 1].numel()
        sections = sections_of(size, size * rows, x.q.shape[-2] // size, x.k.shape[-2] // size, self.options)
        self.sections = sections
        kept, returned = [], []
        coming = self.to_heads(x, sections[0])
        for n, section in enumerate(sections):
            q, k, v = (self.all_rows(t, self.dim) for t in coming.wait())
            if n + 1 < len(sections):
                coming = self.to_heads(x, sections[n + 1])
            out, lse = forward_piece(q, k, v, self.options_of(section, x.bias, x.sink))
            returned.append(self.to_rows((out, self.dim), (lse, self.dim + 1)))
            kept.append(_Kept(q, k, v, out, lse))
        out, lse = self.all_heads([exchange.wait() for exchange in returned], (self.dim + 1, self.dim))
        return out, lse, kept

    def backward(
        self,
        kept: list[_Kept],
        bias: Tensor | None,
        sink: Tensor | None,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        needed: Sequence[bool],
    ) -> Gradients:
        returned, of_options = [], []
        coming = self.gradients_to_heads(grad_out, grad_lse, self.sections[0])
        for n, section in enumerate(self.sections):
            own_grad_out, own_grad_lse = self.gradients_of_heads(coming, grad_out, grad_lse)
            if n + 1 < len(self.sections):
                coming = self.gradients_to_heads(grad_out, grad_lse, self.sections[n + 1])
            q, k, v, out, lse = kept[n]
            result, options = Result(out, lse, own_grad_out, own_grad_lse), self.options_of(section, bias, sink)
            parts = backward_piece(q, k, v, result, options, self.deterministic, needed)
            wanted = [part for part, need in zip(parts[:3], needed[:3], strict=True) if need]
            returned.append(self.to_rows(*((part, self.dim) for part in wanted)))
            of_options.append(parts[3:])
        heads = (self.dim + 1,) * sum(needed[:3])
        own = iter(self.all_heads([exchange.wait() for exchange in returned], heads))
        dqkv = [next(own) if need else None for need in needed[:3]]
        dbias = _join_of_bias(bias, [part for part, _ in of_options]) if bias is not None and needed[3] else None
        return *dqkv, dbias, join_heads([part for _, part in of_options], 0) if needed[4] else None

    def options_of(self, section: Section, bias: Tensor | None, sink: Tensor | None) -> dict[str, Any]:
        own = options_of(self.options, section)
        return {**own, "bias": of_heads(bias, section.q, 1), "sink": of_heads(sink, section.q, 0)}

    # ---- Travelling

    def to_heads(self, x: Inputs, section: Section) -> _Exchange:
        """This rank's rows of q, k and v leave for the ranks of their heads."""
        of_tensors = (x.q, section.q), (x.k, section.kv), (x.v, section.kv)
        return self.exchange([_by_heads(t, self.ranks, self.dim + 1, heads) for t, heads in of_tensors])

    def gradients_to_heads(self, grad_out: Tensor | None, grad_lse: Tensor | None, section: Section) -> _Exchange:
        given = (grad_out, self.dim + 1), (grad_lse, self.dim)
        return self.exchange([_by_heads(t, self.ranks, heads, section.q) for t, heads in given if t is not None])

    def gradients_of_heads(
        self, coming: _Exchange, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        arrived = iter(coming.wait())
        own_out = None if grad_out is None else self.all_rows(next(arrived), self.dim)
        return own_out, None if grad_lse is None else self.all_rows(next(arrived), self.dim + 1)

    def to_rows(self, *tensors: tuple[Tensor, int]) -> _Exchange:
        """All rows of own heads leave for the ranks of those rows; each tensor with its dimension of rows."""
        return self.exchange([_by_rows(t, self.problem, rows) for t, rows in tensors])

    def all_rows(self, arrived: Tensor, rows: int) -> Tensor:
        return in_order(arrived.unbind(0), self.problem.layout, rows)

    def all_heads(self, sections: list[list[Tensor]], heads: Sequence[int]) -> list[Tensor]:
        """Of each tensor, (ranks, ...) from each section: the heads of a rank are together, section after section."""
        joined = []
        for parts, dim in zip(zip(*sections, strict=True), heads, strict=True):
            of_ranks = torch.cat([part.movedim(0, dim) for part in parts], dim + 1)
            joined.append(of_ranks.flatten(dim, dim + 1))
        return joined


def _join_of_bias(bias: Tensor, parts: list[Tensor]) -> Tensor:
    if len(parts) == 1 or bias.shape[1] > 1:
        return join_heads(parts, 1)
    total = Sum(bias)
    for part in parts:
        total.add(part, slice(0, 1), 1)
    return total.result()


class _Attention(torch.autograd.Function):
    """The passes, recorded by autograd. The exchanged rows are kept, so that they travel once."""

    @staticmethod
    def forward(
        ctx: Any, passes: _Passes, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with taken_in(passes.exchanges):
            out, lse, kept = passes.forward(Inputs(q, k, v, bias, sink))
        ctx.save_for_backward(bias, sink, *(t for part in kept for t in part))
        ctx.passes, ctx.shape = passes, out.shape
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        bias, sink, *flat = ctx.saved_tensors
        kept = [_Kept(*flat[n : n + 5]) for n in range(0, len(flat), 5)]
        if grad_out is None and grad_lse is None:
            grad_out = flat[0].new_zeros(ctx.shape)  # other ranks wait for what this one sends
        with taken_in(ctx.passes.exchanges):
            gradients = ctx.passes.backward(kept, bias, sink, grad_out, grad_lse, ctx.needs_input_grad[1:])
        return None, *gradients


# ---- Options --------------------------------------------------------------------------------------------------------


def _options_of_own_heads(ranks: Ranks, problem: Problem, heads: int, options: dict[str, Any]) -> dict[str, Any]:
    per_rank = heads // ranks.size
    own = slice(ranks.rank * per_rank, (ranks.rank + 1) * per_rank)

    def change(name: str, x: Tensor) -> Tensor:
        matrix = name in ("bias", "mask")
        return _matrix_of_own_heads(x, ranks, problem, own) if matrix else of_own_heads(name, x, own)

    changed = change_tensors(options, change)
    if "rng_state" in options:
        changed["rng_state"] = own_rng_state(options["rng_state"], ranks.rank)
    return changed


def _matrix_of_own_heads(x: Tensor, ranks: Ranks, problem: Problem, own: slice) -> Tensor:
    """Of a bias or mask (batch|1, heads|1, own rows|1, keys|1): all rows, own heads. That of packed sequences has all
    rows on every rank."""
    if problem.packed or x.shape[2] == 1:
        return x if x.shape[1] == 1 else x[:, own]
    x = x.expand(-1, ranks.size, -1, -1) if x.shape[1] == 1 else x
    travels = x.to(torch.uint8) if x.dtype == torch.bool else x
    return _Matrix.apply(travels, ranks, problem).to(x.dtype)


class _Matrix(torch.autograd.Function):
    """A matrix (batch|1, heads, own rows, keys|1) as (..., own heads, all rows, ...). It travels before q, k and v."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, problem: Problem) -> Tensor:
        ctx.ranks, ctx.problem = ranks, problem
        shards = _Exchange(ranks, [_by_heads(x, ranks, 1, slice(0, x.shape[1] // ranks.size))]).wait()[0]
        return in_order(shards.unbind(0), problem.layout, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shards = _Exchange(ctx.ranks, [_by_rows(gradient, ctx.problem, 2)]).wait()[0]
        return torch.cat(shards.unbind(0), 1), None, None


# ---- Exchange -------------------------------------------------------------------------------------------------------


def _by_heads(x: Tensor, ranks: Ranks, heads: int, section: slice) -> Tensor:
    """Of each rank's heads a section: (ranks, ...)."""
    of_ranks = x.unflatten(heads, (ranks.size, x.shape[heads] // ranks.size))
    return of_ranks.narrow(heads + 1, section.start, section.stop - section.start).movedim(heads, 0)


def _by_rows(x: Tensor, problem: Problem, rows: int) -> Tensor:
    """Each rank's rows: (ranks, ...)."""
    chunks = x.chunk(problem.size * problem.chunks_per_rank, rows)
    if problem.chunks_per_rank == 1:
        return torch.stack(chunks)
    return torch.stack([torch.cat([chunks[n] for n in problem.chunks_of(rank)], rows) for rank in range(problem.size)])


class _Exchange:
    """Tensors (ranks, ...) on their way: entry r goes to rank r, and comes from it. On CUDA they travel on the
    communicator's stream, beside the kernels of the current one."""

    def __init__(self, ranks: Ranks, tensors: Sequence[Tensor]) -> None:
        self._sent = [x.contiguous() for x in tensors]  # until they have left
        self._received = [torch.empty_like(x) for x in self._sent]
        self._works = [
            dist.all_to_all_single(received, sent, group=ranks.group, async_op=True)
            for received, sent in zip(self._received, self._sent, strict=True)
        ]

    def wait(self) -> list[Tensor]:
        """What arrived may be read: on CUDA it is the current stream that waits, and not the host."""
        for work in self._works:
            work.wait()
        received = self._received
        self._works, self._sent, self._received = [], [], []
        return received
