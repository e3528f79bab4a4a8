"""Nested tensors of the jagged layout: their sequences lie packed already, one after another, and are attended to so.

What a nested tensor keeps of its sequences, ``offsets`` and, where there are holes between them, ``lengths``, become
``cu_seqlens`` and ``seqused``. Results are nested tensors with the same offsets, so that torch knows that they go
together with the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_ext.torch_private import jagged_dim, known_seqlens

_SHAPE = "(batch, jagged seqlen, heads, head_dim)"
_TAKEN_FROM_INPUTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")


def attend(attention: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """``attention``, which takes packed sequences, of nested tensors.

    Args:
        q: jagged, (batch, seqlen, heads_q, head_dim), each sequence with a seqlen of its own.
        k: jagged likewise; the same tensor structure as q for self-attention, or another one of the same batch.
        v: with the offsets of k.
        options: those of ``attention`` but for lengths. Bias and masks count from the start of each sequence.

    Returns:
        out, jagged as q is, or (out, lse) with lse (batch, heads_q, seqlen), jagged in its last dimension.

    Raises:
        TypeError: k or v is not nested, or options give the lengths once more.
        RuntimeError: another layout, dimensions in another order, or sequences that do not go together.
    """
    for name in _TAKEN_FROM_INPUTS:
        if options.get(name) is not None:
            raise TypeError(f"{name} must be None with nested tensors, which have lengths of their own")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check(name, x)
    if q.shape[0] != k.shape[0]:
        raise RuntimeError(f"k must have the batch of q: expected {q.shape[0]} sequences, got {k.shape[0]}")
    _check_same_sequences(k, v)
    options |= _lengths("q", q) | _lengths("k", k)
    out, lse = attention(q.values(), k.values(), v.values(), **options | {"return_lse": True})
    nested = _like(q, out, 1)
    return (nested, _like(q, lse, 2)) if options.get("return_lse") else nested


def attend_heads_first(
    attention: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **options: Any
) -> Tensor:
    """The same of (batch, heads, jagged seqlen, head_dim), as ``scaled_dot_product_attention`` has it."""
    if attn_mask is not None:
        if not 2 <= attn_mask.dim() <= 4:
            raise RuntimeError(
                f"attn_mask must broadcast to (batch, heads, longest L, longest S), got shape {tuple(attn_mask.shape)}"
            )
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    rows = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_nested or x.layout != torch.jagged or x.dim() != 4:
            raise RuntimeError(
                f"{name} must be a jagged nested tensor (batch, heads, jagged seqlen, head_dim), got {_name(x)}"
            )
        rows.append(x.transpose(1, 2))
    out: Tensor = attend(attention, *rows, **options)
    return out.transpose(1, 2)


def _check(name: str, x: Any) -> None:
    if not x.is_nested:
        raise TypeError(f"{name} must be a nested tensor, as q is, got {_name(x)}")
    if x.layout != torch.jagged:
        raise RuntimeError(
            f"{name} must be a nested tensor with layout=torch.jagged, got {x.layout}: "
            "torch.nested.as_nested_tensor(x.unbind(), layout=torch.jagged) makes one"
        )
    if x.dim() != 4 or jagged_dim(x) != 1:
        raise RuntimeError(
            f"{name} must be {_SHAPE}, got {x.dim()} dimensions, of which number {jagged_dim(x)} is jagged"
        )


def _name(x: Tensor) -> str:
    return f"a {x.layout} nested tensor of {x.dim()} dimensions" if x.is_nested else f"shape {tuple(x.shape)}"


def _check_same_sequences(k: Any, v: Any) -> None:
    """Whether two nested tensors have one structure follows from the identity of their offsets, as in torch."""
    if k.offsets() is v.offsets() or k.shape[1] == v.shape[1]:
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


def _like(q: Any, values: Tensor, jagged_dim: int) -> Tensor:
    shortest, longest = known_seqlens(q)
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets=q.offsets(),
        lengths=q.lengths(),
        jagged_dim=jagged_dim,
        min_seqlen=shortest,
        max_seqlen=longest,
    )
