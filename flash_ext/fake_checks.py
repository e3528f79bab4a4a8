"""What operators check of tensors without memory: meta tensors, and fakes while somebody traces.

The messages are those of ``csrc/api``, which sees the other tensors. A size that is a symbol is not compared: a
comparison would fix its value for the whole trace, and the operator checks it when it runs. Left to the operator are
also strides, the tensors of block masks and rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

import flash_ext._plan as _plan
from flash_ext.argument_checks import KERNEL_DTYPES

_SCORE_AXES = "(batch|1, heads_q|1, seqlen_q|1, seqlen_k|1)"


def check_attention(q: Tensor, k: Tensor, v: Tensor | None, options: Any) -> None:
    """Of q, k and v, and of the options. None for v: the operation has none."""
    packed = options.cu_seqlens_q is not None
    if packed != (options.cu_seqlens_k is not None):
        given = "cu_seqlens_q" if packed else "cu_seqlens_k"
        _fail(f"cu_seqlens_q and cu_seqlens_k must be given together, got only {given}")
    _check_query(q, options.cu_seqlens_q)
    rows = 0 if packed else 1
    _check_dtype("k", k, "q", q)
    axes = "(total_k, heads_kv, head_dim) with cu_seqlens_k" if packed else "(batch, seqlen_k, heads_kv, head_dim)"
    _check_rank("k", k, rows + 3, axes)
    if not packed:
        _check_size("k", k, 0, q.shape[0], "q.size(0)")
    _check_size("k", k, rows + 2, q.shape[-1], f"q.size({rows + 2})")
    if v is not None:
        _check_dtype("v", v, "q", q)
        _check_rank("v", v, k.dim(), f"({'total_k' if packed else 'batch, seqlen_k'}, heads_kv, head_dim_v)")
        for dim in range(rows + 2):  # all but the last
            _check_size("v", v, dim, k.shape[dim], f"k.size({dim})")
        _check_columns("v", v)
    lengths = (options.max_seqlen_q, options.max_seqlen_k) if packed else (q.shape[1], k.shape[1])
    _check_scores(q, lengths, options)
    _check_plan(q, options, k.shape[-2], q.shape[-1] if v is None else v.shape[-1])


def check_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: Any, new: Sequence[Tensor] = ()) -> None:
    """Of q, the caches, the new k and v, and the options."""
    packed, paged = options.cu_seqlens_q is not None, options.block_table is not None
    _check_query(q, options.cu_seqlens_q)
    batch, whose = _batch(q, options.cu_seqlens_q), "cu_seqlens_q.size(0) - 1" if packed else "q.size(0)"
    axes = "(batch_cache, seqlen_cache, heads_kv, head_dim)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_dtype(name, cache, "q", q)
        _check_rank(name, cache, 4, "(num_pages, page_size, heads_kv, head_dim) with block_table" if paged else axes)
    if paged:
        if options.cache_batch_idx is not None:
            _fail("cache_batch_idx belongs to a contiguous cache: expected None with block_table")
        _check_dtype_is("block_table", options.block_table, torch.int32)
        _check_rank("block_table", options.block_table, 2, "(batch, max_pages)")
        _check_size("block_table", options.block_table, 0, batch, whose)
    elif options.cache_batch_idx is None:
        _check_size("k_cache", k_cache, 0, batch, whose)
    _check_size("k_cache", k_cache, 3, q.shape[-1], f"q.size({q.dim() - 1})")
    for dim in range(3):
        _check_size("v_cache", v_cache, dim, k_cache.shape[dim], f"k_cache.size({dim})")
    _check_columns("v_cache", v_cache)
    for name in ("cache_seqlens", "cache_leftpad", "cache_batch_idx"):
        _check_index(name, getattr(options, name), batch, "(batch)")
    for name, tokens, cache, axis in zip("kv", new, (k_cache, v_cache), ("head_dim", "head_dim_v"), strict=False):
        _check_new_tokens(name, tokens, q, new[0], (batch, cache.shape[2], cache.shape[3]), axis)
    _check_heads(q, batch, options)
    _check_plan(q, options, k_cache.shape[2], v_cache.shape[3])


def _check_query(q: Tensor, cu_seqlens_q: Tensor | None) -> None:
    _check_floating("q", q)
    if cu_seqlens_q is None:
        return _check_rank("q", q, 4, "(batch, seqlen_q, heads_q, head_dim)")
    _check_rank("q", q, 3, "(total_q, heads_q, head_dim) with cu_seqlens_q")
    _check_rank("cu_seqlens_q", cu_seqlens_q, 1, "(batch + 1)")
    if type(cu_seqlens_q.shape[0]) is int and cu_seqlens_q.shape[0] == 0:
        _fail("cu_seqlens_q must have shape (batch + 1), got (0,)")


def _check_columns(name: str, t: Tensor) -> None:
    if type(t.shape[-1]) is int and t.shape[-1] == 0:
        _fail(f"{name}.size({t.dim() - 1}) must be a multiple of 8 from 8 to 256, got 0")


def _check_new_tokens(name: str, t: Tensor, q: Tensor, k: Tensor, sizes: tuple[Any, Any, Any], head_dim: str) -> None:
    axes = f"(batch, seqlen_new, heads_kv, {head_dim})"
    if name == "k":
        _check_rank("k", t, 4, axes)
    _check_dtype(name, t, "q", q)
    batch, heads, columns = sizes
    _check_shape(name, t, (batch, k.shape[1], heads, columns), axes)


def _check_scores(q: Tensor, lengths: tuple[Any, Any], options: Any) -> None:
    batch, heads = _batch(q, options.cu_seqlens_q), q.shape[-2]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        _check_index(name, getattr(options, name), batch + 1, "(batch + 1)")
    for name in ("seqused_q", "seqused_k"):
        _check_index(name, getattr(options, name), batch, "(batch)")
    if options.bias is not None:
        _check_floating("bias", options.bias)
        _check_broadcasts("bias", options.bias, (batch, heads, *lengths))
    if options.mask is not None:
        _check_dtype_is("mask", options.mask, torch.bool)
        _check_broadcasts("mask", options.mask, (batch, heads, *lengths))
    _check_heads(q, batch, options)
    if options.rng_state is not None:
        _check_dtype_is("rng_state", options.rng_state, torch.int64)
        _check_shape("rng_state", options.rng_state, (2,), "(2), seed and offset")


def _check_heads(q: Tensor, batch: Any, options: Any) -> None:
    """Options that have a number for each head."""
    heads = q.shape[-2]
    if options.sink is not None:
        _check_floating("sink", options.sink)
        _check_shape("sink", options.sink, (heads,), "(heads_q)")
    if options.alibi_slopes is not None:
        _check_dtype_is("alibi_slopes", options.alibi_slopes, torch.float32)
        if options.alibi_slopes.dim() == 2:
            _check_shape("alibi_slopes", options.alibi_slopes, (batch, heads), "(batch, heads_q)")
        else:
            _check_shape("alibi_slopes", options.alibi_slopes, (heads,), "(heads_q) or (batch, heads_q)")


def _check_index(name: str, index: Tensor | None, size: Any, axes: str) -> None:
    if index is None:
        return
    _check_dtype_is(name, index, torch.int32)
    _check_shape(name, index, (size,), axes)


def _check_plan(q: Tensor, options: Any, heads_kv: Any, head_dim_v: Any) -> None:
    """The rules of the plan for sizes and numbers, as far as these are known."""
    heads_q = q.shape[-2]
    fields = {"head_dim": q.shape[-1], "head_dim_v": head_dim_v}
    if type(heads_q) is type(heads_kv) is int:
        fields |= {"heads_q": heads_q, "heads_kv": heads_kv}
    names = ("softmax_scale", "softcap", "window_left", "window_right", "dropout_p", "num_splits", "batch_invariant")
    fields |= {name: getattr(options, name) for name in names if hasattr(options, name)}
    known = {name: value for name, value in fields.items() if type(value) in (int, float, bool)}
    ok, reason = _plan.supports(_plan.Problem(device="cpu", dtype=_name(q.dtype), **known))
    if not ok:
        _fail(reason)


def _batch(q: Tensor, cu_seqlens_q: Tensor | None) -> Any:
    return q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1


# ---- Rules, as those of csrc/api/checks.h ---------------------------------------------------------------------------


def _fail(message: str) -> NoReturn:
    raise RuntimeError(f"flash_ext: {message}")


def _check_floating(name: str, t: Tensor) -> None:
    if t.dtype not in KERNEL_DTYPES:
        _fail(f"{name} must be float16, bfloat16, float32 or float64, got {_name(t.dtype)}")


def _check_dtype_is(name: str, t: Tensor, dtype: torch.dtype) -> None:
    if t.dtype != dtype:
        _fail(f"{name} must be {_name(dtype)}, got {_name(t.dtype)}")


def _check_dtype(name: str, t: Tensor, other: str, expected: Tensor) -> None:
    if t.dtype != expected.dtype:
        _fail(f"{name} must have the dtype of {other}: expected {_name(expected.dtype)}, got {_name(t.dtype)}")


def _check_rank(name: str, t: Tensor, rank: int, axes: str) -> None:
    if t.dim() != rank:
        _fail(f"{name} must be {rank}-dimensional {axes}, got shape {tuple(t.shape)}")


def _check_size(name: str, t: Tensor, dim: int, expected: Any, whose: str) -> None:
    if _differ(t.shape[dim], expected):
        _fail(f"{name}.size({dim}) must equal {whose}: expected {expected}, got {t.shape[dim]}")


def _check_shape(name: str, t: Tensor, expected: Sequence[Any], axes: str) -> None:
    if t.dim() != len(expected) or any(map(_differ, t.shape, expected)):
        _fail(f"{name} must have shape {axes}: expected {tuple(expected)}, got {tuple(t.shape)}")


def _check_broadcasts(name: str, t: Tensor, expected: Sequence[Any]) -> None:
    _check_rank(name, t, len(expected), _SCORE_AXES)
    if any(_differ(size, full) and size != 1 for size, full in zip(t.shape, expected, strict=True)):
        _fail(
            f"{name} must have shape {_SCORE_AXES}: expected {tuple(expected)} or 1 in any dimension, "
            f"got {tuple(t.shape)}"
        )


def _differ(size: Any, expected: Any) -> bool:
    return type(size) is type(expected) is int and size != expected


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
