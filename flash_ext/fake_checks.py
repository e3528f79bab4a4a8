"""What operators check of tensors without memory: meta tensors, and fakes while somebody traces.

The messages are those of ``csrc/api``, which sees the other tensors. A size that is a symbol is not compared: a
comparison would fix its value for the whole trace, and the operator checks it when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

import flash_ext._plan as _plan

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SCORE_AXES = "(batch|1, heads_q|1, seqlen_q|1, seqlen_k|1)"


def check_attention(q: Tensor, k: Tensor, v: Tensor | None, options: Any) -> None:
    """Of q, k and v, and of options that have sizes of theirs. None for v: the operation has none."""
    packed = options.cu_seqlens_q is not None
    if packed != (options.cu_seqlens_k is not None):
        given = "cu_seqlens_q" if packed else "cu_seqlens_k"
        _fail(f"cu_seqlens_q and cu_seqlens_k must be given together, got only {given}")
    _check_query(q, packed)
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
    _check_options(q, k, options)
    _check_plan(q, options, k.shape[-2], q.shape[-1] if v is None else v.shape[-1])


def check_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: Any) -> None:
    """Of q and the caches."""
    packed, paged = options.cu_seqlens_q is not None, options.block_table is not None
    _check_query(q, packed)
    axes = "(batch_cache, seqlen_cache, heads_kv, head_dim)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_dtype(name, cache, "q", q)
        _check_rank(name, cache, 4, "(num_pages, page_size, heads_kv, head_dim) with block_table" if paged else axes)
    if not paged and options.cache_batch_idx is None:
        whose = "cu_seqlens_q.size(0) - 1" if packed else "q.size(0)"
        _check_size("k_cache", k_cache, 0, _batch(q, options.cu_seqlens_q), whose)
    _check_size("k_cache", k_cache, 3, q.shape[-1], f"q.size({q.dim() - 1})")
    for dim in range(3):
        _check_size("v_cache", v_cache, dim, k_cache.shape[dim], f"k_cache.size({dim})")
    _check_plan(q, options, k_cache.shape[2], v_cache.shape[3])


def _check_query(q: Tensor, packed: bool) -> None:
    _check_floating("q", q)
    axes = "(total_q, heads_q, head_dim) with cu_seqlens_q" if packed else "(batch, seqlen_q, heads_q, head_dim)"
    _check_rank("q", q, 3 if packed else 4, axes)


def _check_options(q: Tensor, k: Tensor, options: Any) -> None:
    batch, heads = _batch(q, options.cu_seqlens_q), q.shape[-2]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        _check_index(name, getattr(options, name), batch + 1, "(batch + 1)")
    for name in ("seqused_q", "seqused_k"):
        _check_index(name, getattr(options, name), batch, "(batch)")
    lengths = (q.shape[1], k.shape[1])
    if options.cu_seqlens_q is not None:
        lengths = (options.max_seqlen_q, options.max_seqlen_k)
    if options.bias is not None:
        _check_floating("bias", options.bias)
        _check_broadcasts("bias", options.bias, (batch, heads, *lengths))
    if options.mask is not None:
        if options.mask.dtype != torch.bool:
            _fail(f"mask must be bool, got {_name(options.mask.dtype)}")
        _check_broadcasts("mask", options.mask, (batch, heads, *lengths))
    if options.sink is not None:
        _check_floating("sink", options.sink)
        _check_shape("sink", options.sink, (heads,), "(heads_q)")


def _check_index(name: str, index: Tensor | None, size: Any, axes: str) -> None:
    if index is None:
        return
    if index.dtype != torch.int32:
        _fail(f"{name} must be int32, got {_name(index.dtype)}")
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
    if t.dtype not in _FLOATING:
        _fail(f"{name} must be float16, bfloat16, float32 or float64, got {_name(t.dtype)}")


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
