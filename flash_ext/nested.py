"""Nested tensors of the jagged layout: their sequences lie packed already, one after another, and are attended to so.

What a nested tensor keeps of its sequences, ``offsets`` and, where there are holes between them, ``lengths``, become
``cu_seqlens`` and ``seqused``. Results are nested tensors with the same offsets, so that torch knows that they go
together with the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flash_ext.argument_checks import as_flag, check_tensors
from flash_ext.torch_private import jagged_dim, known_seqlens
from flash_ext.tracing import can_read

_TAKEN_FROM_INPUTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")


def is_nested(q: Any, k: Any, v: Any, packed: bool) -> bool:
    """Whether ``attend`` is for these tensors."""
    return isinstance(q, Tensor) and q.is_nested


def attend(attention: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """``attention``, which takes packed sequences, of nested tensors.

    Args:
        q: jagged, (batch, seqlen, heads_q, head_dim), each sequence with a seqlen of its own.
        k: jagged likewise; the same tensor structure as q for self-attention, or another one of the same batch.
        v: with the offsets of k.
        options: those of ``attention`` but for lengths. Bias and masks count from the start of each sequence.

    Returns:
        out, jagged as q is, or (out, lse) with lse (batch, heads_q, seqlen), jagged in its last dimension; behind them
        max_logit, if wanted.

    Raises:
        TypeError: k or v is not nested, or options give the lengths once more.
        RuntimeError: another layout, dimensions in another order, or sequences that do not go together.
    """
    return_lse = as_flag("return_lse", options.get("return_lse", False))
    rows, options = as_packed(q, k, v, options)
    out, lse, *max_logit = attention(*rows, **options | {"return_lse": True})
    nested = like(q, out, 1)
    results = (nested, like(q, lse, 2), *max_logit) if return_lse else (nested, *max_logit)
    return results if len(results) > 1 else nested


def as_packed(
    q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """The tensors and options of the call with packed sequences that ``attend`` makes. Raises what it raises."""
    for name in _TAKEN_FROM_INPUTS:
        if options.get(name) is not None:
            raise TypeError(f"{name} must be None with nested tensors, which have lengths of their own")
    rows = values(1, "(batch, jagged seqlen, heads, head_dim)", q=q, k=k, v=v)
    return rows, {**options, **lengths(q, k, v)}


def values(jagged: int, shape: str, **tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values of three nested tensors, whose dimension number ``jagged`` has to be the jagged one.

    Raises TypeError for what is no nested tensor, and RuntimeError for one of another ``shape`` or layout.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            check_tensors(**{name: x})
        if not x.is_nested:
            raise TypeError(f"{name} must be a nested tensor, as the others are, got shape {tuple(x.shape)}")
        if x.layout != torch.jagged:
            raise RuntimeError(
                f"{name} must be a nested tensor with layout=torch.jagged, got {x.layout}: "
                "torch.nested.as_nested_tensor(x.unbind(), layout=torch.jagged) makes one"
            )
        if x.dim() != 4 or jagged_dim(x) != jagged:
            raise RuntimeError(
                f"{name} must be {shape}, got {x.dim()} dimensions, of which number {jagged_dim(x)} is jagged"
            )
    first, second, third = (x.values() for x in tensors.values())
    return first, second, third


def lengths(q: Any, k: Any, v: Any) -> dict[str, Any]:
    """The options of ``attention`` that say where the sequences lie. Raises RuntimeError where they do not fit."""
    if q.shape[0] != k.shape[0]:
        raise RuntimeError(f"k must have the batch of q: expected {q.shape[0]} sequences, got {k.shape[0]}")
    _check_same_sequences(k, v)
    return _lengths("q", q) | _lengths("k", k)


def longest(x: Any) -> int | None:
    """The length of the longest sequence, where no device has to be waited for."""
    known = known_seqlens(x)[1]
    if known is not None or not can_read(x.offsets()):
        return known
    each = x.offsets().diff() if x.lengths() is None else x.lengths()
    return int(each.max()) if each.numel() else 0


def like(q: Any, values: Tensor, jagged_dim: int) -> Tensor:
    """A nested tensor of the sequences of ``q``."""
    shortest, longest = known_seqlens(q)
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets=q.offsets(),
        lengths=q.lengths(),
        jagged_dim=jagged_dim,
        min_seqlen=shortest,
        max_seqlen=longest,
    )


def _check_same_sequences(k: Any, v: Any) -> None:
    """Whether two nested tensors have one structure follows from the identity of their offsets, as in torch."""
    if k.offsets() is v.offsets() or k.shape[jagged_dim(k)] == v.shape[jagged_dim(v)]:
        return
    raise RuntimeError(
        "v must have the offsets of k, the same tensor: torch.nested.nested_tensor_from_jagged(values, k.offsets())"
    )


def _lengths(letter: str, x: Any) -> dict[str, Any]:
    lengths = x.lengths()
    return {
        f"cu_seqlens_{letter}": x.offsets().to(device=x.device, dtype=torch.int32),
        f"max_seqlen_{letter}": known_seqlens(x)[1] if lengths is None else None,
        f"seqused_{letter}": None if lengths is None else lengths.to(device=x.device, dtype=torch.int32),
    }
