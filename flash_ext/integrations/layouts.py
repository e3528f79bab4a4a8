"""torch's (batch, heads, seqlen, head_dim), in and out of the layout of this library's operators, without a copy.

Operators take (batch, seqlen, heads, head_dim) with any strides, and their results are contiguous. torch's attention
gives its results the memory order of the query. Three orders occur, and in each of them an operator's own result is in
that order, if batch and heads are handed over in the right way. ``csrc/api/aten_layouts.h`` does the same in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Arrangement(NamedTuple):
    """How four dimensions of torch become four of an operator: ``to_rows`` of q, k, v, out and their gradients,
    ``to_scores`` of bias and mask, (batch, heads, ...). The others lead back, given (batch, heads)."""

    name: str
    to_rows: Callable[[Tensor], Tensor]
    from_rows: Callable[[Tensor, tuple[int, int]], Tensor]
    to_scores: Callable[[Tensor], Tensor]
    from_scores: Callable[[Tensor, tuple[int, int]], Tensor]
    to_lse: Callable[[Tensor], Tensor]


BY_ROWS = Arrangement(
    "memory order (batch, seqlen, heads)",
    to_rows=lambda x: x.transpose(1, 2),
    from_rows=lambda x, sizes: x.transpose(1, 2),
    to_scores=lambda scores: scores,
    from_scores=lambda scores, sizes: scores,
    to_lse=lambda lse: lse,
)
BY_HEADS = Arrangement(
    "memory order (batch, heads, seqlen): a batch of batch * heads, of one head each",
    to_rows=lambda x: x.flatten(0, 1).unsqueeze(2),
    from_rows=lambda x, sizes: x.squeeze(2).unflatten(0, sizes),
    to_scores=lambda scores: scores if _is_shared(scores) else scores.flatten(0, 1).unsqueeze(1),
    from_scores=lambda scores, sizes: scores if _is_shared(scores) else scores.squeeze(1).unflatten(0, sizes),
    to_lse=lambda lse: lse.flatten(0, 1).unsqueeze(1),
)
BY_SEQUENCE = Arrangement(
    "memory order (seqlen, batch, heads), as in nn.MultiheadAttention: a batch of one, with batch * heads heads",
    to_rows=lambda x: x.flatten(0, 1).transpose(0, 1).unsqueeze(0),
    from_rows=lambda x, sizes: x.squeeze(0).transpose(0, 1).unflatten(0, sizes),
    to_scores=lambda scores: scores if _is_shared(scores) else scores.flatten(0, 1).unsqueeze(0),
    from_scores=lambda scores, sizes: scores if _is_shared(scores) else scores.squeeze(0).unflatten(0, sizes),
    to_lse=lambda lse: lse.flatten(0, 1).unsqueeze(0),
)


def arrangement_of(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None) -> Arrangement:
    """The arrangement whose results have the query's memory order; by rows where that would take copies of inputs.

    ``scores``: a bias or mask, (batch|1, heads|1, seqlen_q|1, seqlen_k|1).
    """
    batch, heads, seqlen, _ = query.shape
    of_batch, of_heads, of_seqlen, _ = query.stride()
    sequence_outermost = batch > 1 and of_seqlen > of_batch
    if seqlen == 1 or not (sequence_outermost or (heads > 1 and of_seqlen < of_heads)):
        return BY_ROWS
    return (BY_SEQUENCE if sequence_outermost else BY_HEADS) if can_merge(query, key, value, scores) else BY_ROWS


def can_merge(query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None) -> bool:
    """Whether batch and heads of all of them can be seen as one dimension."""
    batch, heads = query.shape[:2]
    if key.shape[1] != heads or not all(_merges(x) for x in (query, key, value)):
        return False
    return scores is None or _is_shared(scores) or (scores.shape[:2] == (batch, heads) and _merges(scores))


def _merges(x: Tensor) -> bool:
    batch, heads = x.shape[:2]
    return batch == 1 or heads == 1 or x.stride(0) == heads * x.stride(1)


def _is_shared(scores: Tensor) -> bool:
    """By the whole batch and all heads."""
    return scores.shape[0] == 1 and scores.shape[1] == 1


def in_order_of(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with the memory order that ``torch.empty_like(like)`` has, copied where it has another. Differentiable.

    Args:
        x: dense; its last dimension, which may be of another size than that of ``like``, is contiguous.
        like: any strides.
    """
    strides, like_strides = x.stride(), like.stride()
    if strides == like_strides:
        return x
    order = _new_order(x.shape, strides, like.shape, like_strides)
    if order is None:
        return x
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


@lru_cache(maxsize=4096)
def _new_order(
    shape: torch.Size, strides: tuple[int, ...], like_shape: torch.Size, like_strides: tuple[int, ...]
) -> list[int] | None:
    """The dimensions in the other tensor's memory order, or None where that is the one they have."""
    order = _memory_order(like_shape, like_strides)
    return None if 0 in shape or order == _memory_order(shape, strides) else order


def _memory_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Dimensions from the outermost to the innermost one. Those of size 1 lie anywhere; they are put first."""
    if 0 in strides:
        strides = torch.empty_like(torch.empty_strided(sizes, strides, device="meta")).stride()
    return sorted(range(len(sizes)), key=lambda dim: (sizes[dim] != 1, -strides[dim] if sizes[dim] != 1 else 0))
