"""Kernels with the schemas of aten's attention operators below SDPA's, which take packed sequences.

Nested tensors and ``torch.nn.attention.varlen`` call them. As in ``aten_attention``, a call that is not supported gives
``NotServed``; these ask our operator itself whether it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext.functional import may_use_tf32
from flash_ext.head_dims import HEAD_DIM_MULTIPLE
from flash_ext.integrations.aten_calls import (
    KEYS,
    WRONG,
    NotServed,
    flash_rng,
    in_order_of_inputs,
    no_seed,
    options_of,
    padded_gradient,
    padded_lse,
    run_backward,
    run_forward,
    scale_of,
    window_of,
)
from flash_ext.integrations.layouts import in_order_of
from flash_ext.ops import DecodeOptions
from flash_ext.torch_private import handle_of

_OPS = torch.ops.flash_ext
_DECODE = handle_of(_OPS.attention_decode.default)
_CHECK, _DECODE_CHECK = handle_of(_OPS.attention_check.default), handle_of(_OPS.attention_decode_check.default)

Gradients = tuple[Tensor | None, ...]


# ---- aten::_flash_attention_forward ---------------------------------------------------------------------------------
# What nested tensors and torch.nn.attention.varlen call: (batch, seqlen, heads, head_dim), or packed sequences
# (total, heads, head_dim) with cum_seq. Later versions of torch add arguments; those that are given are not served.


def packed_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    **later: Any,
) -> Any:
    """``num_splits`` is served over pages, where 1 means what torch means by it: the same bits in any batch."""
    if num_splits is not None and block_table is None:
        return NotServed("num_splits without block_table")
    if return_debug_mask:
        return NotServed("return_debug_mask")
    if reason := _why_not(query, value, dropout_p, later):
        return NotServed(reason)
    window = _flash_window(is_causal, window_size_left, window_size_right)
    if block_table is not None:
        results = _paged_forward(
            query,
            key,
            value,
            cum_seq_q,
            max_q,
            scale_of(query, scale),
            window,
            seqused_k,
            block_table,
            alibi_slopes,
            num_splits,
        )
    else:
        options = _packed_options(
            query, cum_seq_q, cum_seq_k, max_q, max_k, scale, window, seqused_k=seqused_k, alibi_slopes=alibi_slopes
        )
        if refusal := _refusal(_CHECK, query, key, value, *options):
            return NotServed(refusal)
        results = run_forward(query, key, value, options)
    if type(results) is NotServed:
        return results
    out, lse = results
    return in_order_of(out, query), lse, *flash_rng(query), query.new_empty(0)


def packed_flash_forward_into(out: Tensor, *args: Any, **options: Any) -> Any:
    """The same, written into ``out``; returns the log-sum-exp."""
    results = packed_flash_forward(*args, **options)
    if type(results) is NotServed:
        return results
    out.copy_(results[0])
    return results[1]


def packed_flash_backward(
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
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **later: Any,
) -> Any:
    if reason := _why_not(query, value, dropout_p, later):
        return NotServed(reason)
    window = _flash_window(is_causal, window_size_left, window_size_right)
    options = _packed_options(query, cum_seq_q, cum_seq_k, max_q, max_k, scale, window)
    if refusal := _refusal(_CHECK, query, key, value, *options):
        return NotServed(refusal)
    gradients = run_backward(grad_out, query, key, value, out, logsumexp, options)
    return in_order_of_inputs(gradients, query, key, value)


def _why_not(query: Tensor, value: Tensor, dropout_p: float, later: dict[str, Any]) -> str:
    """Why a call is not ours, of what all these operators share, or an empty string."""
    given = [name for name, argument in later.items() if argument is not None]
    if given:
        return " and ".join(given)
    if dropout_p != 0:
        return "dropout of packed sequences"
    head_dims = query.shape[-1], value.shape[-1]
    if any(head_dim % HEAD_DIM_MULTIPLE for head_dim in head_dims):
        return f"head_dim of packed sequences must be a multiple of {HEAD_DIM_MULTIPLE}, got {head_dims}"
    return ""


def _flash_window(causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, 0 if causal else -1 if right is None else right


def _packed_options(
    query: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: tuple[int, int],
    **more: Any,
) -> tuple[Any, ...]:
    more = {name: value for name, value in more.items() if value is not None}
    if cum_seq_q is not None or cum_seq_k is not None:
        more |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return options_of(query, scale_of(query, scale), window, False, **more)


def _refusal(check: Any, query: Tensor, *args: Any) -> str:
    """Why our operator would not accept the call, or an empty string. Rare calls can afford to ask it."""
    try:
        check.redispatch_boxed(KEYS[query.device.type], query, *args)
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        return lines[0].removeprefix("flash_ext: ") if lines else type(error).__name__
    return ""


def _paged_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    max_q: int,
    scale: float,
    window: tuple[int, int],
    seqused_k: Tensor | None,
    block_table: Tensor,
    alibi_slopes: Tensor | None,
    num_splits: int | None,
) -> Any:
    """Keys and values in pages (num_pages, page_size, heads_kv, head_dim)."""
    packed = {} if cum_seq_q is None else {"cu_seqlens_q": cum_seq_q, "max_seqlen_q": max_q}
    options = DecodeOptions(
        scale,
        *window,
        cache_seqlens=seqused_k,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits or 0,
        batch_invariant=num_splits == 1,
        allow_tf32=may_use_tf32(query),
        **packed,
    )
    if refusal := _refusal(_DECODE_CHECK, query, key, value, *options):
        return NotServed(refusal)
    return _DECODE.redispatch_boxed(KEYS[query.device.type], query, key, value, *options)


# ---- aten::_cudnn_attention_forward ---------------------------------------------------------------------------------
# What torch.nn.attention.varlen calls on Hopper since torch 2.14, for sequences of more than 128 queries without a
# window, and nested tensors for which torch chooses cuDNN: (total, heads, head_dim) with cum_seq.


def packed_cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **later: Any,
) -> Any:
    """The log-sum-exp is (heads, total), with all heads of a query side by side in memory, as cuDNN has it."""
    if return_debug_mask:
        return NotServed("return_debug_mask")
    options = _packed_cudnn_options(
        query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, later
    )
    if type(options) is NotServed:
        return options
    out, lse = run_forward(query, key, value, options)
    lse = lse.t().contiguous().t()
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    return in_order_of(out, query), lse, *lengths, no_seed(query), no_seed(query), None


def packed_cudnn_backward(
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
    **later: Any,
) -> Any:
    """``logsumexp``: ours, or torch's (total, heads, 1)."""
    options = _packed_cudnn_options(
        query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, later
    )
    if type(options) is NotServed:
        return options
    lse = logsumexp.squeeze(-1).t() if logsumexp.dim() == 3 else logsumexp
    gradients = run_backward(grad_out, query, key, value, out, lse.contiguous(), options)
    return in_order_of_inputs(gradients, query, key, value)


def _packed_cudnn_options(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    later: dict[str, Any],
) -> Any:
    """Of our operator, or ``NotServed``."""
    if cum_seq_q is None or cum_seq_k is None:
        return NotServed("dense rows")
    if reason := _why_not(query, value, dropout_p, later | dict(attn_bias=attn_bias)):
        return NotServed(reason)
    if is_causal and cum_seq_q is not cum_seq_k:
        return NotServed("is_causal of queries and keys with lengths of their own, aligned by the version of torch")
    options = _packed_options(query, cum_seq_q, cum_seq_k, max_q, max_k, scale, window_of(is_causal))
    refusal = _refusal(_CHECK, query, key, value, *options)
    return NotServed(refusal) if refusal else options


# ---- aten::_efficient_attention_forward -----------------------------------------------------------------------------
# What nested tensors call in float32: (batch, seqlen, heads, head_dim), or packed sequences (1, total, heads, head_dim)
# with cu_seqlens.

_NO_MASK, _CAUSAL_FROM_TOP_LEFT, _CAUSAL_FROM_BOTTOM_RIGHT = range(3)


def packed_efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
    **later: Any,
) -> Any:
    """The log-sum-exp is (sequences, heads, longest sequence of queries, padded to a multiple of 32)."""
    if reason := _why_not(query, value, dropout_p, later | dict(seqlen_k=seqlen_k, window_size=window_size)):
        return NotServed(reason)
    call = _packed_efficient_call(
        query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, custom_mask_type, scale
    )
    if type(call) is NotServed:
        return call
    (q, k, v), options = call
    out, lse = run_forward(q, k, v, options)
    longest_q = query.shape[1] if max_seqlen_q is None else max_seqlen_q
    longest_k = key.shape[1] if max_seqlen_k is None else max_seqlen_k
    if cu_seqlens_q is not None:
        out = out.unsqueeze(0)
        if compute_log_sumexp:
            lse = _rows_of_sequences(lse, cu_seqlens_q, longest_q)
    if compute_log_sumexp:
        lse = padded_lse(lse)
    else:
        sequences = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        lse = lse.new_empty((sequences, query.shape[2], 0))
    return out, lse, no_seed(query), no_seed(query), longest_q, longest_k


def packed_efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
    **later: Any,
) -> Any:
    later |= dict(shared_storage_dqdkdv=shared_storage_dqdkdv or None, window_size=window_size)
    if reason := _why_not(query, value, dropout_p, later):
        return NotServed(reason)
    if bias is None and bias_requires_grad:
        return NotServed(WRONG)
    call = _packed_efficient_call(
        query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, custom_mask_type, scale
    )
    if type(call) is NotServed:
        return call
    (q, k, v), options = call
    if cu_seqlens_q is None:
        lse = logsumexp[..., : query.shape[1]]
        return _gradients_of_bias_too(grad_out_, q, k, v, out, lse, options, bias, bias_requires_grad)
    lse = _packed_rows(logsumexp, cu_seqlens_q, query.shape[1])
    gradients = run_backward(grad_out_[0], q, k, v, out[0], lse, options)
    return *(gradient.unsqueeze(0) for gradient in gradients[:3]), None


def _gradients_of_bias_too(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: tuple[Any, ...],
    bias: Tensor | None,
    bias_requires_grad: bool,
) -> Gradients:
    need_dbias = bias is not None and bias_requires_grad
    dq, dk, dv, dbias = run_backward(grad_out, q, k, v, out, lse, options, need_dbias)
    return dq, dk, dv, padded_gradient(dbias) if need_dbias else None


def _packed_efficient_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    custom_mask_type: int,
    scale: float | None,
) -> Any:
    """((q, k, v), options) of our operator, or ``NotServed``."""
    packed = cu_seqlens_q is not None
    if custom_mask_type not in (_NO_MASK, _CAUSAL_FROM_TOP_LEFT, _CAUSAL_FROM_BOTTOM_RIGHT):
        return NotServed(WRONG)
    if packed and bias is not None:
        return NotServed("a bias of packed sequences")
    if packed and (query.shape[0] != 1 or max_seqlen_q is None or max_seqlen_k is None):
        return NotServed(WRONG)
    window = window_of(custom_mask_type != _NO_MASK)
    top_left = custom_mask_type == _CAUSAL_FROM_TOP_LEFT
    tensors = (query, key, value)
    more: dict[str, Any] = {}
    if packed:
        tensors = (query[0], key[0], value[0])
        more = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
        }
    options = options_of(query, scale_of(query, scale), window, top_left, bias, **more)
    refusal = _refusal(_CHECK, *tensors, *options)
    return NotServed(refusal) if refusal else (tensors, options)


def _rows_of_sequences(lse: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """(heads, total) as (sequences, heads, longest), inf behind the end of each."""
    if lse.shape[1] == 0:
        return lse.new_full((cu_seqlens.shape[0] - 1, lse.shape[0], longest), torch.inf)
    rows, exists = _places(cu_seqlens, longest, lse.shape[1])
    return lse[:, rows].masked_fill(~exists, torch.inf).transpose(0, 1)


def _packed_rows(lse: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """(sequences, heads, at least the longest) as (heads, total)."""
    rows, exists = _places(cu_seqlens, lse.shape[2], total)
    packed = lse.new_empty((lse.shape[1], total + 1))  # what does not exist goes to one place behind the end
    packed[:, torch.where(exists, rows, total)] = lse.transpose(0, 1)
    return packed[:, :total]


def _places(cu_seqlens: Tensor, longest: int, total: int) -> tuple[Tensor, Tensor]:
    """Which packed row is row i of each sequence, (sequences, longest), and whether it has such a row."""
    begin, end = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    rows = begin + torch.arange(longest, device=cu_seqlens.device)
    return rows.clamp(max=max(total - 1, 0)), rows < end
