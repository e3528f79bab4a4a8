"""``flash_attn.flash_attn_interface`` of version 2.8: what ``flash_ext`` has under these names, and the passes that
ring attention and context parallelism are built of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext.argument_checks import as_flag, as_integer, as_number
from flash_ext.flash_attn_interface import (
    Integer,
    attend_to_pages,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    read_integer,
)
from flash_ext.integrations.flash_attn.passes import backward_pass, forward_pass, score_options

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

USE_TRITON_ROCM = False

Forward = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask, rng_state


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:
    """(out, softmax_lse, S_dmask, rng_state) of (batch, seqlen, heads, headdim), not recorded by autograd."""
    options = score_options(q, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return forward_pass(q, k, v, dropout_p, return_softmax, options)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv. Returns softmax_d, (batch, heads, seqlen_q), without the padding of flash-attn's."""
    options = score_options(q, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return backward_pass(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, deterministic, rng_state, options)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Forward:
    """The same of packed sequences, with block_table of paged keys, whose number of splits is num_splits. zero_tensors:
    every row is written anyway."""
    as_integer("num_splits", num_splits)
    as_flag("zero_tensors", zero_tensors)
    options = score_options(q, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    max_seqlen_q, max_seqlen_k = read_integer("max_seqlen_q", max_seqlen_q), read_integer("max_seqlen_k", max_seqlen_k)
    options |= dict(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    if block_table is None:
        if leftpad_k is not None:
            raise NotImplementedError(
                "flash_ext: leftpad_k must be None without block_table: drop the padding of k and v"
            )
        options |= dict(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k)
        return forward_pass(q, k, v, dropout_p, return_softmax, options)
    if as_number("dropout_p", dropout_p) != 0:
        raise NotImplementedError(
            f"flash_ext: dropout_p must be 0 with block_table, got {dropout_p}: gather the pages to drop weights"
        )
    as_flag("return_softmax", return_softmax)  # without dropout there is nothing to return
    options |= dict(seqused_k=seqused_k, leftpad_k=leftpad_k, num_splits=num_splits)
    with torch.no_grad():
        out, lse = attend_to_pages(q, k, v, block_table, cu_seqlens_k, max_seqlen_k, **options)
    return out, lse, q.new_empty(0), q.new_zeros(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes dq, dk and dv. Returns softmax_d, (heads, total_q), without the padding of flash-attn's."""
    as_flag("zero_tensors", zero_tensors)
    options = score_options(q, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    max_seqlen_q, max_seqlen_k = read_integer("max_seqlen_q", max_seqlen_q), read_integer("max_seqlen_k", max_seqlen_k)
    options |= dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )
    return backward_pass(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, deterministic, rng_state, options)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The width of flash-attn's tiles of keys, to which its S_dmask is scaled. This one's is not: any width will do."""
    return 128 if head_dim <= 64 else 64
