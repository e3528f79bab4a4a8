"""What ``attention`` would refuse of the whole sequence is refused on all ranks alike, before anything travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_ext.argument_checks import as_integer
from flash_ext.eager import call
from flash_ext.functional import checked_score_options
from flash_ext.integrations.distributed.gather import check_lengths, rows_of_block_mask
from flash_ext.integrations.distributed.shards import Problem

_CHECK = torch.ops.flash_ext.attention_check.default


def check_call(problem: Problem, method: str, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    """Runs the operator's own checks: on all keys and as many queries as one piece has, of all heads.

    A piece of the call is no place to find an error: slices fit together where the whole does not, and what other
    ranks have sent would be left behind.

    Args:
        options: those of the call but for the window, which is the problem's. max_seqlen_* of sequences that are not
            packed are taken out: pieces have other lengths.
    """
    dim = 0 if problem.packed else 1
    if not problem.packed:
        _take_out_lengths(problem, options)
    whole = problem.packed or method == "ulysses"
    rows = problem.size * problem.rows_q if whole else problem.chunk_q
    rows_k, rows_v = (problem.size * x.shape[dim] for x in (k, v))
    given = dict(options, window_size=(problem.left, problem.right), top_left=problem.top_left)
    for name in ("bias", "mask"):
        if name in given and not problem.packed:
            given[name] = _with_queries(name, given[name], problem.rows_q, rows)
    if "block_mask" in given and not whole:
        check_lengths(given["block_mask"], problem)
        given["block_mask"] = rows_of_block_mask(given["block_mask"], 0, problem)
    q, k, v = (_with_rows(x, count, dim) for x, count in zip((q, k, v), (rows, rows_k, rows_v), strict=True))
    with torch.no_grad():
        call(_CHECK, q, k, v, *checked_score_options(q, k, **given))


def _take_out_lengths(problem: Problem, options: dict[str, Any]) -> None:
    for side, rows in (("q", problem.rows_q), ("k", problem.rows_k)):
        name = f"max_seqlen_{side}"
        if name in options and as_integer(name, options.pop(name)) not in (0, problem.size * rows):
            raise ValueError(f"{name} belongs to cu_seqlens_{side}: without it expected {problem.size * rows} or none")


def _with_queries(name: str, x: Tensor, own: int, rows: int) -> Tensor:
    """Of a bias or mask of this rank's queries, a view that has some number of rows."""
    if x.dim() != 4 or x.shape[2] == 1:
        return x
    if x.shape[2] != own:
        raise ValueError(
            f"{name} must have the {own} queries of this rank in dimension 2, or 1, got shape {tuple(x.shape)}"
        )
    return x if own == 0 else x[:, :, :1].expand(-1, -1, rows, -1)


def _with_rows(x: Tensor, rows: int, dim: int) -> Tensor:
    return stand_in(x, (*x.shape[:dim], rows, *x.shape[dim + 1 :]))


def stand_in(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor to be checked, of the layout of ``x`` in its last dimension, and of no more memory than that takes.
    Lengths and indices are 0."""
    make = x.new_empty if x.is_floating_point() else x.new_zeros
    return make(shape[-1] if shape and x.stride(-1) == 1 else 1).expand(shape)
