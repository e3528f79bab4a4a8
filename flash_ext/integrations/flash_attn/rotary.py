"""``flash_attn.layers.rotary``: rotary embedding (Su et al. 2021) in plain, differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext.argument_checks import as_flag, check_optional_tensors, check_tensors


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x with its first dimensions rotated by position.

    Args:
        x: (batch, seqlen, heads, headdim), or packed (total, heads, headdim) with cu_seqlens.
        cos, sin: (seqlen_rotary, rotary_dim / 2).
        interleaved: rotate neighbours (GPT-J), and not the first half against the second (GPT-NeoX).
        inplace: write into x, and return it.
        seqlen_offsets: the position of the first row, one or (batch).
        cu_seqlens: int32 (batch + 1), where each packed sequence begins and ends.
        max_seqlen: not needed.
    """
    check_tensors(x=x, cos=cos, sin=sin)
    check_optional_tensors(cu_seqlens=cu_seqlens)
    interleaved, inplace = as_flag("interleaved", interleaved), as_flag("inplace", inplace)
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    rotated = _rotate(x, cos[positions], sin[positions], interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same of cos and sin that are given for each row: (seqlen, rotary_dim / 2) or (batch, seqlen, ...)."""
    return _rotate(x, cos, sin, interleaved)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """``flash_attn.ops.triton.rotary.apply_rotary``; conjugate rotates back."""
    sin = -sin if conjugate else sin
    return apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(a, b) -> (-b, a) of the two halves, or of neighbours."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.stack([-b, a], dim=-1).flatten(-2) if interleaved else torch.cat([-b, a], dim=-1)


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(seqlen), (batch, seqlen) or (total)."""
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=x.device)
        return rows + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    rows = torch.arange(x.shape[0], device=x.device)
    sequence = torch.bucketize(rows, cu_seqlens[1:], right=True).clamp(max=cu_seqlens.shape[0] - 2)
    first = cu_seqlens[sequence] - (offsets[sequence] if isinstance(offsets, Tensor) else offsets)
    return rows - first


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """cos and sin (..., seqlen, rotary_dim / 2), one row for each of x's, for all heads."""
    rotary_dim = 2 * cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat([t, t], dim=-1) for t in (cos, sin))
    cos, sin = (t.to(wide)[..., None, :] for t in (cos, sin))
    turned = x[..., :rotary_dim].to(wide)
    turned = turned * cos + rotate_half(turned, interleaved) * sin
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)
