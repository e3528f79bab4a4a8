"""The functions people call: ``attention`` with everything it can do, and what goes with it.

Tensors are (batch, seqlen, heads, head_dim) with any strides as long as the last dimension is contiguous, so that a
(batch, heads, seqlen, head_dim) tensor is passed as a transposed view. With ``cu_seqlens_q`` and ``cu_seqlens_k``,
sequences are packed one after another: (total, heads, head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext._plan as _plan
from flash_ext.masks import BlockMask
from flash_ext.ops import ScoreOptions, call

_OPS = torch.ops.flash_ext
_HEAD_DIM_MULTIPLE = 8


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
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · softmax_scale + ...) v, exact, without the score matrix in memory (Dao 2023, FlashAttention-2).

    Score of query i and key j: ``s = q_i · k_j * softmax_scale``; then ``softcap * tanh(s / softcap)``; then
    ``- slope * |i + offset - j|``; then ``+ bias``. ``offset`` is seqlen_k - seqlen_q, or 0 with ``top_left``.
    A key is visible where ``window_size``, ``mask``, ``block_mask`` and the lengths all allow it. A query that sees
    nothing gets out 0, lse -inf and zero gradients; what keys and values hold where nobody looks has no influence.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim) or, packed, (total_q, heads_q, head_dim). float32, float16, bfloat16,
            on CPU also float64. head_dim is a multiple of 8 up to 256.
        k: (batch, seqlen_k, heads_kv, head_dim) or (total_k, heads_kv, head_dim); heads_kv divides heads_q, and
            neighbouring query heads share a key head (GQA, Ainslie et al. 2023).
        v: like k, with a head_dim_v of its own.
        causal: no key to the right of the diagonal, the same as a right window of 0.
        window_size: (left, right): key j is visible where i + offset - left <= j <= i + offset + right; -1 = unlimited.
        top_left: the diagonal starts at the first query and key, and not where it ends at the last ones.
        softmax_scale: default 1 / sqrt(head_dim).
        softcap: 0 = off.
        alibi_slopes: float32 (heads_q) or (batch, heads_q) (Press et al. 2021).
        bias: added to the scores, (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1), any floating dtype. Differentiable.
        mask: bool, True = visible, shaped like bias.
        sink: (heads_q), adds exp(sink) to the softmax denominator (Xiao et al. 2023, in the form of gpt-oss).
            Differentiable.
        dropout_p: probability of dropping a weight, in [0, 1]; those that stay are scaled by 1 / (1 - dropout_p).
        rng_state: int64 (2) on q's device, the Philox seed and offset that decide what is dropped, whatever the device
            (see ``draw_rng_state``); None draws one. Only with dropout.
        block_mask: block-sparse visibility.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1), where each packed sequence begins and ends. Bias, mask and
            dropout then count queries and keys from the start of each sequence.
        max_seqlen_q, max_seqlen_k: the longest packed sequence. None: as bias or mask has it, else read from cu_seqlens
            on CPU, else the total.
        seqused_q, seqused_k: int32 (batch), how many rows of each sequence are in use.
        deterministic: the backward gives the same bits every time; None: as
            ``torch.use_deterministic_algorithms`` says. The forward always does.
        return_lse: also return the log-sum-exp of each query's scores.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) or (total_q, heads_q, head_dim_v) in q's dtype, or (out, lse) with
        lse (batch, heads_q, seqlen_q) or (heads_q, total_q), float32 (float64 for float64), natural logarithm,
        differentiable.

    Raises:
        RuntimeError: an argument has a wrong type, shape, device or value, or is not supported; ``supports`` tells
            beforehand. Differentiating twice, or in forward mode, raises too.
        ValueError: window_size is no pair.
    """
    if dropout_p > 0 and rng_state is None:
        rng_state = draw_rng_state(q.device)
    options = _score_options(
        q,
        k,
        causal=causal,
        window_size=window_size,
        top_left=top_left,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        mask=mask,
        sink=sink,
        dropout_p=dropout_p,
        rng_state=rng_state,
        block_mask=block_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    out, lse = call(_OPS.attention_forward.default, q, k, v, *options, deterministic)
    return (out, lse) if return_lse else out


def attention_weights(
    q: Tensor, k: Tensor, lse: Tensor, *, signed: bool = False, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """The attention weights exp(score - lse), which ``attention`` never stores, recomputed from its lse.

    Differentiable in q, k, bias and lse; with the lse of ``attention`` these add up to the gradient of the softmax.

    Args:
        q, k: as for ``attention``.
        lse: (batch, heads_q, seqlen_q) or (heads_q, total_q); of a call with a sink it holds the sink already.
        signed: do not drop and scale weights, but negate those that dropout drops.
        dropout_p: as for ``attention``, with the rng_state of that call.
        **options: those of ``attention`` that make up scores: causal, window_size, top_left, softmax_scale, softcap,
            alibi_slopes, bias, mask, rng_state, block_mask, cu_seqlens_*, max_seqlen_*, seqused_*.

    Returns:
        (batch, heads_q, seqlen_q, seqlen_k) in q's dtype, after dropout; packed sequences have max_seqlen_q and
        max_seqlen_k. What is not visible is 0.

    Raises:
        RuntimeError: as ``attention``, and with dropout_p > 0 but no rng_state.
    """
    if "sink" in options:
        raise TypeError("attention_weights() takes no sink: it is part of lse")
    dropout_mode = 0 if dropout_p == 0 else 2 if signed else 1
    arguments = _score_options(q, k, dropout_p=dropout_p, **options)
    weights: Tensor = call(_OPS.attention_weights.default, q, k, lse, *arguments, dropout_mode)
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
    """Attention of new queries over a cache of keys and values, which is cut into ranges that are worked on at the
    same time (Flash-Decoding, Dao et al. 2023). The last query stands at the last key. Not differentiable.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with ``cu_seqlens_q``.
        k_cache, v_cache: (batch_cache, seqlen_cache, heads_kv, head_dim), or pages (num_pages, page_size, heads_kv,
            head_dim) with ``block_table``.
        k, v: (batch, seqlen_new, heads_kv, head_dim), written into the caches behind what they hold, before attending.
        cache_seqlens: int32 (batch), rows of the cache in use, left padding included, new rows not; None = all.
        cache_leftpad: int32 (batch), rows at the start that are padding.
        cache_batch_idx: int32 (batch), the cache's batch entry of each of q's.
        block_table: int32 (batch, max_pages), the pages of each sequence.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2): rotary embedding (Su et al. 2021) of k at the rows it
            goes to, and of q: from the first new row onwards if causal or with a window, else at that row alone.
        rotary_interleaved: rotate neighbours (GPT-J), and not the first half against the second (GPT-NeoX).
        causal, window_size, softmax_scale, softcap, alibi_slopes, sink, cu_seqlens_q, max_seqlen_q, return_lse: as for
            ``attention``.
        num_splits: key ranges; 0 = the library decides.
        batch_invariant: the same bits whatever else is in the batch.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v), or (out, lse) with lse (batch, heads_q, seqlen_q); packed as q.

    Raises:
        RuntimeError: as ``attention``; with k and v also if something requires a gradient.
        ValueError: only one of k and v.
    """
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together, got only {'v' if k is None else 'k'}")
    op, new = (_OPS.attention_decode, ()) if k is None else (_OPS.attention_decode_append, (k, v))
    left, right = _window(causal, window_size)
    if max_seqlen_q is None:
        max_seqlen_q = 0 if cu_seqlens_q is None else _longest(cu_seqlens_q, q.shape[0])
    out, lse = call(
        op.default,
        q,
        k_cache,
        v_cache,
        *new,
        cache_seqlens,
        cache_leftpad,
        cache_batch_idx,
        block_table,
        rotary_cos,
        rotary_sin,
        alibi_slopes,
        sink,
        cu_seqlens_q,
        max_seqlen_q,
        _scale(q, softmax_scale),
        softcap,
        left,
        right,
        rotary_interleaved,
        num_splits,
        batch_invariant,
    )
    return (out, lse) if return_lse else out


def merge(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from the results over disjoint parts of them (Rabe & Staats 2021). Differentiable.

    Args:
        outs: results of ``attention``, a sequence of them or stacked: (parts, batch, seqlen_q, heads_q, head_dim) or
            (parts, total_q, heads_q, head_dim).
        lses: their lse: (parts, batch, heads_q, seqlen_q) or (parts, heads_q, total_q).

    Returns:
        (out, lse) shaped as one part: lse = logsumexp(lses), out = sum of exp(lses - lse) * outs. A part with lse -inf
        contributes nothing, even if its out is NaN.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit together.
    """
    outs, lses = (x if isinstance(x, Tensor) else torch.stack(tuple(x)) for x in (outs, lses))
    out, lse = call(_OPS.merge.default, outs, lses)
    return out, lse


def draw_rng_state(device: torch.device | str) -> Tensor:
    """A seed and offset for dropout, int64 (2), from torch's default generator of the device."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def supports(q: Tensor, k: Tensor, v: Tensor, *, operation: str = "forward", **options: Any) -> tuple[bool, str]:
    """Whether a call can run, and if not, why: what the call itself would say. Reads shapes, dtypes and devices only.

    Args:
        q, k, v, **options: those of ``attention``; for "decode" v and k are the caches, and num_splits, block_table and
            batch_invariant may be given.
        operation: "forward", "backward", "weights", "weights_backward" or "decode".

    Returns:
        (True, "") or (False, reason).

    Raises:
        TypeError: an option that does not exist.
    """
    try:
        return _plan.supports(_problem(q, k, v, operation, **options))
    except ValueError as error:  # a dtype or device that the planner has no word for
        return False, str(error)


@dataclass(frozen=True)
class Explanation:
    """How a call runs: the planner's problem and plan. ``print`` it."""

    problem: _plan.Problem
    plan: _plan.Plan

    def __str__(self) -> str:
        problem, plan = self.problem, self.plan
        splits = f"{plan.num_splits}" + (f" of {plan.split_size} keys" if plan.split_size else "")
        lines = [
            f"flash_ext {problem.operation} by csrc/kernels/{plan.kernel} on {problem.device}, {problem.dtype}",
            f"  q ({problem.batch}, {problem.seqlen_q}, {problem.heads_q}, {problem.head_dim}), "
            f"k ({problem.batch}, {problem.seqlen_k}, {problem.heads_kv}, {problem.head_dim}), "
            f"head_dim of v {problem.head_dim_v}",
            f"  mask class {plan.mask_class}, tiles of {plan.block_m} queries x {plan.block_n} keys",
            f"  key ranges: {splits} forward, {plan.num_chunks} backward",
        ]
        return "\n".join(lines + [f"  - {reason}" for reason in plan.reasons])


def explain(q: Tensor, k: Tensor, v: Tensor, *, operation: str = "forward", **options: Any) -> Explanation:
    """Which kernel runs a call, with which tiles and splits, and why: the plan that the call itself follows.

    Takes what ``supports`` takes.

    Raises:
        ValueError: the call is not supported.
        TypeError: an option that does not exist.
    """
    problem = _problem(q, k, v, operation, **options)
    return Explanation(problem, _plan.make_plan(problem))


def pad_head_dim(x: Tensor) -> Tensor:
    """``x`` with zeros behind its last dimension up to the next size that kernels take. Scores do not change."""
    missing = -x.shape[-1] % _HEAD_DIM_MULTIPLE
    if missing:
        return F.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def _score_options(
    q: Tensor,
    k: Tensor,
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
) -> ScoreOptions:
    left, right = _window(causal, window_size)
    offsets, indices, bitmap_ids, bitmaps = (None,) * 4 if block_mask is None else block_mask.tensors
    return ScoreOptions(
        bias=bias,
        sink=sink,
        mask=mask,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        block_offsets=offsets,
        block_indices=indices,
        block_bitmap_ids=bitmap_ids,
        block_bitmaps=bitmaps,
        rng=rng_state,
        max_seqlen_q=_max_seqlen(max_seqlen_q, cu_seqlens_q, q, 2, bias, mask),
        max_seqlen_k=_max_seqlen(max_seqlen_k, cu_seqlens_k, k, 3, bias, mask),
        softmax_scale=_scale(q, softmax_scale),
        softcap=softcap,
        window_left=left,
        window_right=right,
        top_left=top_left,
        dropout_p=dropout_p,
    )


def _window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be (left, right), got {window_size!r}") from None
    return left, 0 if causal else right


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    if softmax_scale is not None:
        return softmax_scale
    return 1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] > 0 else 1.0


def _max_seqlen(given: int | None, cu_seqlens: Tensor | None, rows: Tensor, dim: int, *scores: Tensor | None) -> int:
    if given is not None or cu_seqlens is None:
        return given or 0
    for t in scores:
        if t is not None and t.dim() == 4 and t.shape[dim] != 1:
            return t.shape[dim]
    return _longest(cu_seqlens, rows.shape[0])


def _longest(cu_seqlens: Tensor, total: int) -> int:
    """The longest sequence, or a bound on it where reading would wait for a device or stop a trace."""
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return total
    lengths = cu_seqlens.diff()
    return max(0, int(lengths.max())) if lengths.numel() > 0 else 0


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operation: str,
    *,
    num_splits: int = 0,
    batch_invariant: bool = False,
    block_table: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    **options: Any,
) -> _plan.Problem:
    o = _score_options(q, k, **options)
    decode, packed = operation == "decode", o.cu_seqlens_q is not None
    paged = block_table is not None
    properties = torch.cuda.get_device_properties(q.device) if q.is_cuda else None
    batch = o.cu_seqlens_q.shape[0] - 1 if o.cu_seqlens_q is not None else q.shape[0]
    seqlen_k = o.max_seqlen_k if o.cu_seqlens_k is not None else k.shape[1]
    return _plan.Problem(
        operation=operation,
        device=q.device.type,
        compute_capability=10 * properties.major + properties.minor if properties else 0,
        num_workers=properties.multi_processor_count if properties else torch.get_num_threads(),
        dtype=str(q.dtype).removeprefix("torch."),
        batch=batch,
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        seqlen_q=o.max_seqlen_q if packed else q.shape[1],
        seqlen_k=seqlen_k * block_table.shape[1] if block_table is not None else seqlen_k,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        softmax_scale=o.softmax_scale,
        softcap=o.softcap,
        window_left=o.window_left,
        window_right=o.window_right,
        top_left=o.top_left,
        dropout_p=o.dropout_p,
        varlen=any(t is not None for t in (o.cu_seqlens_q, o.cu_seqlens_k, o.seqused_q, o.seqused_k)),
        paged=paged,
        has_bias=o.bias is not None,
        has_mask=o.mask is not None,
        has_block_mask=o.block_offsets is not None,
        has_alibi=o.alibi_slopes is not None,
        has_sink=o.sink is not None,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        num_splits=num_splits if decode else 1,
        batch_invariant=batch_invariant,
    )
