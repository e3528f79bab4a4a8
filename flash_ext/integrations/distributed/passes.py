"""What the ways of context parallelism share: transfers, one piece of attention in both directions, sums of parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_ext.eager import call
from flash_ext.functional import attention, checked_score_options
from flash_ext.integrations.distributed.shards import Piece, Problem, Ranks, needed_chunks, rows_of, rows_of_chunks
from flash_ext.ops import ScoreOptions

_BACKWARD = torch.ops.flash_ext.attention_backward.default


class Transfer:
    """Tensors on their way. On CUDA they travel on the communicator's stream, beside the kernels of the current one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._operations: list[dist.P2POp] = []
        self._works: list[Any] = []
        self._kept: list[Tensor] = []  # until they have left

    def send(self, x: Tensor, rank: int) -> None:
        x = x.contiguous()
        self._kept.append(x)
        self._operations.append(dist.P2POp(dist.isend, x, self._ranks.peer(rank), self._ranks.group))

    def receive(self, like: Tensor, rows: int, dim: int, rank: int) -> Tensor:
        """What arrives: as ``like``, but for the rows."""
        x = like.new_empty([*like.shape[:dim], rows, *like.shape[dim + 1 :]])
        self._operations.append(dist.P2POp(dist.irecv, x, self._ranks.peer(rank), self._ranks.group))
        return x

    def start(self) -> Transfer:
        self._works = dist.batch_isend_irecv(self._operations) if self._operations else []
        return self

    def wait(self) -> None:
        """What was received may be read: on CUDA it is the current stream that waits, and not the host."""
        for work in self._works:
            work.wait()
        self._works, self._kept, self._operations = [], [], []


@contextmanager
def taken_in(transfers: list[Transfer]) -> Iterator[None]:
    """After an error those on their way are waited for: the group would hang in what it does next. The list is empty
    behind that."""
    try:
        yield
    except Exception:
        for transfer in transfers:
            with suppress(Exception):  # it is the first error that tells what is wrong
                transfer.wait()
        raise
    finally:
        transfers.clear()


class Inputs(NamedTuple):
    """What has a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None


class Result(NamedTuple):
    """What a backward starts from: the result over all keys, and its gradients."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor | None
    grad_lse: Tensor | None

    def rows(self, rows: slice, dim: int) -> Result:
        grad_out = None if self.grad_out is None else rows_of(self.grad_out, rows, dim)
        grad_lse = None if self.grad_lse is None else rows_of(self.grad_lse, rows, -1).contiguous()
        return Result(rows_of(self.out, rows, dim), rows_of(self.lse, rows, -1).contiguous(), grad_out, grad_lse)


Gradients = tuple[Tensor | None, ...]  # of Inputs


class Passes:
    """The forward and the backward of one call on one rank."""

    def __init__(self, ranks: Ranks, problem: Problem, deterministic: bool, options: dict[str, Any]) -> None:
        self.ranks, self.problem, self.deterministic, self.options = ranks, problem, deterministic, options
        self.dim = 0 if problem.packed else 1  # that of rows
        self.transfers: list[Transfer] = []  # of the forward, or of the backward

    def transfer(self) -> Transfer:
        self.transfers.append(Transfer(self.ranks))
        return self.transfers[-1]

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def backward(self, x: Inputs, result: Result, needed: Sequence[bool]) -> Gradients:
        raise NotImplementedError

    def needed_chunks(self, rank: int, owner: int) -> tuple[int, ...]:
        return needed_chunks(self.problem, rank, owner)

    def send_chunks(self, transfer: Transfer, x: Inputs, rank: int) -> None:
        """Keys and values of this rank that another one needs."""
        chunks = self.needed_chunks(rank, self.ranks.rank)
        if chunks:
            rows = rows_of_chunks(chunks, self.problem.chunk_k)
            transfer.send(rows_of(x.k, rows, self.dim), rank)
            transfer.send(rows_of(x.v, rows, self.dim), rank)

    def receive_chunks(self, transfer: Transfer, x: Inputs, owner: int) -> tuple[Tensor, Tensor]:
        """Those of an owner that this rank needs, perhaps none."""
        count = len(self.needed_chunks(self.ranks.rank, owner)) * self.problem.chunk_k
        if count == 0:
            return rows_of(x.k, slice(0, 0), self.dim), rows_of(x.v, slice(0, 0), self.dim)
        return transfer.receive(x.k, count, self.dim, owner), transfer.receive(x.v, count, self.dim, owner)

    def own_chunks(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """The same of this rank's own."""
        chunks = self.needed_chunks(self.ranks.rank, self.ranks.rank)
        rows = rows_of_chunks(chunks, self.problem.chunk_k) if chunks else slice(0, 0)
        return rows_of(x.k, rows, self.dim), rows_of(x.v, rows, self.dim)

    def options_of(self, piece: Piece, bias: Tensor | None, columns: slice) -> dict[str, Any]:
        """Options of ``attention`` for a piece; ``columns``: where its keys lie in the sequence."""
        own = dict(self.options, window_size=piece.window, top_left=piece.top_left)
        if bias is not None:
            own["bias"] = _part_of(bias, piece.rows, columns)
        if "mask" in own:
            own["mask"] = _part_of(own["mask"], piece.rows, columns)
        if "rng_state" in own:
            own["rng_state"] = own_rng_state(own["rng_state"], piece.number)
        return own


def _part_of(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """Of a bias or mask (batch|1, heads|1, rows|1, columns|1)."""
    x = x if x.shape[2] == 1 else x[:, :, rows]
    return x if x.shape[3] == 1 else x[..., columns]


def own_rng_state(rng_state: Tensor, number: int) -> Tensor:
    """Another seed for each piece: kernels count queries and keys from the start of what they are given."""
    step = (number + 1) * 0x9E3779B97F4A7C15 % 2**64  # around the circle of seeds by the golden ratio
    return torch.stack([rng_state[0] + (step - 2**64 if step >= 2**63 else step), rng_state[1]])


def forward_piece(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out, lse


def backward_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Result,
    options: dict[str, Any],
    deterministic: bool,
    needed: Sequence[bool],
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dbias, dsink); one that is not needed is empty."""
    scores = ScoreOptions(*checked_score_options(q, k, **options))
    out, lse, grad_out, grad_lse = result
    gradients: tuple[Tensor, ...] = call(
        _BACKWARD, grad_out, grad_lse, q, k, v, out, lse, deterministic, *needed, *scores
    )
    return gradients


class Sum:
    """A gradient that comes in parts, summed in float32 or wider; one that comes whole is not copied."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._whole: Tensor | None = None
        self._sum: Tensor | None = None

    def add(self, part: Tensor, rows: slice, dim: int) -> None:
        """A part of some rows."""
        if self._sum is None and self._whole is None and rows == slice(0, self._like.shape[dim]):
            self._whole = part
        else:
            rows_of(self._total(), rows, dim).add_(part)

    def add_of_bias(self, part: Tensor, rows: slice, columns: slice) -> None:
        """The same of a bias (batch|1, heads|1, rows|1, columns|1)."""
        _part_of(self._total(), rows, columns).add_(part)

    def result(self) -> Tensor:
        return self._total().to(self._like.dtype) if self._whole is None else self._whole

    def _total(self) -> Tensor:
        if self._sum is None:
            wide = torch.promote_types(self._like.dtype, torch.float32)
            begin = torch.zeros_like(self._like, dtype=wide) if self._whole is None else self._whole.to(wide, copy=True)
            self._sum, self._whole = begin, None
        return self._sum


class Differentiable(torch.autograd.Function):
    """``passes``, recorded by autograd."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        with taken_in(passes.transfers):
            out, lse = passes.forward(Inputs(*inputs))  # type: ignore[arg-type]
        ctx.save_for_backward(*inputs, out, lse)
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        *inputs, out, lse = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            grad_out = torch.zeros_like(out)  # other ranks wait for what this one sends
        if grad_out is not None and grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        needed = ctx.needs_input_grad[1:]
        with taken_in(ctx.passes.transfers):
            gradients = ctx.passes.backward(Inputs(*inputs), Result(out, lse, grad_out, grad_lse), needed)
        return None, *(gradient if need else None for gradient, need in zip(gradients, needed, strict=True))
