"""Kernels with the schemas of aten's fused attention operators, by this library's operators.

Each takes and returns what torch's own kernel does: shapes, dtypes, memory order, the form of the log-sum-exp, and the
tensors of random numbers, which are empty here. A call that is not supported gives ``NotImplemented``, for the caller
to go on to torch's kernel. They run below autograd and autocast, as kernels do.

Dropout is never served here: which weights were dropped is told to the backward by two tensors of random numbers, which
mean one thing to torch's kernels and another to ours, and nothing in them says whose they are. A backward that runs
after ``deactivate()`` would drop other weights than its forward. All else is the same for both: a forward by one and a
backward by the other are right.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

import flash_ext._plan as _plan
from flash_ext.functional import _allow_tf32
from flash_ext.head_dims import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, cut_head_dim, pad_head_dim
from flash_ext.integrations.layouts import BY_ROWS, Arrangement, arrangement_of, in_order_of
from flash_ext.ops import DecodeOptions, ScoreOptions
from flash_ext.planning import describe_device
from flash_ext.torch_private import DispatchKey, DispatchKeySet, handle_of

_OPS = torch.ops.flash_ext
_FORWARD, _PLAIN = handle_of(_OPS.attention_forward.default), handle_of(_OPS.attention_forward_plain.default)
_BACKWARD = handle_of(_OPS.attention_backward.default)
_DECODE = handle_of(_OPS.attention_decode.default)
_CHECK, _DECODE_CHECK = handle_of(_OPS.attention_check.default), handle_of(_OPS.attention_decode_check.default)
_KEYS = {"cpu": DispatchKeySet(DispatchKey.CPU), "cuda": DispatchKeySet(DispatchKey.CUDA)}
_EFFICIENT_LSE_MULTIPLE = 32  # torch pads the rows of its log-sum-exp up to this
_EFFICIENT_BIAS_MULTIPLE = 16  # and those of the gradient of a bias up to this

Gradients = tuple[Tensor | None, ...]


# ---- What is supported ----------------------------------------------------------------------------------------------


@cache
def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    described = describe_device(device, dtype)
    return all(_plan.supports(_plan.Problem(operation=name, **described))[0] for name in ("forward", "backward"))


def unsupported(query: Tensor, value: Tensor) -> str:
    """Why there are no kernels for such a query and value, or an empty string."""
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM):
        return f"head_dim must be from 1 to {MAX_HEAD_DIM}, got {head_dim} of query and {head_dim_v} of value"
    return "" if _has_kernels(query.device, query.dtype) else f"no kernels for {query.dtype} on {query.device}"


def exceeds_sizes(device: torch.device, batch: int, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether a call on CUDA has more batch entries, queries or keys than our kernels count to."""
    return device.type == "cuda" and (
        batch > _plan.MAX_CUDA_BATCH or seqlen_q > _plan.MAX_CUDA_SEQLEN_Q or seqlen_k > _plan.MAX_CUDA_SEQLEN_K
    )


def _served(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> bool:
    """Whether (batch, heads, seqlen, head_dim) tensors are ours. What is wrong with them is for torch to say."""
    if dropout_p > 0 or not query.dim() == key.dim() == value.dim() == 4:
        return False
    heads = key.shape[1]
    return (
        query.shape[0] == key.shape[0] == value.shape[0]
        and 0 < heads == value.shape[1]
        and query.shape[1] % heads == 0
        and key.shape[2] == value.shape[2]
        and query.shape[3] == key.shape[3]
        and query.dtype == key.dtype == value.dtype
        and not exceeds_sizes(query.device, query.shape[0], query.shape[2], key.shape[2])
        and not unsupported(query, value)
    )


# ---- Calling our operators ------------------------------------------------------------------------------------------


def _options(
    query: Tensor, scale: float, window: tuple[int, int], top_left: bool, bias: Tensor | None = None, **more: Any
) -> tuple[Any, ...]:
    """The options of an operator, those at the end left out where all have their defaults."""
    if bias is None and not more and not _allow_tf32(query):
        return (scale, *window, top_left)
    return ScoreOptions(scale, *window, top_left, bias=bias, allow_tf32=_allow_tf32(query), **more)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Straight to the kernel of the device: autograd and autocast have had their turn."""
    kernel = _PLAIN if len(options) == 4 else _FORWARD
    out, lse = kernel.redispatch_boxed(_KEYS[q.device.type], q, k, v, *options)
    return out, lse


def _run_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: tuple[Any, ...],
    need_dbias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    needed = (True, True, True, need_dbias, False)
    dq, dk, dv, dbias, _ = _BACKWARD.redispatch_boxed(
        _KEYS[q.device.type], grad_out, None, q, k, v, out, lse, deterministic, *needed, *options
    )
    return dq, dk, dv, dbias


def _scale(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _window(causal: bool) -> tuple[int, int]:
    return (-1, 0) if causal else (-1, -1)


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
    options = _options(query, _scale(query, scale), _window(causal), top_left, scores)
    q, k, v = (pad_head_dim(arrangement.to_rows(x)) for x in (query, key, value))
    out, lse = _run_forward(q, k, v, options)
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
    options = _options(query, _scale(query, scale), _window(causal), top_left, scores)
    grad_rows, q, k, v, out_rows = (pad_head_dim(arrangement.to_rows(x)) for x in (grad_out, query, key, value, out))
    dq, dk, dv, dbias = _run_backward(grad_rows, q, k, v, out_rows, arrangement.to_lse(lse), options, need_dbias)
    return (
        arrangement.from_rows(_cut(dq, query.shape[-1]), sizes),
        arrangement.from_rows(_cut(dk, key.shape[-1]), sizes_kv),
        arrangement.from_rows(_cut(dv, value.shape[-1]), sizes_kv),
        arrangement.from_scores(dbias, sizes) if need_dbias else dbias,
    )


_constants: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], Tensor] = {}


def _constant(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor that nobody reads or writes, made once: three of them would be a third of a small call."""
    key = device, dtype, shape
    found = _constants.get(key)
    if found is None:
        with torch.inference_mode(False):  # or later calls could not save it for their backward
            found = torch.empty(shape, dtype=dtype, device=device)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):  # memory of that graph
            _constants[key] = found
    return found


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
    if return_debug_mask or not _served(query, key, value, dropout_p):
        return NotImplemented
    arrangement = arrangement_of(query, key, value)
    out, lse = _attend(query, key, value, arrangement, causal=is_causal, top_left=False, scale=scale)
    rng_state, unused = _flash_rng(query)
    no_mask = _constant(query.device, query.dtype, (0,))
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
    if not _served(query, key, value, dropout_p):
        return NotImplemented
    arrangement = arrangement_of(query, key, value)
    gradients = _differentiate(
        grad_out, query, key, value, out, logsumexp, arrangement, causal=is_causal, top_left=False, scale=scale
    )
    return _in_order_of_inputs(gradients, query, key, value)


def _in_order_of_inputs(gradients: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(in_order_of(gradient, like) for gradient, like in zip(gradients, inputs, strict=False))


def _flash_rng(query: Tensor) -> tuple[Tensor, Tensor]:
    """What torch's flash kernel leaves for dropout, without dropout."""
    return _constant(query.device, torch.uint64, (2,)), _constant(query.device, torch.uint64, ())


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
    if not _served(query, key, value, dropout_p) or not _may_add(attn_mask, query):
        return NotImplemented
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
    if not _served(query, key, value, dropout_p) or not _may_add(attn_mask, query):
        return NotImplemented
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
    if not _served(query, key, value, dropout_p) or not _may_add(attn_bias, query):
        return NotImplemented
    bias = _four_dimensions(attn_bias)
    out, lse = _attend(query, key, value, BY_ROWS, bias=bias, causal=is_causal, top_left=True, scale=scale)
    seed, offset = _no_seed(query), _no_seed(query)
    return out, _padded_lse(lse) if compute_log_sumexp else lse.new_empty((*lse.shape[:2], 0)), seed, offset


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
    if not _served(query, key, value, dropout_p) or not _may_add(attn_bias, query):
        return NotImplemented
    need_dbias = grad_input_mask[3]
    if need_dbias and attn_bias is None:
        return NotImplemented  # torch says what is wrong
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
    return dq, dk, dv, _padded_gradient(dbias.view(attn_bias.shape))


def _no_seed(query: Tensor) -> Tensor:
    return _constant(query.device, torch.int64, ())


def _padded_lse(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen_q) with rows of a length that is a multiple of 32."""
    missing = -lse.shape[-1] % _EFFICIENT_LSE_MULTIPLE
    return torch.nn.functional.pad(lse, (0, missing), value=torch.inf) if missing else lse


def _padded_gradient(dbias: Tensor) -> Tensor:
    """The same, in memory whose rows are a multiple of 16 long."""
    seqlen_k = dbias.shape[-1]
    missing = -seqlen_k % _EFFICIENT_BIAS_MULTIPLE
    if not missing:
        return dbias
    padded = dbias.new_empty((*dbias.shape[:-1], seqlen_k + missing))[..., :seqlen_k]
    return padded.copy_(dbias)


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
    if return_debug_mask or not _served(query, key, value, dropout_p):
        return NotImplemented
    if not _may_add(attn_bias, query):
        return NotImplemented
    bias = _four_dimensions(attn_bias)
    arrangement = arrangement_of(query, key, value, bias)
    out, lse = _attend(query, key, value, arrangement, bias=bias, causal=is_causal, top_left=True, scale=scale)
    seed, offset = _no_seed(query), _no_seed(query)
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
    if not _served(query, key, value, dropout_p) or not _may_add(attn_bias, query):
        return NotImplemented
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
    return _in_order_of_inputs(gradients, query, key, value)


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
        return NotImplemented
    if return_debug_mask or dropout_p > 0 or _any_given(later) or not _multiple_of_8(query, value):
        return NotImplemented
    window = _flash_window(is_causal, window_size_left, window_size_right)
    if block_table is not None:
        results = _paged_forward(
            query,
            key,
            value,
            cum_seq_q,
            max_q,
            _scale(query, scale),
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
        if not _passes(_CHECK, query, key, value, *options):
            return NotImplemented
        results = _run_forward(query, key, value, options)
    if results is NotImplemented:
        return NotImplemented
    out, lse = results
    return in_order_of(out, query), lse, *_flash_rng(query), query.new_empty(0)


def packed_flash_forward_into(out: Tensor, *args: Any, **options: Any) -> Any:
    """The same, written into ``out``; returns the log-sum-exp."""
    results = packed_flash_forward(*args, **options)
    if results is NotImplemented:
        return NotImplemented
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
    if dropout_p > 0 or _any_given(later) or not _multiple_of_8(query, value):
        return NotImplemented
    window = _flash_window(is_causal, window_size_left, window_size_right)
    options = _packed_options(query, cum_seq_q, cum_seq_k, max_q, max_k, scale, window)
    if not _passes(_CHECK, query, key, value, *options):
        return NotImplemented
    gradients = _run_backward(grad_out, query, key, value, out, logsumexp, options)
    return _in_order_of_inputs(gradients, query, key, value)


def _any_given(later: dict[str, Any]) -> bool:
    return any(value is not None for value in later.values())


def _multiple_of_8(query: Tensor, value: Tensor) -> bool:
    return query.shape[-1] % HEAD_DIM_MULTIPLE == 0 and value.shape[-1] % HEAD_DIM_MULTIPLE == 0


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
    return _options(query, _scale(query, scale), window, False, **more)


def _passes(check: Any, query: Tensor, *args: Any) -> bool:
    """Whether our operator would accept the call. Rare calls can afford to ask it."""
    try:
        check.redispatch_boxed(_KEYS[query.device.type], query, *args)
    except RuntimeError:
        return False
    return True


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
        allow_tf32=_allow_tf32(query),
        **packed,
    )
    if not _passes(_DECODE_CHECK, query, key, value, *options):
        return NotImplemented
    return _DECODE.redispatch_boxed(_KEYS[query.device.type], query, key, value, *options)


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
    if dropout_p > 0 or seqlen_k is not None or window_size is not None or _any_given(later):
        return NotImplemented
    call = _packed_efficient_call(
        query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, custom_mask_type, scale
    )
    if call is NotImplemented:
        return NotImplemented
    (q, k, v), options = call
    out, lse = _run_forward(q, k, v, options)
    longest_q = query.shape[1] if max_seqlen_q is None else max_seqlen_q
    longest_k = key.shape[1] if max_seqlen_k is None else max_seqlen_k
    if cu_seqlens_q is not None:
        out = out.unsqueeze(0)
        if compute_log_sumexp:
            lse = _rows_of_sequences(lse, cu_seqlens_q, longest_q)
    if compute_log_sumexp:
        lse = _padded_lse(lse)
    else:
        sequences = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        lse = lse.new_empty((sequences, query.shape[2], 0))
    return out, lse, _no_seed(query), _no_seed(query), longest_q, longest_k


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
    if dropout_p > 0 or shared_storage_dqdkdv or window_size is not None or _any_given(later):
        return NotImplemented
    if bias is None and bias_requires_grad:
        return NotImplemented  # torch says what is wrong
    call = _packed_efficient_call(
        query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, custom_mask_type, scale
    )
    if call is NotImplemented:
        return NotImplemented
    (q, k, v), options = call
    if cu_seqlens_q is None:
        lse = logsumexp[..., : query.shape[1]]
        return _gradients_of_bias_too(grad_out_, q, k, v, out, lse, options, bias, bias_requires_grad)
    lse = _packed_rows(logsumexp, cu_seqlens_q, query.shape[1])
    gradients = _run_backward(grad_out_[0], q, k, v, out[0], lse, options)
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
    dq, dk, dv, dbias = _run_backward(grad_out, q, k, v, out, lse, options, need_dbias)
    return dq, dk, dv, _padded_gradient(dbias) if need_dbias else None


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
    """((q, k, v), options) of our operator, or NotImplemented."""
    packed = cu_seqlens_q is not None
    if not _multiple_of_8(query, value) or custom_mask_type not in (
        _NO_MASK,
        _CAUSAL_FROM_TOP_LEFT,
        _CAUSAL_FROM_BOTTOM_RIGHT,
    ):
        return NotImplemented
    if packed and (bias is not None or query.shape[0] != 1 or max_seqlen_q is None or max_seqlen_k is None):
        return NotImplemented
    window = _window(custom_mask_type != _NO_MASK)
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
    options = _options(query, _scale(query, scale), window, top_left, bias, **more)
    return (tensors, options) if _passes(_CHECK, *tensors, *options) else NotImplemented


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
