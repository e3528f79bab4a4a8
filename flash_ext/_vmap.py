"""``torch.vmap`` of the operators: its dimension is folded into the batch, or else looped over.

Either way ``vmap(op)`` gives what a Python loop over the samples gives, dropout included: samples that share a seed
drop the same scores (``randomness="same"``), samples with seeds of their own drop others (``"different"``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flash_ext.ops import ScoreOptions


_FOLDED = {"bias", "mask", "alibi_slopes", "seqused_q", "seqused_k", "block_offsets"}  # see fold_options
_SHARED = {"sink", "block_indices", "block_bitmap_ids", "block_bitmaps"}


def can_fold(options: ScoreOptions, dims: Any) -> bool:
    """Packed sequences have no batch dimension, dropout depends on the place in the batch, and a sink or the blocks of
    a mask are shared by the whole batch. Of other tensors than these it is not known."""
    given = {name for name, value in zip(options._fields, options, strict=True) if isinstance(value, Tensor)}
    shared = all(getattr(dims, name) is None for name in _SHARED)
    return shared and given <= _FOLDED | _SHARED


def fold(t: Tensor | None, dim: int | None, n: int) -> Tensor | None:
    """(batch, ...), with the vmapped dimension of n at ``dim`` or without, as (n * batch, ...)."""
    return None if t is None else _to_front(t, dim, n).flatten(0, 1)


def fold_options(options: ScoreOptions, dims: Any, n: int, batch: int) -> ScoreOptions:
    """The options of the folded call. Options that the whole batch shares are not expanded."""

    def widen(t: Tensor | None, dim: int | None) -> Tensor | None:
        if t is None or (dim is None and t.shape[0] == 1):
            return t
        t = _to_front(t, dim, n)
        return t.expand(n, batch, *t.shape[2:]).flatten(0, 1)

    slopes = options.alibi_slopes
    if slopes is not None:
        if dims.alibi_slopes is not None:
            slopes = slopes.movedim(dims.alibi_slopes, 0)
            slopes = slopes[:, None] if slopes.dim() == 2 else slopes
            slopes = slopes.expand(n, batch, slopes.shape[-1]).flatten(0, 1)
        elif slopes.dim() == 2:
            slopes = fold(slopes, None, n)
    return options._replace(
        bias=widen(options.bias, dims.bias),
        mask=widen(options.mask, dims.mask),
        alibi_slopes=slopes,
        seqused_q=fold(options.seqused_q, dims.seqused_q, n),
        seqused_k=fold(options.seqused_k, dims.seqused_k, n),
        block_offsets=widen(options.block_offsets, dims.block_offsets),
    )


def unfold(results: Any, n: int, batch: int) -> tuple[Any, Any]:
    """(results, out_dims) for vmap. Gradients that were not asked for are 1-dimensional and belong to no sample."""
    if isinstance(results, Tensor):
        return results.unflatten(0, (n, batch)), 0
    outputs = tuple(t.unflatten(0, (n, batch)) if t.dim() > 1 else t for t in results)
    return outputs, tuple(0 if t.dim() > 1 else None for t in results)


def loop(op: Any, info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """One call per sample, results stacked."""
    if info.batch_size == 0:
        return _of_no_samples(op, in_dims, args)
    results = [
        op(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _of_no_samples(op: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Empty results, of the shapes that the operator's fake gives for a sample."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))

    def sample(arg: Any, dim: int | None) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        shape = arg.shape if dim is None else arg.movedim(dim, 0).shape[1:]
        return arg.new_empty(shape, device="meta")

    def nothing(result: Tensor) -> Tensor:
        return result.new_empty((0, *result.shape), device=device)

    results = op(*map(sample, args, in_dims))
    if isinstance(results, Tensor):
        return nothing(results), 0
    return tuple(map(nothing, results)), (0,) * len(results)


def batch_of(t: Tensor, dim: int | None) -> int:
    """The batch of a sample: its first dimension, where the vmapped one is at ``dim``."""
    return t.shape[0 if dim is None or dim > 0 else 1]


def _to_front(t: Tensor, dim: int | None, n: int) -> Tensor:
    return t.expand(n, *t.shape) if dim is None else t.movedim(dim, 0)
