"""``attention`` with all its options, ``attention_weights``, ``decode``, ``merge`` and ``draw_rng_state``.

Tensors are (batch, seqlen, heads, head_dim) with any strides as long as the last dimension is contiguous, so that a
(batch, heads, seqlen, head_dim) tensor is passed as a transposed view. With ``cu_seqlens_q`` and ``cu_seqlens_k``,
sequences are packed one after another: (total, heads, head_dim).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_ext import nested
from flash_ext.argument_checks import (
    as_flag,
    as_integer,
    as_number,
    check_device,
    check_names,
    check_optional_tensors,
    check_tensors,
    check_window,
    describe,
)
from flash_ext.eager import call
from flash_ext.masks import BlockMask
from flash_ext.ops import ScoreOptions
from flash_ext.torch_private import FLEX_BLOCK_MASK, TORCH_SDPA, in_context_parallel, is_instance
from flash_ext.tracing import can_read

_OPS = torch.ops.flash_ext
_FORWARD = _OPS.attention_forward.default  # looked up once, because a look-up takes longer than a check
_FORWARD_MAX_LOGIT = _OPS.attention_forward_max_logit.default
_DECODE, _DECODE_APPEND = _OPS.attention_decode.default, _OPS.attention_decode_append.default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    top_left: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    block_mask: BlockMask | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(q kᵀ · softmax_scale + ...) v, exact, without the score matrix in memory (Dao 2023, FlashAttention-2).

    Score of query i and key j: ``s = q_i · k_j * softmax_scale``; then ``softcap * tanh(s / softcap)``; then
    ``- slope * |i + offset - j|``; then ``+ bias``. ``offset`` is seqlen_k - seqlen_q, or 0 with ``top_left``.
    A key is visible where ``window_size``, ``mask``, ``block_mask`` and the lengths all allow it. A query that sees no
    key gets out 0, lse -inf and zero gradients. Hidden keys and values have no influence, even if they are NaN.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) or, packed, (total_q, heads_q, head_dim). float32, float16, bfloat16,
            on CPU also float64. head_dim is a multiple of 8 up to 256. Products of float32 are accurate to float32,
            unless ``torch.set_float32_matmul_precision`` allows CUDA to round to TF32. q, k and v may also be nested
            tensors of the jagged layout, (batch, jagged seqlen, heads, head_dim).
        k: (batch, seqlen_k, heads_kv, head_dim) or (total_k, heads_kv, head_dim); heads_kv divides heads_q, and
            neighbouring query heads share a key head (GQA, Ainslie et al. 2023).
        v: like k, with a head_dim_v of its own.
        causal: hides keys to the right of the diagonal, like a right window of 0.
        window_size: (left, right): key j is visible where i + offset - left <= j <= i + offset + right; -1 = unlimited.
        top_left: align the diagonal with the first query and the first key. Default: with the last ones.
        softmax_scale: default 1 / sqrt(head_dim). A number, like softcap and dropout_p; multiply q by a learned scale.
        softcap: 0 = off.
        alibi_slopes: float32 (heads_q) or (batch, heads_q) (Press et al. 2021).
        bias: added to the scores, (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1), any floating dtype. Differentiable.
        mask: bool, True = visible, shaped like bias.
        sink: (heads_q), adds exp(sink) to the softmax denominator (Xiao et al. 2023, in the form of gpt-oss).
            Differentiable.
        dropout_p: probability of dropping a weight, in [0, 1]. It is rounded to a multiple of 1/256, but never to 0 or
            1. Kept weights are scaled by 1 / (1 - p) with the rounded p, so that the expectation is exact.
        rng_state: int64 (2) on q's device, the Philox seed and offset that decide what is dropped, the same on every
            device (see ``draw_rng_state``); None draws one. Used only with dropout.
        block_mask: block-sparse visibility, made for the lengths of q and k. With packed sequences: made for at least
            max_seqlen_q and max_seqlen_k, with exactly the rows of blocks that max_seqlen_q needs.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1), where each packed sequence begins and ends. Bias, mask and
            dropout then count queries and keys from the start of each sequence.
        max_seqlen_q, max_seqlen_k: length of the longest packed sequence, or a larger number. None: taken from the
            shape of bias, mask or block_mask; else read from cu_seqlens on CPU; else the total.
        seqused_q, seqused_k: int32 (batch), how many rows of each sequence are in use, counted from its start.
        deterministic: the backward gives the same bits in every run. None: as
            ``torch.use_deterministic_algorithms`` says. The forward is always bitwise repeatable.
        return_lse: also return the log-sum-exp of each query's scores.
        return_max_logit: also return the largest score of each head, for QK-clip (Kimi K2, Moonshot AI 2025, MuonClip).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v) in q's dtype, or (out, lse) with
        lse (batch, heads_q, seqlen_q) or (heads_q, total_q), float32 (float64 for float64), natural logarithm,
        differentiable. With nested tensors both are nested, with the offsets of q.
        With return_max_logit, max_logit comes last: (out, max_logit) or (out, lse, max_logit). It is (batch, heads_q),
        also of packed and nested sequences, in the dtype of lse, without gradient: the largest score that a query of
        the head sees, before sink and dropout; -inf where none sees a key, Inf or NaN where a visible score is. Out and
        lse may be rounded otherwise then.

    Raises:
        RuntimeError: an argument has a wrong dtype, shape, device or value, or is not supported (``supports`` tells
            beforehand); second derivatives or forward mode are wanted; or the call is inside of torch.distributed's
            ``context_parallel``.
        ValueError: window_size is not a pair, or block_mask is made for other lengths, batch entries or heads, or lies
            on another device.
        TypeError: an argument has a type that is not allowed. Subclasses of Tensor without a ``__torch_dispatch__``
            (except Parameter), masked tensors, nested tensors (except q, k and v together) and, without
            ``register_dtensor``, DTensors are refused.
    """
    if not type(q) is type(k) is type(v) is Tensor or q.is_nested or k.is_nested or v.is_nested:
        attend = _attend_of_class(q, k, v, cu_seqlens_q is not None)
        if attend is not None:
            return attend(
                attention, q, k, v, causal=causal, window_size=window_size, top_left=top_left,
                softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask,
                sink=sink, dropout_p=dropout_p, rng_state=rng_state, block_mask=block_mask, cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q,
                seqused_k=seqused_k, deterministic=deterministic, return_lse=return_lse,
                return_max_logit=return_max_logit,
            )  # fmt: skip
        check_tensors(q=q, k=k, v=v)
    if type(dropout_p) is not float:
        dropout_p = as_number("dropout_p", dropout_p)
    if dropout_p > 0 and rng_state is None:
        rng_state = draw_rng_state(q.device)
    options = checked_score_options(
        q, k, causal, window_size, top_left, softmax_scale, softcap, alibi_slopes, bias, mask, sink, dropout_p,
        rng_state, block_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
    )  # fmt: skip
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if not type(deterministic) is type(return_lse) is type(return_max_logit) is bool:
        deterministic, return_lse = as_flag("deterministic", deterministic), as_flag("return_lse", return_lse)
        return_max_logit = as_flag("return_max_logit", return_max_logit)
    if deterministic:
        options = (*ScoreOptions(*options), deterministic)
    if return_max_logit:
        out, lse, max_logit = call(_FORWARD_MAX_LOGIT, q, k, v, *options)
        return (out, lse, max_logit) if return_lse else (out, max_logit)
    out, lse = call(_FORWARD, q, k, v, *options)
    return (out, lse) if return_lse else out


_classes_served: list[tuple[Callable[..., bool], Callable[..., Any]]] = [(nested.is_nested, nested.attend)]


def serve_class(is_theirs: Callable[..., bool], attend: Callable[..., Any]) -> None:
    """From now on ``attend(attention, q, k, v, **options)`` computes ``attention`` where ``is_theirs(q, k, v, packed)``
    says so, of subclasses of Tensor."""
    _classes_served.append((is_theirs, attend))


def _attend_of_class(q: Any, k: Any, v: Any, packed: bool) -> Callable[..., Any] | None:
    for is_theirs, attend in _classes_served:
        if is_theirs(q, k, v, packed):
            return attend
    return None


def attention_weights(
    q: Tensor, k: Tensor, lse: Tensor, *, signed: bool = False, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """The attention weights exp(score - lse), which ``attention`` never stores, recomputed from its lse.

    Differentiable in q, k, bias and lse. With the lse of ``attention`` these gradients add up to that of the softmax.

    Args:
        q, k: as for ``attention``.
        lse: float32 (batch, heads_q, seqlen_q) or (heads_q, total_q), float64 for float64, from ``attention``. It
            includes the sink of that call.
        signed: negate the weights that dropout drops, instead of dropping them and scaling the others.
        dropout_p: as for ``attention``, with the rng_state of that call.
        **options: the options of ``attention`` that determine scores: causal, window_size, top_left, softmax_scale,
            softcap, alibi_slopes, bias, mask, rng_state, block_mask, cu_seqlens_*, max_seqlen_*, seqused_*.
            ``sink=None`` is accepted.

    Returns:
        (batch, heads_q, seqlen_q, seqlen_k) in q's dtype, after dropout; with packed sequences the lengths are
        max_seqlen_q and max_seqlen_k. Hidden pairs are 0.

    Raises:
        RuntimeError, ValueError: as ``attention``, and for dropout_p > 0 without an rng_state.
        TypeError: as ``attention``, and for a sink or an unknown option.
    """
    check_names("attention_weights()", options, SCORE_OPTIONS)
    if options.get("sink") is not None:
        raise TypeError("attention_weights() takes no sink: it is part of lse")
    check_tensors(q=q, k=k, lse=lse)
    dropout_p = as_number("dropout_p", dropout_p)
    signed = as_flag("signed", signed)
    dropout_mode = 0 if dropout_p == 0 else 2 if signed else 1
    arguments = checked_score_options(q, k, dropout_p=dropout_p, **options)
    weights: Tensor = call(_OPS.attention_weights.default, q, k, lse, dropout_mode, *arguments)
    return weights


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache of keys and values, with the keys split over CTAs (Flash-Decoding, Dao et
    al. 2023). The diagonal is aligned with the last query and the last key. Not differentiable.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with ``cu_seqlens_q``; dtypes as for
            ``attention``.
        k_cache, v_cache: (batch_cache, seqlen_cache, heads_kv, head_dim), or pages (num_pages, page_size, heads_kv,
            head_dim) with ``block_table``.
        k, v: (batch, seqlen_new, heads_kv, head_dim), appended to the caches, in place, before attending.
        cache_seqlens: int32 (batch), rows of the cache in use, including left padding but not the new rows; None = all.
        cache_leftpad: int32 (batch), how many rows at the start are padding.
        cache_batch_idx: int32 (batch), the batch entry of the cache for each batch entry of q.
        block_table: int32 (batch, max_pages), the pages of each sequence.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), rotary embedding (Su et al. 2021). The position of a
            new key is its row in the cache. Queries have the positions of the new rows if causal or with a window, and
            otherwise all that of the first new row.
        rotary_interleaved: rotate neighbouring elements (GPT-J) instead of the first half against the second
            (GPT-NeoX).
        causal, window_size, softmax_scale, softcap, alibi_slopes, sink, cu_seqlens_q, max_seqlen_q, return_lse: as for
            ``attention``.
        num_splits: number of ranges of keys; 0 = the library decides.
        batch_invariant: a sequence gets the same bits whatever else is in the batch. Requires num_splits 0 or 1.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v), or (out, lse) with lse (batch, heads_q, seqlen_q); packed as q.

    Raises:
        RuntimeError: as ``attention``; with k and v also if a tensor requires a gradient.
        ValueError: only one of k and v is given, or window_size is not a pair.
        TypeError: an argument has a type that is not allowed.
    """
    if not type(q) is type(k_cache) is type(v_cache) is Tensor or q.is_nested or k_cache.is_nested or v_cache.is_nested:
        check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together, got only {'v' if k is None else 'k'}")
    if k is not None:
        check_tensors(k=k, v=v)
    if type(return_lse) is not bool:
        return_lse = as_flag("return_lse", return_lse)
    options = checked_decode_options(
        q, cache_seqlens, cache_leftpad, cache_batch_idx, block_table, rotary_cos, rotary_sin, rotary_interleaved,
        causal, window_size, softmax_scale, softcap, alibi_slopes, sink, cu_seqlens_q, max_seqlen_q, num_splits,
        batch_invariant,
    )  # fmt: skip
    if k is None:
        out, lse = call(_DECODE, q, k_cache, v_cache, *options)
    else:
        out, lse = call(_DECODE_APPEND, q, k_cache, v_cache, k, v, *options)
    return (out, lse) if return_lse else out


def merge(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from the results over disjoint parts of them (Rabe & Staats 2021). Differentiable.

    Args:
        outs: results of ``attention``, as a sequence of tensors or stacked: (parts, batch, seqlen_q, heads_q, head_dim)
            or (parts, total_q, heads_q, head_dim). A sequence is stacked by a copy.
        lses: their lse: (parts, batch, heads_q, seqlen_q) or (parts, heads_q, total_q).

    Returns:
        (out, lse) shaped as one part: lse = logsumexp(lses), out = sum of exp(lses - lse) * outs. A part with lse -inf
        contributes nothing, even if its out is NaN.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
        ValueError: a sequence is empty.
        TypeError: a sequence does not consist of tensors.
    """
    out, lse = call(_OPS.merge.default, _stack("outs", outs), _stack("lses", lses))
    return out, lse


def draw_rng_state(device: torch.device | str) -> Tensor:
    """A seed and offset for dropout, from torch's default generator of the device.

    Philox4x32-7 (Salmon et al. 2011) decides from them which weights are dropped: the same ones on every device, but
    possibly others in another version of this library.

    Args:
        device: of the result; ``attention`` requires the device of q.

    Returns:
        int64 (2).

    Raises:
        RuntimeError: from torch, if there is no such device.
        TypeError: device is not a device.
    """
    check_device(device)
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def checked_score_options(
    q: Tensor,
    k: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    top_left: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    block_mask: BlockMask | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Any, ...]:
    """The fields of ScoreOptions, without the trailing ones if all of these have their defaults: operators fill in
    defaults faster than torch passes arguments."""
    if F.scaled_dot_product_attention is not TORCH_SDPA:
        _refuse_context_parallel()
    if not type(causal) is type(top_left) is bool:
        causal, top_left = as_flag("causal", causal), as_flag("top_left", top_left)
    if not type(softcap) is type(dropout_p) is float:
        softcap, dropout_p = as_number("softcap", softcap), as_number("dropout_p", dropout_p)
    left, right = _window(causal, window_size)
    allow_tf32 = may_use_tf32(q)
    often_given = (_scale(q, softmax_scale), left, right, top_left)
    if (
        bias is mask is sink is alibi_slopes is rng_state is None
        and cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None
        and block_mask is None
        and max_seqlen_q is max_seqlen_k is None
        and softcap == 0
        and dropout_p == 0
        and not allow_tf32
    ):
        return often_given
    check_optional_tensors(bias=bias, sink=sink, mask=mask, alibi_slopes=alibi_slopes, rng_state=rng_state)
    check_optional_tensors(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k
    )
    blocks: tuple[Tensor | None, ...] = (None,) * 4
    mask_shapes = [t.shape for t in (bias, mask) if t is not None]
    if block_mask is not None:
        check_type_of_block_mask(block_mask)
        blocks = block_mask.tensors
        mask_shapes.append(torch.Size(block_mask.shape))
    max_seqlen_q = _max_seqlen(max_seqlen_q, "max_seqlen_q", cu_seqlens_q, q, 2, mask_shapes)
    max_seqlen_k = _max_seqlen(max_seqlen_k, "max_seqlen_k", cu_seqlens_k, k, 3, mask_shapes)
    if block_mask is not None:
        _check_block_mask(block_mask, q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    return (
        *often_given, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, bias, mask, softcap, sink, alibi_slopes,
        dropout_p, rng_state, seqused_q, seqused_k, *blocks, allow_tf32,
    )  # fmt: skip


SCORE_OPTIONS = frozenset(inspect.signature(checked_score_options).parameters) - {"q", "k"}


def checked_decode_options(
    q: Tensor,
    cache_seqlens: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
) -> tuple[Any, ...]:
    """The fields of DecodeOptions, shortened in the same way."""
    if F.scaled_dot_product_attention is not TORCH_SDPA:
        _refuse_context_parallel()
    if not type(causal) is type(rotary_interleaved) is type(batch_invariant) is bool:
        causal, rotary_interleaved = as_flag("causal", causal), as_flag("rotary_interleaved", rotary_interleaved)
        batch_invariant = as_flag("batch_invariant", batch_invariant)
    if type(softcap) is not float:
        softcap = as_number("softcap", softcap)
    if type(num_splits) is not int or num_splits != 0:
        num_splits = as_integer("num_splits", num_splits)
    left, right = _window(causal, window_size)
    allow_tf32 = may_use_tf32(q)
    often_given = (_scale(q, softmax_scale), left, right, cache_seqlens, block_table)
    check_optional_tensors(cache_seqlens=cache_seqlens, block_table=block_table)
    if (
        cache_leftpad is cache_batch_idx is rotary_cos is rotary_sin is None
        and alibi_slopes is sink is cu_seqlens_q is None
        and max_seqlen_q is None
        and softcap == 0
        and num_splits == 0
        and not (rotary_interleaved or batch_invariant or allow_tf32)
    ):
        return often_given
    check_optional_tensors(cache_leftpad=cache_leftpad, cache_batch_idx=cache_batch_idx)
    check_optional_tensors(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    check_optional_tensors(alibi_slopes=alibi_slopes, sink=sink, cu_seqlens_q=cu_seqlens_q)
    max_seqlen_q = _max_seqlen(max_seqlen_q, "max_seqlen_q", cu_seqlens_q, q, 2, ())
    return (
        *often_given, cache_batch_idx, rotary_cos, rotary_sin, rotary_interleaved, cu_seqlens_q, max_seqlen_q, softcap,
        sink, alibi_slopes, cache_leftpad, num_splits, batch_invariant, allow_tf32,
    )  # fmt: skip


DECODE_OPTIONS = frozenset(inspect.signature(checked_decode_options).parameters) - {"q"}


def may_use_tf32(q: Tensor) -> bool:
    """Whether products may round to TF32. CPU kernels have no TF32."""
    return q.is_cuda and q.dtype == torch.float32 and torch_allows_tf32()


def torch_allows_tf32() -> bool:
    """torch's setting; all of its older settings change this one."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# The tracer cannot read that attribute, so the result counts as a constant; code is traced again when the setting
# changes. This line does what torch.compiler.assume_constant_result does, which would import the compiler.
torch_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    left, right = check_window(window_size)
    if not causal:
        return left, right
    if right < -1:  # what operators say of a right window that they see
        raise RuntimeError(f"window_size[1] must be >= -1 (-1 = unlimited), got {right}")
    return left, 0


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    if softmax_scale is not None:
        if type(softmax_scale) is float:
            return softmax_scale
        return as_number("softmax_scale", softmax_scale, "multiply the queries by it, which gives it its gradient too")
    shape = q.shape
    head_dim = shape[-1] if shape else 0
    return 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0


def _refuse_context_parallel() -> None:
    if in_context_parallel():
        raise RuntimeError(
            "flash_ext does not take part in torch.distributed's context_parallel, which is active: each rank would "
            "attend to its own part of the keys alone. Leave it and call context_parallel_attention of "
            "flash_ext.integrations.distributed, or stay and call F.scaled_dot_product_attention under "
            "flash_ext.activate()"
        )


def _max_seqlen(
    given: int | None, name: str, cu_seqlens: Tensor | None, rows: Tensor, dim: int, scores: Sequence[torch.Size]
) -> int:
    """``given``, or a bound on the longest sequence. ``scores``: the shapes of bias and masks that are given."""
    if given is not None:
        return as_integer(name, given)
    if cu_seqlens is None:
        return 0
    for shape in scores:
        if len(shape) == 4 and shape[dim] != 1:
            return shape[dim]
    return _longest(cu_seqlens, rows)


def _longest(cu_seqlens: Tensor, rows: Tensor) -> int:
    """The length of the longest sequence, or a bound on it where reading it would wait for a device or stop a trace."""
    if cu_seqlens.dim() != 1 or rows.dim() == 0 or cu_seqlens.is_floating_point() or cu_seqlens.is_complex():
        return 0  # the operator raises and names what is wrong
    if not can_read(cu_seqlens):
        return as_integer("max_seqlen", rows.shape[0])  # a tensor while torch.jit.trace looks
    lengths = cu_seqlens.diff()
    return max(0, int(lengths.max())) if lengths.numel() > 0 else 0


def check_type_of_block_mask(block_mask: Any) -> None:
    if isinstance(block_mask, BlockMask):
        if not all(type(t) is Tensor for t in block_mask.tensors):
            names = ("offsets", "indices", "bitmap_ids", "bitmaps")
            check_tensors(**{f"block_mask.{name}": getattr(block_mask, name) for name in names})
        return
    way_out = ""
    if is_instance(block_mask, FLEX_BLOCK_MASK):
        way_out = ": BlockMask.from_flex(block_mask) makes one of it"
    raise TypeError(f"block_mask must be a flash_ext.BlockMask, got {describe(block_mask)}{way_out}")


def _check_block_mask(
    block_mask: BlockMask, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    """Raises unless the mask is made for such q and k. Operators would name its tensors, of which the caller of
    ``attention`` has not heard."""
    if block_mask.offsets.device != q.device:
        raise ValueError(
            f"block_mask must be on the device of q, {q.device}, got one on {block_mask.offsets.device} (to() moves it)"
        )
    made_for = (block_mask.seqlen_q, block_mask.seqlen_k)
    if cu_seqlens_q is not None:
        num_rows = -(-max_seqlen_q // block_mask.block_size[0])
        if made_for[0] < max_seqlen_q or made_for[1] < max_seqlen_k or block_mask.offsets.shape[-1] != num_rows + 1:
            raise ValueError(
                f"block_mask must cover max_seqlen_q = {max_seqlen_q} in {num_rows} rows of blocks and "
                f"max_seqlen_k = {max_seqlen_k}, got one for lengths {made_for}"
            )
    elif q.dim() == 4 and k.dim() == 4 and made_for != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"block_mask must be made for the lengths of q and k, {(q.shape[1], k.shape[1])}, got one for {made_for}"
        )
    if cu_seqlens_q is None and q.dim() == 4:
        _check_lists_of_block_mask(block_mask, q.shape[0], q.shape[2])
    elif cu_seqlens_q is not None and cu_seqlens_q.dim() == 1 and q.dim() == 3:
        _check_lists_of_block_mask(block_mask, cu_seqlens_q.shape[0] - 1, q.shape[1])


def _check_lists_of_block_mask(block_mask: BlockMask, batch: int, heads: int) -> None:
    for name, size, expected in (("batch", block_mask.shape[0], batch), ("heads", block_mask.shape[1], heads)):
        if size != 1 and size != expected:
            raise ValueError(f"block_mask must have the {name} of q, {expected}, or 1 for all, got {size}")


def _stack(name: str, parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Stacks the parts. Checks them first, because torch.stack would silently convert different dtypes, and its errors
    name no argument."""
    if isinstance(parts, Tensor):
        if type(parts) is not Tensor or parts.is_nested:
            check_tensors(**{name: parts})
        return parts
    if not isinstance(parts, Iterable):
        raise TypeError(f"{name} must be a Tensor or a sequence of Tensors, got {describe(parts)}")
    parts = tuple(parts)
    if not parts:
        raise ValueError(f"{name} must hold at least one part, got an empty sequence")
    for i, part in enumerate(parts):
        check_tensors(**{f"{name}[{i}]": part})
        if part.dtype != parts[0].dtype or part.shape != parts[0].shape:
            raise RuntimeError(
                f"{name}[{i}] must have the shape and dtype of {name}[0]: expected {tuple(parts[0].shape)} "
                f"{parts[0].dtype}, got {tuple(part.shape)} {part.dtype}"
            )
        if part.device != parts[0].device:
            raise RuntimeError(f"{name}[{i}] must be on the device of {name}[0], {parts[0].device}, got {part.device}")
    return torch.stack(parts)
