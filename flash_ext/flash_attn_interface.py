"""The names of flash-attn, with the signatures and semantics of its version 2.8, for code that imports them already.

Beyond flash-attn: float32 (and float64 on CPU), a head_dim of v that differs, pages of any size, and a ``softmax_lse``
that is differentiable. Differences: queries that see nothing have softmax_lse -inf, where flash-attn says +inf;
``S_dmask`` holds the true probabilities and is not rounded up in size. Deterministic algorithms are also used where
``torch.use_deterministic_algorithms`` asks for them. window_size accepts -1 (unlimited); other negative values raise,
as does a negative softcap.

As in flash-attn, an integer may be a tensor of one, and window_size a tensor of two: the host reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext import head_dims
from flash_ext.argument_checks import (
    as_flag,
    as_integer,
    as_number,
    as_pair,
    check_optional_tensors,
    check_tensors,
    errors_name,
)
from flash_ext.functional import draw_rng_state
from flash_ext.tracing import can_read

Result = Tensor | tuple[Tensor, Tensor, Tensor]
Integer = int | Tensor
Window = tuple[Integer, Integer] | Tensor

_errors_name_qkv = errors_name(q="qkv", k="qkv", v="qkv")
_errors_name_packed_qkv = errors_name(
    q="qkv", k="qkv", v="qkv",
    cu_seqlens_q="cu_seqlens", cu_seqlens_k="cu_seqlens", max_seqlen_q="max_seqlen", max_seqlen_k="max_seqlen",
)  # fmt: skip
_errors_name_kv = errors_name(k="kv", v="kv")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (batch, seqlen_q, nheads, headdim) over k and v (batch, seqlen_k, nheads_k, headdim).

    Args:
        q, k, v: nheads_k divides nheads; headdim is anything up to 256.
        dropout_p: 0.0 in evaluation. Rounded to a multiple of 1/256 (see ``flash_ext.attention``).
        softmax_scale: default 1 / sqrt(headdim).
        causal: aligned to the bottom right: the last query sees the last key.
        window_size: (left, right), -1 = unlimited: query i sees keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right.
        softcap: > 0 caps the scores by softcap * tanh(score / softcap), 0 = off.
        alibi_slopes: float32 (nheads) or (batch, nheads); -slope * |i + seqlen_k - seqlen_q - j| is added.
        deterministic: the backward gives the same bits every time.
        return_attn_probs: also return softmax_lse and S_dmask.

    Returns:
        out (batch, seqlen_q, nheads, headdim), or (out, softmax_lse, S_dmask): softmax_lse (batch, nheads, seqlen_q)
        float32; S_dmask (batch, nheads, seqlen_q, seqlen_k), the probabilities, negative where dropout drops, empty
        without dropout.

    Raises:
        RuntimeError, ValueError, TypeError: as ``flash_ext.attention``.
    """
    return _attend(
        q,
        k,
        v,
        return_attn_probs,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )


@_errors_name_qkv
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` of queries, keys and values in one tensor.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim).
        The others: as for ``flash_attn_func``.

    Returns:
        As ``flash_attn_func``.

    Raises:
        ValueError: qkv has another shape.
        RuntimeError, ValueError, TypeError: as ``flash_attn_func``.
    """
    q, k, v = unpack("qkv", qkv, 5, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


@_errors_name_kv
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` of keys and values in one tensor.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        kv: (batch, seqlen_k, 2, nheads_k, headdim).
        The others: as for ``flash_attn_func``.

    Returns:
        As ``flash_attn_func``.

    Raises:
        ValueError: kv has another shape.
        RuntimeError, ValueError, TypeError: as ``flash_attn_func``.
    """
    k, v = unpack("kv", kv, 5, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """``flash_attn_func`` of sequences that are packed one after another.

    Args:
        q: (total_q, nheads, headdim).
        k, v: (total_k, nheads_k, headdim), or with block_table pages (num_blocks, page_block_size, nheads_k, headdim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1), where each sequence begins and ends.
        max_seqlen_q, max_seqlen_k: the longest sequences.
        block_table: int32 (batch, max_num_blocks_per_seq), the pages of each sequence; their keys count from 0 as
            many as cu_seqlens_k says. Without dropout, and without a derivative: the backward raises.
        The others: as for ``flash_attn_func``.

    Returns:
        out (total_q, nheads, headdim), or (out, softmax_lse, S_dmask) with softmax_lse (nheads, total_q) and S_dmask
        (batch, nheads, max_seqlen_q, max_seqlen_k) or empty.

    Raises:
        RuntimeError, ValueError, TypeError: as ``flash_ext.attention``.
        RuntimeError: in the backward of a call with block_table.
        ValueError: dropout_p > 0 with block_table.
    """
    if not type(cu_seqlens_q) is type(cu_seqlens_k) is Tensor:
        check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if not type(max_seqlen_q) is type(max_seqlen_k) is int:
        max_seqlen_q, max_seqlen_k = (
            read_integer("max_seqlen_q", max_seqlen_q),
            read_integer("max_seqlen_k", max_seqlen_k),
        )
    options: dict[str, Any] = dict(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
    )
    if block_table is None:
        options |= dict(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
        return _attend(q, k, v, return_attn_probs, dropout_p=dropout_p, deterministic=deterministic, **options)
    if as_number("dropout_p", dropout_p) != 0:
        raise ValueError(f"dropout_p must be 0 with block_table, got {dropout_p}")
    as_flag("deterministic", deterministic)  # there is no backward
    out, lse = attend_to_pages(q, k, v, block_table, cu_seqlens_k, max_seqlen_k, **options)
    return (out, lse, out.new_empty(0)) if as_flag("return_attn_probs", return_attn_probs) else out


@_errors_name_packed_qkv
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Integer,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` of queries, keys and values in one tensor.

    Args:
        qkv: (total, 3, nheads, headdim).
        cu_seqlens: int32 (batch + 1), where each sequence begins and ends.
        max_seqlen: the longest sequence.
        The others: as for ``flash_attn_func``.

    Returns:
        As ``flash_attn_varlen_func``.

    Raises:
        ValueError: qkv has another shape.
        RuntimeError, ValueError, TypeError: as ``flash_attn_varlen_func``.
    """
    q, k, v = unpack("qkv", qkv, 4, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


@_errors_name_kv
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` of keys and values in one tensor.

    Args:
        q: (total_q, nheads, headdim).
        kv: (total_k, 2, nheads_k, headdim).
        The others: as for ``flash_attn_varlen_func``.

    Returns:
        As ``flash_attn_varlen_func``.

    Raises:
        ValueError: kv has another shape.
        RuntimeError, ValueError, TypeError: as ``flash_attn_varlen_func``.
    """
    k, v = unpack("kv", kv, 4, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: Integer = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, nheads, headdim) over a cache, to which k and v are appended first.

    Args:
        q: any headdim up to 256; with one that is no multiple of 8 each call copies the whole caches, and with k and v
            copies them back.
        k_cache, v_cache: (batch_cache, seqlen_cache, nheads_k, headdim), or with block_table pages (num_blocks,
            page_block_size, nheads_k, headdim). Written to in place where there are k and v.
        k, v: (batch, seqlen_new, nheads_k, headdim), placed from row cache_seqlens on.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2), for k from position cache_seqlens on, and for q: likewise
            if causal or with a window, otherwise at position cache_seqlens alone. Only with k and v.
        cache_seqlens: integer or int32 (batch), rows of the cache in use.
        cache_batch_idx: int32 (batch), which batch entry of the cache belongs to each of q's.
        cache_leftpad: int32 (batch), the row where each sequence begins.
        block_table: int32 (batch, max_num_blocks_per_seq), the pages of each sequence.
        rotary_interleaved: rotate dimensions 0 and 1, 2 and 3, ...; otherwise 0 and rotary_dim / 2, ...
        num_splits: key ranges worked on at the same time; 0 = the library decides.
        return_softmax_lse: also return softmax_lse.
        The others: as for ``flash_attn_func``.

    Returns:
        out (batch, seqlen_q, nheads, headdim), or (out, softmax_lse) with softmax_lse (batch, nheads, seqlen_q).

    Raises:
        RuntimeError, ValueError, TypeError: as ``flash_ext.decode``.
    """
    if type(return_softmax_lse) is not bool:
        return_softmax_lse = as_flag("return_softmax_lse", return_softmax_lse)
    out, lse = head_dims.decode(
        q,
        k_cache,
        v_cache,
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=read_window(window_size),
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits if type(num_splits) is int else read_integer("num_splits", num_splits),
    )
    return (out, lse) if return_softmax_lse else out


def unpack(name: str, packed: Tensor, num_dims: int, count: int) -> tuple[Tensor, ...]:
    """``count`` tensors of one with ``num_dims`` dimensions, that lie side by side in the third from last."""
    check_tensors(**{name: packed})
    if packed.dim() != num_dims or packed.shape[-3] != count:
        raise ValueError(
            f"{name} must have {num_dims} dimensions and size {count} in the third from last, "
            f"got shape {tuple(packed.shape)}"
        )
    return packed.unbind(-3)


def read_integer(name: str, value: Any) -> int:
    """An int; of a tensor, the one integer that it holds."""
    if isinstance(value, Tensor):
        check_tensors(**{name: value})
        if value.numel() == 1:
            value = value.item()
    return as_integer(name, value)


def read_window(window_size: Any) -> tuple[int, int]:
    """A pair of ints; of tensors, the integers that they hold."""
    if type(window_size) is tuple and [type(side) for side in window_size] == [int, int]:
        return window_size
    if isinstance(window_size, Tensor):
        check_tensors(window_size=window_size)
        window_size = window_size.tolist()  # one wait for the device, not two
    left, right = as_pair("window_size", "(left, right)", window_size)
    return read_integer("window_size[0]", left), read_integer("window_size[1]", right)


def _check_cu_seqlens_k(cu_seqlens_k: Tensor, cu_seqlens_q: Tensor, max_seqlen_k: int) -> None:
    """What decoding would refuse under another name (it is given lengths), and max_seqlen_k, which it is not given."""
    if cu_seqlens_k.dtype != torch.int32 or cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k must be int32 with the shape of cu_seqlens_q, {tuple(cu_seqlens_q.shape)}, "
            f"got {cu_seqlens_k.dtype} {tuple(cu_seqlens_k.shape)}"
        )
    if cu_seqlens_k.numel() < 2 or not can_read(cu_seqlens_k):
        return
    lengths = cu_seqlens_k.diff()
    if int(cu_seqlens_k[0]) < 0 or int(lengths.min()) < 0:
        raise ValueError(f"cu_seqlens_k must start at 0 or above and not decrease, got {cu_seqlens_k.tolist()}")
    if int(lengths.max()) > max_seqlen_k:
        raise ValueError(
            f"max_seqlen_k must not be less than the longest sequence of cu_seqlens_k, {int(lengths.max())}, "
            f"got {max_seqlen_k}"
        )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    return_attn_probs: bool,
    *,
    dropout_p: float,
    deterministic: bool,
    window_size: Window,
    **options: Any,
) -> Result:
    if not type(deterministic) is type(return_attn_probs) is bool:
        deterministic = as_flag("deterministic", deterministic)
        return_attn_probs = as_flag("return_attn_probs", return_attn_probs)
    if type(dropout_p) is not float:
        dropout_p = as_number("dropout_p", dropout_p)
    if dropout_p > 0:
        check_tensors(q=q)
        options["rng_state"] = draw_rng_state(q.device)
    options["dropout_p"] = dropout_p
    options["window_size"] = read_window(window_size)
    options["deterministic"] = deterministic or None
    out, lse = head_dims.attend(q, k, v, options)
    if not return_attn_probs:
        return out
    if dropout_p == 0:
        return out, lse, out.new_empty(0)
    with torch.no_grad():
        return out, lse, head_dims.weights(q, k, lse, options)


def attend_to_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_k: int,
    *,
    cu_seqlens_q: Tensor,
    window_size: Window,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``decode`` for packed queries, with flash-attn's names in its errors. Where seqused_k is given, its
    lengths hold in place of those of cu_seqlens_k."""
    check_tensors(q=q, k=k, v=v, block_table=block_table, cu_seqlens_q=cu_seqlens_q)
    check_optional_tensors(cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, leftpad_k=leftpad_k)
    max_seqlen_k = as_integer("max_seqlen_k", max_seqlen_k)
    if k.dim() != 4 or block_table.dim() != 2:
        raise ValueError(
            "k and block_table must be (num_blocks, page_block_size, nheads_k, headdim) and (batch, "
            f"max_num_blocks_per_seq), got {tuple(k.shape)} and {tuple(block_table.shape)}"
        )
    lengths = seqused_k
    if cu_seqlens_k is not None:
        _check_cu_seqlens_k(cu_seqlens_k, cu_seqlens_q, max_seqlen_k)
    if lengths is None:
        if cu_seqlens_k is None:
            raise TypeError("cu_seqlens_k must be a tensor where seqused_k is None, got None")
        lengths = cu_seqlens_k.diff()
    name = "cu_seqlens_k.diff()" if seqused_k is None else "seqused_k"  # an error names entries of it
    decode = errors_name(k_cache="k", v_cache="v", cache_seqlens=name, cache_leftpad="leftpad_k")(head_dims.decode)
    options |= dict(cache_seqlens=lengths, cache_leftpad=leftpad_k, window_size=read_window(window_size))
    return decode(q, k, v, cu_seqlens_q=cu_seqlens_q, block_table=block_table, **options)
