"""Heads in sections: what the next section needs travels while attention computes this one. Heads are independent, so
nothing has to be merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_ext.integrations.distributed.passes import Inputs, Result
from flash_ext.integrations.distributed.placements import change_tensors, dim_of
from flash_ext.integrations.distributed.shards import rows_of

MOST_SECTIONS = 4
"""All but the first travel beside kernels: of three quarters."""

LEAST_ROWS = 2**16
"""Of queries, over batch entries and heads, in each section: four waves of CTAs of 128 queries on a GPU of 132 SMs, so
that the tail wave of a section is a small part. Reasoned, not measured."""


class Section(NamedTuple):
    """Some heads of q, and those of k and v that they attend to."""

    q: slice
    kv: slice


def sections_of(size: int, rows: int, heads_q: int, heads_kv: int, options: dict[str, Any]) -> list[Section]:
    """As many sections of equal size as have enough to compute, at most 4; the same on all ranks.

    It is one where nothing travels, and with dropout, because random bits count heads from the first of a call.

    Args:
        size: the number of ranks.
        rows: of queries that one rank computes, of all batch entries.
        heads_q, heads_kv: that one rank computes.
        options: those of the call.
    """
    counts = [n for n in range(2, MOST_SECTIONS + 1) if heads_kv % n == 0 and rows * heads_q // n >= LEAST_ROWS]
    alone = size == 1 or options.get("dropout_p", 0.0) > 0
    count = 1 if alone else max(counts, default=1)
    of_q, of_kv = heads_q // count, heads_kv // count
    return [Section(slice(n * of_q, (n + 1) * of_q), slice(n * of_kv, (n + 1) * of_kv)) for n in range(count)]


def inputs_of(x: Inputs, section: Section, dim: int) -> Inputs:
    """Views; ``dim``: that of heads."""
    q, (k, v) = rows_of(x.q, section.q, dim), (rows_of(t, section.kv, dim) for t in (x.k, x.v))
    return Inputs(q, k, v, of_heads(x.bias, section.q, 1), of_heads(x.sink, section.q, 0))


def result_of(result: Result, section: Section, dim: int) -> Result:
    """The same of a result and its gradients; lse has its heads before its rows."""
    outs = (None if t is None else rows_of(t, section.q, dim) for t in (result.out, result.grad_out))
    lses = (None if t is None else rows_of(t, section.q, -2) for t in (result.lse, result.grad_lse))
    (out, grad_out), (lse, grad_lse) = outs, lses
    assert out is not None and lse is not None
    return Result(out, lse, grad_out, grad_lse)


def options_of(options: dict[str, Any], section: Section) -> dict[str, Any]:
    """Options of all heads, but for inputs, which are the section's already."""
    inputs = ("bias", "sink")
    return change_tensors(options, lambda name, x: x if name in inputs else of_own_heads(name, x, section.q))


def of_own_heads(name: str, x: Tensor, heads: slice) -> Tensor:
    """Of an option; itself if all heads share it."""
    dim = dim_of(name, x, "heads")
    return x if dim is None else rows_of(x, heads, dim)


def of_heads(x: Any, heads: slice, dim: int) -> Any:
    """Of a tensor that may be the same for all heads, or None."""
    return x if x is None or x.shape[dim] == 1 else rows_of(x, heads, dim)


def join_heads(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
