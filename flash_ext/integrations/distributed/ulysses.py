"""Rows are exchanged for heads: each rank computes the whole sequence of a part of the heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_ext.functional import attention
from flash_ext.integrations.distributed.passes import own_rng_state
from flash_ext.integrations.distributed.placements import change_tensors, dim_of
from flash_ext.integrations.distributed.shards import Problem, Ranks, in_order, rows_of


def attend_by_heads(
    ranks: Ranks, problem: Problem, q: Tensor, k: Tensor, v: Tensor, deterministic: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's rows."""
    rows = 0 if problem.packed else 1
    heads = rows + 1
    own = _options_of_own_heads(ranks, problem, q.shape[-2], options)
    own |= dict(window_size=(problem.left, problem.right), top_left=problem.top_left)
    q, k, v = (_all_rows_of_own_heads(x, ranks, problem, rows, heads) for x in (q, k, v))
    out, lse = attention(q, k, v, return_lse=True, deterministic=deterministic, **own)
    # lse has its heads before its rows.
    return (
        _own_rows_of_all_heads(out, ranks, problem, rows, heads),
        _own_rows_of_all_heads(lse, ranks, problem, heads, rows),
    )


# ---- Options --------------------------------------------------------------------------------------------------------


def _options_of_own_heads(ranks: Ranks, problem: Problem, heads: int, options: dict[str, Any]) -> dict[str, Any]:
    per_rank = heads // ranks.size
    own = slice(ranks.rank * per_rank, (ranks.rank + 1) * per_rank)

    def change(name: str, x: Tensor) -> Tensor:
        if name in ("bias", "mask") and x.shape[2] > 1 and not problem.packed:
            return _matrix_of_own_heads(x, ranks, problem)
        dim = dim_of(name, x, "heads")
        return x if dim is None else rows_of(x, own, dim)

    changed = change_tensors(options, change)
    if "rng_state" in options:
        changed["rng_state"] = own_rng_state(options["rng_state"], ranks.rank)
    return changed


def _matrix_of_own_heads(x: Tensor, ranks: Ranks, problem: Problem) -> Tensor:
    """Of a bias or mask (batch|1, heads|1, own rows, keys|1): all rows, own heads."""
    x = x.expand(-1, ranks.size, -1, -1) if x.shape[1] == 1 else x
    travels = x.to(torch.uint8) if x.dtype == torch.bool else x
    return _all_rows_of_own_heads(travels, ranks, problem, 2, 1).to(x.dtype)


# ---- Exchange -------------------------------------------------------------------------------------------------------


def _all_rows_of_own_heads(x: Tensor, ranks: Ranks, problem: Problem, rows: int, heads: int) -> Tensor:
    """(..., own rows, all heads, ...) as (..., all rows, own heads, ...); ``rows``, ``heads``: their dimensions."""
    of_ranks = x.unflatten(heads, (ranks.size, x.shape[heads] // ranks.size)).movedim(heads, 0)
    return in_order(_AllToAll.apply(of_ranks, ranks).unbind(0), problem.layout, rows)


def _own_rows_of_all_heads(x: Tensor, ranks: Ranks, problem: Problem, rows: int, heads: int) -> Tensor:
    """The reverse."""
    chunks = x.chunk(ranks.size * problem.chunks_per_rank, rows)
    of_ranks = [torch.cat([chunks[n] for n in problem.chunks_of(rank)], rows) for rank in range(ranks.size)]
    return _AllToAll.apply(torch.stack(of_ranks), ranks).movedim(0, heads).flatten(heads, heads + 1)


class _AllToAll(torch.autograd.Function):
    """x (ranks, ...): entry r goes to rank r, and comes from it. The call (on CUDA the current stream) waits for that,
    so an error in attention leaves nothing on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _exchange(x, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.ranks), None


def _exchange(x: Tensor, ranks: Ranks) -> Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x, group=ranks.group)
    return result
