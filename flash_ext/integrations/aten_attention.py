"""Kernels with the schemas of aten's fused attention operators, by this library's operators.

Each takes and returns what torch's own kernel does: shapes, dtypes, memory order, the form of the log-sum-exp, and the
tensors of random numbers, which are empty here. A call that is not supported gives ``NotServed``, for the caller
to go on to torch's kernel. They run below autograd and autocast, as kernels do.

Calls that need nothing but views are computed in C++ and do not come here (``aten_cpp``); what is done there is what is
done here, bit for bit.

Dropout is never served here, but by an operator that torch does not compute itself (``aten_fused``). The backward
learns from two tensors of random numbers which weights were dropped. They mean one thing to torch's kernels and another
to ours, and nothing in them says whose they are: a backward that runs after ``deactivate()`` would drop other weights
than its forward. All else is the same for both: a forward by one and a backward by the other are right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext.head_dims import cut_head_dim, pad_head_dim
from flash_ext.integrations.aten_calls import (
    TOO_LARGE,
    WRONG,
    NotServed,
    exceeds_sizes,
    flash_rng,
    in_order_of_inputs,
    no_seed,
    options_of,
    padded_gradient,
    padded_lse,
    run_backward,
    run_forward,
    scale_of,
    takes_scale,
    unsupported,
    window_of,
)
from flash_ext.integrations.layouts import BY_ROWS, Arrangement, arrangement_of, in_order_of

_NOT_FINITE = "scale must be a finite number of float32"
_DROPOUT = "dropout whose random numbers are those of one of torch's backends"
_DEBUG_MASK = "return_debug_mask is of torch's kernel"
_BIAS = "a mask of another dtype, device or shape"


def _why_not(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None, bias: Tensor | None = None
) -> str:
    """Why a call of (batch, heads, seqlen, head_dim) tensors is not ours, or an empty string."""
    if dropout_p != 0:
        return _DROPOUT
    if not takes_scale(scale):
        return _NOT_FINITE
    if not _go_together(query, key, value):
        return WRONG
    if exceeds_sizes(query.device, query.shape[0], query.shape[2], key.shape[2]):
        return TOO_LARGE
    return unsupported(query.shape[-1], value.shape[-1], query.device, query.dtype) or (
        "" if _may_add(bias, query) else _BIAS
    )


def _go_together(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    heads = key.shape[1]
    return (
        query.shape[0] == key.shape[0] == value.shape[0]
        and 0 < heads == value.shape[1]
        and query.shape[1] % heads == 0
        and key.shape[2] == value.shape[2]
        and query.shape[3] == key.shape[3]
        and query.dtype == key.dtype == value.dtype
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arrangement: Arrangement,
    *,
    bias: Tensor | None = None,
    causal: bool,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """out and lse (batch, heads, seqlen_q) of (batch, heads, seqlen, head_dim)."""
    sizes, head_dim_v = (query.shape[0], query.shape[1]), value.shape[-1]
    scores = None if bias is None else arrangement.to_scores(bias)
    options = options_of(query, scale_of(query, scale), window_of(causal), top_left, scores)
    q, k, v = (pad_head_dim(arrangement.to_rows(x)) for x in (query, key, value))
    out, lse = run_forward(q, k, v, options)
    if arrangement is not BY_ROWS:
        lse = lse.view(*sizes, query.shape[2])
    return arrangement.from_rows(_cut(out, head_dim_v), sizes), lse


def _differentiate(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    arrangement: Arrangement,
    *,
    bias: Tensor | None = None,
    need_dbias: bool = False,
    causal: bool,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias, all (batch, heads, ...)."""
    sizes, sizes_kv = (query.shape[0], query.shape[1]), (key.shape[0], key.shape[1])
    scores = None if bias is None else arrangement.to_scores(bias)
    options = options_of(query, scale_of(query, scale), window_of(causal), top_left, scores)
    grad_rows, q, k, v, out_rows = (pad_head_dim(arrangement.to_rows(x)) for x in (grad_out, query, key, value, out))
    dq, dk, dv, dbias = run_backward(grad_rows, q, k, v, out_rows, arrangement.to_lse(lse), options, need_dbias)
    return (
        arrangement.from_rows(_cut(dq, query.shape[-1]), sizes),
        arrangement.from_rows(_cut(dk, key.shape[-1]), sizes_kv),
        arrangement.from_rows(_cut(dv, value.shape[-1]), sizes_kv),
        arrangement.from_scores(dbias, sizes) if need_dbias else dbias,
    )


def _cut(rows: Tensor, head_dim: int) -> Tensor:
    """Without what padding added, and dense again."""
    return cut_head_dim(rows, head_dim).contiguous()


def _four_dimensions(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias[(None,) * (4 - bias.dim())]


# ---- aten::_scaled_dot_product_flash_attention ----------------------------------------------------------------------


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """is_causal ends at the last key, as in FlashAttention-2."""
    if return_debug_mask:
        return NotServed(_DEBUG_MASK)
    if reason := _why_not(query, key, value, dropout_p, scale):
        return NotServed(reason)
    arrangement = arrangement_of(query, key, value)
    out, lse = _attend(query, key, value, arrangement, causal=is_causal, top_left=False, scale=scale)
    rng_state, unused = flash_rng(query)
    no_mask = query.new_empty(0)
    return in_order_of(out, query), lse, None, None, query.shape[2], key.shape[2], rng_state, unused, no_mask


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> Any:
    if reason := _why_not(query, key, value, dropout_p, scale):
        return NotServed(reason)
    arrangement = arrangement_of(query, key, value)
    gradients = _differentiate(
        grad_out, query, key, value, out, logsumexp, arrangement, causal=is_causal, top_left=False, scale=scale
    )
    return in_order_of_inputs(gradients, query, key, value)


# ---- aten::_scaled_dot_product_flash_attention_for_cpu --------------------------------------------------------------


def cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """is_causal begins at the first key. The log-sum-exp lies in memory as (batch, seqlen_q, heads)."""
    if reason := _why_not(query, key, value, dropout_p, scale, attn_mask):
        return NotServed(reason)
    bias = _four_dimensions(attn_mask)
    arrangement = arrangement_of(query, key, value, bias)
    out, lse = _attend(query, key, value, arrangement, bias=bias, causal=is_causal, top_left=True, scale=scale)
    return in_order_of(out, query), lse.transpose(1, 2).contiguous().transpose(1, 2)


def cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Gradients lie in memory as (batch, seqlen, heads, head_dim)."""
    if reason := _why_not(query, key, value, dropout_p, scale, attn_mask):
        return NotServed(reason)
    bias = _four_dimensions(attn_mask)
    gradients = _differentiate(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        BY_ROWS,
        bias=bias,
        causal=is_causal,
        top_left=True,
        scale=scale,
    )
    return gradients[:3]


def _may_add(bias: Tensor | None, query: Tensor) -> bool:
    """Whether torch's kernels would take this bias beside this query."""
    return bias is None or (bias.dim() in (2, 4) and bias.dtype in (torch.float32, query.dtype))


# ---- aten::_scaled_dot_product_efficient_attention ------------------------------------------------------------------


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """is_causal begins at the first key. The result lies in memory as (batch, seqlen_q, heads, head_dim_v)."""
    if reason := _why_not(query, key, value, dropout_p, scale, attn_bias):
        return NotServed(reason)
    bias = _four_dimensions(attn_bias)
    out, lse = _attend(query, key, value, BY_ROWS, bias=bias, causal=is_causal, top_left=True, scale=scale)
    seed, offset = no_seed(query), no_seed(query)
    return out, padded_lse(lse) if compute_log_sumexp else lse.new_empty((*lse.shape[:2], 0)), seed, offset


def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if reason := _why_not(query, key, value, dropout_p, scale, attn_bias):
        return NotServed(reason)
    need_dbias = grad_input_mask[3]
    if need_dbias and attn_bias is None:
        return NotServed(WRONG)
    dq, dk, dv, dbias = _differentiate(
        grad_out_,
        query,
        key,
        value,
        out,
        logsumexp[..., : query.shape[2]],
        BY_ROWS,
        bias=_four_dimensions(attn_bias),
        need_dbias=need_dbias,
        causal=is_causal,
        top_left=True,
        scale=scale,
    )
    if attn_bias is None or not need_dbias:
        return dq, dk, dv, None
    return dq, dk, dv, padded_gradient(dbias.view(attn_bias.shape))


# ---- aten::_scaled_dot_product_cudnn_attention ----------------------------------------------------------------------


def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """is_causal begins at the first key. The log-sum-exp is (batch, heads, seqlen_q, 1)."""
    if return_debug_mask:
        return NotServed(_DEBUG_MASK)
    if reason := _why_not(query, key, value, dropout_p, scale, attn_bias):
        return NotServed(reason)
    bias = _four_dimensions(attn_bias)
    arrangement = arrangement_of(query, key, value, bias)
    out, lse = _attend(query, key, value, arrangement, bias=bias, causal=is_causal, top_left=True, scale=scale)
    seed, offset = no_seed(query), no_seed(query)
    lengths = query.shape[2], key.shape[2]
    return in_order_of(out, query), lse.unsqueeze(-1), None, None, *lengths, seed, offset, None


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    if reason := _why_not(query, key, value, dropout_p, scale, attn_bias):
        return NotServed(reason)
    bias = _four_dimensions(attn_bias)
    gradients = _differentiate(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp.view(query.shape[:3]),
        arrangement_of(query, key, value, bias),
        bias=bias,
        causal=is_causal,
        top_left=True,
        scale=scale,
    )
    return in_order_of_inputs(gradients, query, key, value)
