"""Nested tensors as packed sequences and back: (batch, j, ...) of either layout, (total, ...) and ``cu_seqlens``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flash_ext.torch_private import jagged_dim, known_seqlens


def pack(x: Any) -> tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
    """The rows of a nested tensor.

    Args:
        x: nested, (batch, j, ...).

    Returns:
        (rows (total, ...); the options of ``attention`` that say which sequence each belongs to; what makes a nested
        tensor like ``x`` of other rows).

    Raises:
        AssertionError: x is jagged in another dimension than the second.
    """
    if x.layout == torch.jagged:
        if jagged_dim(x) != 1:
            raise AssertionError(f"nested tensors must be (batch, j, ...), jagged in dimension 1, got {tuple(x.shape)}")
        if x.lengths() is None:
            return _pack_jagged(x)
    return _pack_sequences(x)


def _pack_jagged(x: Any) -> tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
    """The rows lie packed already. The result keeps the offsets of ``x``, by which torch knows that sizes match."""
    offsets, (shortest, longest) = x.offsets(), known_seqlens(x)

    def like_x(rows: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(rows, offsets, min_seqlen=shortest, max_seqlen=longest)

    return x.values(), _spans(offsets.to(torch.int32), longest), like_x


def _pack_sequences(x: Tensor) -> tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
    """The rows of the strided layout, or of a jagged one with rows between the sequences."""
    sequences = x.unbind()
    lengths = [sequence.shape[0] for sequence in sequences]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=x.device)

    def like_x(rows: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(list(torch.split(rows, lengths)), layout=x.layout)

    return torch.cat(sequences), _spans(cu_seqlens, max(lengths)), like_x


def _spans(cu_seqlens: Tensor, longest: int | None) -> dict[str, Any]:
    """``longest``: None where it would have to be read from a device."""
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def with_longest(spans: dict[str, Any]) -> dict[str, Any]:
    """``spans`` with the length of the longest sequence, which is a size of the weights.

    It is read from the device where it is not known. So it is in compiled code: a length that torch keeps beside the
    offsets has no source that a guard on a shape could name.
    """
    if spans["max_seqlen_q"] is not None and not torch.compiler.is_compiling():
        return spans
    longest = int(spans["cu_seqlens_q"].diff().max())
    return {**spans, "max_seqlen_q": longest, "max_seqlen_k": longest}
