"""Attention over a sequence that lies in shards on the ranks of a process group (context parallelism).

Three ways: "ring" computes with one remote shard at a time while the next one travels (Liu et al. 2023), "gather"
brings all keys that are visible and computes with them at once, "ulysses" exchanges rows for heads (Jacobs et al.
2023). In the first two only those chunks of keys and values travel that the mask shows to somebody, straight from who
has them to who needs them, and gradients of keys and values the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flash_ext.argument_checks import (
    as_flag,
    as_integer,
    as_number,
    check_names,
    check_optional_tensors,
    check_tensors,
    check_window,
)
from flash_ext.functional import SCORE_OPTIONS, check_type_of_block_mask, draw_rng_state
from flash_ext.integrations.distributed.checks import check_call
from flash_ext.integrations.distributed.gather import Gather, counts_alibi_distances, divides_chunks
from flash_ext.integrations.distributed.passes import Differentiable
from flash_ext.integrations.distributed.ring import Ring
from flash_ext.integrations.distributed.shards import Layout, Problem, Ranks, chunks_of, in_order
from flash_ext.integrations.distributed.ulysses import attend_by_heads
from flash_ext.libraries import OPS
from flash_ext.ops import autocast_first
from flash_ext.torch_private import arguments_of

__all__ = ["Layout", "Method", "context_parallel_attention", "join_sequence", "split_sequence"]

Method = Literal["auto", "ring", "gather", "ulysses"]


@torch.compiler.disable
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    *,
    layout: Layout = "contiguous",
    method: Method = "auto",
    return_lse: bool = False,
    deterministic: bool | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_ext.attention`` of a sequence of which each rank of ``group`` holds a shard, exact and differentiable.

    All ranks call it, with shards of one size and the same options, and all run its backward. What each of them holds a
    copy of (a sink, a bias of one row or of packed sequences) gets the gradient of this rank's queries (with Ulysses,
    of its heads), as parameters do: sum it over the group as you do theirs.

    Args:
        q: this rank's rows, (batch, seqlen_q / ranks, heads_q, head_dim), or packed (total_q / ranks, heads_q,
            head_dim) with ``cu_seqlens_q`` and ``cu_seqlens_k``.
        k, v: likewise.
        group: of ``torch.distributed``; None is the default group. NCCL for CUDA, gloo for a CPU.
        layout: which rows are whose (see ``split_sequence``): "contiguous", or "zigzag", with which all ranks have the
            same work under a causal mask.
        method: "ring", "gather" or "ulysses". "auto" is the first of them that has the options: "gather" with packed
            sequences, alibi_slopes or a block_mask, "ulysses" with one whose rows of blocks do not divide a chunk of
            queries. Ulysses needs heads_q and heads_kv that the number of ranks divides.
        return_lse: also return the log-sum-exp of this rank's queries.
        deterministic: as for ``flash_ext.attention``.
        **options: those of ``flash_ext.attention``. Lengths (cu_seqlens_*, max_seqlen_*) are those of the whole
            sequences, the same on all ranks; give one tensor as cu_seqlens_q and cu_seqlens_k where they are equal. A
            bias or mask has this rank's queries and all keys, in the order of the sequence: (batch|1, heads_q|1,
            seqlen_q / ranks|1, seqlen_k|1); of packed sequences, only with "ulysses", it counts from the start of each
            sequence, as for ``attention``, and is the same on all ranks. A block_mask is that of the whole sequences.
            dropout draws other random bits than one GPU would; rng_state, if given, is the same on all ranks.

    Returns:
        This rank's rows of the result, (batch, seqlen_q / ranks, heads_q, head_dim_v), or (out, lse) with lse (batch,
        heads_q, seqlen_q / ranks); of packed sequences without batch.

    Raises:
        ValueError: a layout or method that does not exist; rows or heads that do not divide; a block_mask that does not
            fit the chunks.
        NotImplementedError: an option that the method does not have, by name.
        RuntimeError, TypeError: as ``flash_ext.attention``.
    """
    check_tensors(q=q, k=k, v=v)
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type):
        cast = [q, k, v]
        autocast_first(3)(cast, device_type)
        with torch.autocast(device_type, enabled=False):  # what travels, and what the backward starts from, is cast too
            given: dict[str, Any] = dict(layout=layout, method=method, return_lse=return_lse)
            given |= dict(deterministic=deterministic, **options)
            return context_parallel_attention(cast[0], cast[1], cast[2], group, **given)
    check_names("context_parallel_attention()", options, SCORE_OPTIONS)
    _check_choice("layout", layout, ("contiguous", "zigzag"))
    _check_choice("method", method, ("auto", "ring", "gather", "ulysses"))
    return_lse = as_flag("return_lse", return_lse)
    if deterministic is not None:
        deterministic = as_flag("deterministic", deterministic)
    how = prepare(q, k, v, group, layout, method, options)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if how.method == "ulysses":
        out, lse = attend_by_heads(how.ranks, how.problem, q, k, v, deterministic, how.options)
    else:
        bias, sink = how.options.pop("bias", None), how.options.pop("sink", None)
        passes = (Ring if how.method == "ring" else Gather)(how.ranks, how.problem, deterministic, how.options)
        out, lse = Differentiable.apply(passes, q, k, v, bias, sink)
    return (out, lse) if return_lse else out


class Prepared(NamedTuple):
    """A call after all checks: how it is computed."""

    ranks: Ranks
    problem: Problem
    method: Method  # not "auto"
    options: dict[str, Any]  # those that are given, but for the window, which is the problem's


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    layout: Layout,
    method: Method,
    options: dict[str, Any],
) -> Prepared:
    """Raises what ``context_parallel_attention`` raises of these arguments. Nothing travels."""
    _check_types(options)
    options = {name: value for name, value in options.items() if value is not None}
    ranks = Ranks(group)
    problem = _problem_of(ranks, layout, q, k, v, options)
    if method == "auto":
        method = _method_for(problem, options, q, k)
    _check_sizes(problem, method, q, k)
    _check_options(problem, method, options)
    if options.get("dropout_p", 0.0) > 0 and "rng_state" not in options:
        options["rng_state"] = draw_rng_state(q.device)
    check_call(problem, method, q, k, v, options)
    return Prepared(ranks, problem, method, options)


def split_sequence(
    x: Tensor, group: dist.ProcessGroup | None, *, layout: Layout = "contiguous", dim: int = 1
) -> Tensor:
    """This rank's rows of a whole sequence.

    Args:
        x: all rows, the same on each rank.
        group: as for ``context_parallel_attention``.
        layout: "contiguous": rank r of n has the r-th of n equal chunks. "zigzag": chunks r and 2n - 1 - r of 2n, one
            behind the other.
        dim: that of rows: 1, or 0 of packed sequences.

    Returns:
        The rows, a view if contiguous. Differentiable.

    Raises:
        ValueError: a layout or dimension that does not exist, or a number of rows that does not divide.
        TypeError: x is no tensor, or dim no integer.
    """
    _check_sequence(x, layout, dim)
    ranks = Ranks(group)
    count = ranks.size * (1 if layout == "contiguous" else 2)
    if x.shape[dim] % count:
        raise ValueError(f"x must have a multiple of {count} rows in dimension {dim}, got shape {tuple(x.shape)}")
    chunks = x.chunk(count, dim)
    own = [chunks[n] for n in chunks_of(ranks.rank, ranks.size, layout)]
    return own[0] if len(own) == 1 else torch.cat(own, dim)


def join_sequence(x: Tensor, group: dist.ProcessGroup | None, *, layout: Layout = "contiguous", dim: int = 1) -> Tensor:
    """The reverse of ``split_sequence``.

    Args:
        x: this rank's rows.
        group, layout, dim: as for ``split_sequence``.

    Returns:
        All rows, on every rank. Not differentiable.

    Raises:
        ValueError: a layout or dimension that does not exist.
        TypeError: x is no tensor, or dim no integer.
    """
    _check_sequence(x, layout, dim)
    x = x.detach().contiguous()
    shards = [torch.empty_like(x) for _ in range(Ranks(group).size)]
    dist.all_gather(shards, x, group=group)
    return in_order(shards, layout, dim)


# ---- Checks ---------------------------------------------------------------------------------------------------------


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_types(options: dict[str, Any]) -> None:
    """Before the options are split up among pieces of the keys, of which some have none."""
    for name in sorted({"causal", "top_left"} & options.keys()):
        as_flag(name, options[name])
    for name in sorted({"softcap", "dropout_p"} & options.keys()):
        as_number(name, options[name])
    check_optional_tensors(**{name: options[name] for name in sorted(_TENSORS & options.keys())})
    if options.get("block_mask") is not None:
        check_type_of_block_mask(options["block_mask"])


_TENSORS = SCORE_OPTIONS & {a.name for a in arguments_of(OPS.attention_check.default) if "Tensor" in str(a.type)}


def _check_sequence(x: Tensor, layout: str, dim: int) -> None:
    check_tensors(x=x)
    _check_choice("layout", layout, ("contiguous", "zigzag"))
    if not -x.dim() <= as_integer("dim", dim) < x.dim():
        raise ValueError(f"dim must be a dimension of x, {tuple(x.shape)}, got {dim}")


def _problem_of(ranks: Ranks, layout: Layout, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Problem:
    """The window is taken out of the options: each piece has one of its own."""
    if ("cu_seqlens_q" in options) != ("cu_seqlens_k" in options):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together")
    packed = "cu_seqlens_q" in options
    dims = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(x.shape)}")
    left, right = check_window(options.pop("window_size", (-1, -1)))
    for side, size in enumerate((left, right)):
        if size < -1:
            raise ValueError(f"window_size[{side}] must be >= -1 (-1 = unlimited), got {size}")
    right = 0 if options.pop("causal", False) else right
    top_left = options.pop("top_left", False)
    rows_q, rows_k = q.shape[dims - 3], k.shape[dims - 3]
    same = options.get("cu_seqlens_q") is options.get("cu_seqlens_k")
    return Problem(ranks.size, layout, rows_q, rows_k, left, right, top_left, packed, same)


def _check_sizes(problem: Problem, method: str, q: Tensor, k: Tensor) -> None:
    if problem.chunks_per_rank == 2 and (problem.rows_q % 2 or problem.rows_k % 2):
        rows = f"{problem.rows_q} of queries and {problem.rows_k} of keys"
        raise ValueError(f"layout 'zigzag' needs an even number of rows on each rank, got {rows}")
    for name, x in (("q", q), ("k", k)):
        if method == "ulysses" and x.shape[-2] % problem.size:
            raise ValueError(
                f"{name} must have a number of heads that {problem.size} ranks divide with method 'ulysses', got "
                f"{x.shape[-2]}"
            )


def _method_for(problem: Problem, options: dict[str, Any], q: Tensor, k: Tensor) -> Method:
    """The first one that has the options, on all ranks the same. With a block mask that chunks would cut within rows of
    blocks that is Ulysses, if it has the heads."""
    cuts_blocks = "block_mask" in options and not divides_chunks(options["block_mask"], problem)
    if cuts_blocks and all(x.shape[-2] % problem.size == 0 for x in (q, k)):
        return "ulysses"
    methods: tuple[Method, ...] = ("ring", "gather")
    for method in methods:
        with suppress(NotImplementedError):
            _check_options(problem, method, options)
            return method
    return "ulysses"


def _check_options(problem: Problem, method: str, options: dict[str, Any]) -> None:
    """Raises for what only Ulysses has, or only Ulysses and gather."""
    if method == "ulysses":
        return

    def refuse(what: str, others: str = "'ulysses'") -> None:
        raise NotImplementedError(f"flash_ext: {what} is not supported with method {method!r}, but with {others}")

    for name in sorted({"seqused_q", "seqused_k"} & options.keys()):
        refuse(name)
    if method == "ring":
        for name in sorted({"cu_seqlens_q", "block_mask", "alibi_slopes"} & options.keys()):
            refuse(name, "'gather' and 'ulysses'")
    window = (problem.left, problem.right)
    if problem.packed:
        for name in sorted({"bias", "mask", "block_mask"} & options.keys()):
            refuse(f"{name} of packed sequences")
        if window != (-1, -1) and problem.right != 0:
            refuse(f"a window of {window}, which is not causal, of packed sequences")
        if problem.top_left and problem.right == 0 and not problem.same_sequences:
            refuse("top_left of packed queries and keys with lengths of their own")
    if "alibi_slopes" in options and problem.right != 0:
        refuse("alibi_slopes without a causal mask")
    if "alibi_slopes" in options and not counts_alibi_distances(problem):
        refuse("alibi_slopes of queries behind the last key")
    if "block_mask" in options and window != (-1, -1):
        refuse("block_mask beside a causal mask or window")
