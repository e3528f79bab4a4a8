"""Rows are exchanged for heads: each rank computes the whole sequence of a part of the heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_ext.functional import attention
from flash_ext.integrations.distributed.passes import own_rng_state
from flash_ext.integrations.distributed.shards import Problem, Ranks, in_order


def ulysses(
    ranks: Ranks, problem: Problem, q: Tensor, k: Tensor, v: Tensor, deterministic: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's rows."""
    dim = 0 if problem.packed else 1
    rows = [_all_rows_of_own_heads(x, ranks, problem, dim, dim + 1) for x in (q, k, v)]
    own = _options_of_own_heads(ranks, problem, q.shape[-2], options)
    own |= dict(window_size=(problem.left, problem.right), top_left=problem.top_left)
    out, lse = attention(*rows, return_lse=True, deterministic=deterministic or None, **own)
    # lse has its heads before its rows.
    return (
        _own_rows_of_all_heads(out, ranks, problem, dim, dim + 1),
        _own_rows_of_all_heads(lse, ranks, problem, dim + 1, dim),
    )


def _options_of_own_heads(ranks: Ranks, problem: Problem, heads: int, options: dict[str, Any]) -> dict[str, Any]:
    per_rank = heads // ranks.size
    own = slice(ranks.rank * per_rank, (ranks.rank + 1) * per_rank)
    changed = dict(options)
    for name in ("sink", "alibi_slopes"):
        if name in options:
            changed[name] = options[name][..., own]
    for name in ("bias", "mask"):
        if name in options:
            changed[name] = _matrix_of_own_heads(options[name], ranks, problem, own)
    if "block_mask" in options and options["block_mask"].offsets.shape[1] > 1:
        mask = options["block_mask"]
        changed["block_mask"] = replace(mask, offsets=mask.offsets[:, own])
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
    return _all_rows_of_own_heads(travels, ranks, problem, 2, 1).to(x.dtype)


def _all_rows_of_own_heads(x: Tensor, ranks: Ranks, problem: Problem, dim: int, heads: int) -> Tensor:
    """(..., own rows, all heads, ...) as (..., all rows, own heads, ...); ``dim`` is that of rows."""
    shards = torch.stack(x.split(x.shape[heads] // ranks.size, dim=heads))
    return in_order(_AllToAll.apply(shards, ranks).unbind(0), problem.layout, dim)


def _own_rows_of_all_heads(x: Tensor, ranks: Ranks, problem: Problem, dim: int, heads: int) -> Tensor:
    """The reverse."""
    chunks = x.chunk(ranks.size * problem.chunks_per_rank, dim)
    shards = [torch.cat([chunks[n] for n in problem.chunks_of(rank)], dim) for rank in range(ranks.size)]
    return torch.cat(_AllToAll.apply(torch.stack(shards), ranks).unbind(0), heads)


class _AllToAll(torch.autograd.Function):
    """x (ranks, ...): entry r goes to rank r, and comes from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _exchange(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.ranks), None


def _exchange(x: Tensor, ranks: Ranks) -> Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x, group=ranks.group)
    return result
