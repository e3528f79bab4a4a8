"""``flash_attn_interface``: FlashAttention-3's signatures, whose fourth positional argument is the scale.

Not supported, and refused by name: qv, q_descale, k_descale, v_descale, attention_chunk, out_, cu_seqlens_k_new, and
rotary_seqlens other than cache_seqlens. num_splits outside of decoding, pack_gqa, sm_margin and scheduler_metadata tell
FlashAttention-3 how to use a GPU and change no result: their types are checked, and the planner decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext import head_dims
from flash_ext.argument_checks import as_flag, as_integer, check_optional_tensors, check_tensors, describe, errors_name
from flash_ext.flash_attn_interface import Integer, read_integer, unpack
from flash_ext.functional import merge
from flash_ext.integrations.flash_attn.interface_2 import maybe_contiguous
from flash_ext.integrations.flash_attn.passes import backward_pass, check_shape, score_options

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "maybe_contiguous",
]


_WAYS_OUT = {
    "qv": "concatenate it with q, and v with k, up to a head_dim of 256",
    "q_descale": "multiply q by it in bfloat16",
    "k_descale": "multiply k by it in bfloat16",
    "v_descale": "multiply v by it in bfloat16",
    "attention_chunk": "call flash_ext.attention with a block_mask of the chunks",
    "cu_seqlens_k_new": "pad the new keys to (batch, seqlen_new, heads, headdim)",
    "rotary_seqlens": "give the tensor that is cache_seqlens, or rotate before the call",
    "cu_seqlens_k": "a cache has its lengths in seqused_k",
    "seqused_q": "pack q, with cu_seqlens_q",
    "out": "copy the result",
    "out_": "copy the result",
}


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            raise NotImplementedError(f"flash_ext: {name} is not supported, got {_show(value)}: {_WAYS_OUT[name]}")


def _check_hints(num_splits: int, pack_gqa: bool | None, sm_margin: int, metadata: Tensor | None = None) -> None:
    as_integer("num_splits", num_splits)
    as_integer("sm_margin", sm_margin)
    if pack_gqa is not None:
        as_flag("pack_gqa", pack_gqa)
    check_optional_tensors(scheduler_metadata=metadata)


def _read_max_seqlens(max_seqlen_q: Integer | None, max_seqlen_k: Integer | None) -> list[int | None]:
    """Also where sequences are not packed, and nobody reads them."""
    given = (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    return [None if value is None else read_integer(name, value) for name, value in given]


def _show(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_ext.flash_attn_func`` in this order of arguments; out, or (out, softmax_lse)."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    _check_hints(num_splits, pack_gqa, sm_margin)
    options = score_options(q, softmax_scale, causal, window_size, softcap)
    return _attend(q, k, v, deterministic, return_attn_probs, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: Integer | None,
    max_seqlen_k: Integer | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same of packed sequences: out (total_q, heads, headdim_v), or (out, softmax_lse (heads, total_q)). Where one
    of cu_seqlens_q and cu_seqlens_k is None, its side is (batch, seqlen, heads, headdim)."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    _check_hints(num_splits, pack_gqa, sm_margin)
    max_seqlen_q, max_seqlen_k = _read_max_seqlens(max_seqlen_q, max_seqlen_k)
    check_tensors(q=q, k=k, v=v)
    options = score_options(q, softmax_scale, causal, window_size, softcap)
    options |= dict(seqused_q=seqused_q, seqused_k=seqused_k)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return _attend(q, k, v, deterministic, return_attn_probs, options)
    dense_q = q.shape[:2] if cu_seqlens_q is None else None
    q, cu_seqlens_q, max_seqlen_q = _pack(q, cu_seqlens_q, max_seqlen_q)
    dense_k, cu_seqlens = k, cu_seqlens_k
    k, cu_seqlens_k, max_seqlen_k = _pack(k, cu_seqlens_k, max_seqlen_k)
    v = v.flatten(0, 1) if cu_seqlens is None and dense_k.dim() == 4 else v
    options |= dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )
    result = _attend(q, k, v, deterministic, return_attn_probs, options)
    if dense_q is None:
        return result
    if isinstance(result, Tensor):
        return result.unflatten(0, dense_q)
    out, lse = result
    return out.unflatten(0, dense_q), lse.unflatten(1, dense_q).transpose(0, 1)


def _pack(x: Tensor, cu_seqlens: Tensor | None, longest: int | None) -> tuple[Tensor, Tensor, int | None]:
    if cu_seqlens is not None:
        return x, cu_seqlens, longest
    batch, seqlen = x.shape[:2]
    cu_seqlens = torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device=x.device)
    return x.flatten(0, 1), cu_seqlens, seqlen


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same of (batch, seqlen, 3, heads, headdim), or with num_heads_q of (batch, seqlen, heads of all, headdim)."""
    q, k, v = _unpack_heads(qkv, num_heads_q)
    result: Tensor | tuple[Tensor, Tensor] = flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )
    return result


def _unpack_heads(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    check_tensors(qkv=qkv)
    heads_q = None if num_heads_q is None else as_integer("num_heads_q", num_heads_q)
    if qkv.dim() != 4:
        q, k, v = unpack("qkv", qkv, 5, 3)
        if heads_q not in (None, q.shape[2]):
            raise ValueError(f"num_heads_q must be that of qkv {tuple(qkv.shape)}, {q.shape[2]}, got {heads_q}")
        return q, k, v
    if heads_q is None:
        raise ValueError(f"num_heads_q must be given for qkv of 4 dimensions, got qkv of {tuple(qkv.shape)}")
    heads_kv, rest = divmod(qkv.shape[2] - heads_q, 2)
    if heads_q < 1 or heads_kv < 1 or rest != 0:
        raise ValueError(
            f"num_heads_q must leave as many heads of k as of v among {qkv.shape[2]} heads of qkv, got {heads_q}"
        )
    return qkv.split([heads_q, heads_kv, heads_kv], dim=2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool, return_lse: bool, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    wanted = as_flag("deterministic", deterministic) or None  # None leaves it to torch's global switch
    return_lse = as_flag("return_attn_probs", return_lse)
    out, lse = head_dims.attend(q, k, v, options | dict(deterministic=wanted))
    return (out, lse) if return_lse else out


@errors_name(block_table="page_table")
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: Integer | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``flash_ext.flash_attn_with_kvcache`` with these names, and with cu_seqlens_q; out, or (out, softmax_lse, and
    two empty tensors where FlashAttention-3 returns what it merged)."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    _refuse(cu_seqlens_k_new=cu_seqlens_k_new)
    _check_hints(num_splits, pack_gqa, sm_margin, scheduler_metadata)
    return_softmax_lse = as_flag("return_softmax_lse", return_softmax_lse)
    max_seqlen_q = None if max_seqlen_q is None else read_integer("max_seqlen_q", max_seqlen_q)
    check_optional_tensors(page_table=page_table, cache_batch_idx=cache_batch_idx, cu_seqlens_q=cu_seqlens_q)
    if rotary_seqlens is not cache_seqlens:
        _refuse(rotary_seqlens=rotary_seqlens)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = page_table[cache_batch_idx.long()], None
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
        block_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        **score_options(q, softmax_scale, causal, window_size, softcap),
    )
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


_attend_to_cache = errors_name(
    k_cache="k", v_cache="v", k="k_new", v="v_new",
    cache_seqlens="seqused_k", cache_batch_idx="kv_batch_idx", cache_leftpad="leftpad_k",
)(flash_attn_with_kvcache)  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys, by ``flash_ext.merge``.

    Args:
        out_partial: (num_splits, batch, seqlen, heads, headdim) or (num_splits, total, heads, headdim).
        lse_partial: (num_splits, batch, seqlen, heads) or (num_splits, total, heads).
        out: where to write the result.
        out_dtype: of the result; None: as out_partial.

    Raises:
        ValueError: a shape is another.
        TypeError: an argument is of a type that it cannot have.
    """
    check_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            "out_partial must be (num_splits, batch, seqlen, heads, headdim) or (num_splits, total, heads, headdim), "
            "and lse_partial the same without headdim, got shapes "
            f"{tuple(out_partial.shape)} and {tuple(lse_partial.shape)}"
        )
    check_shape("out", out, out_partial.shape[1:])
    if not (out_dtype is None or isinstance(out_dtype, torch.dtype)):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {describe(out_dtype)}")
    merged, lse = merge(out_partial, lse_partial.transpose(-1, -2))
    merged = merged.to(out_partial.dtype if out_dtype is None else out_dtype)
    merged = merged if out is None else out.copy_(merged)
    return merged, lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """int32 (1), for ``scheduler_metadata``: here kernels find their work themselves."""
    check_tensors(cache_seqlens=cache_seqlens)
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: Integer | None = None,
    max_seqlen_k: Integer | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    out: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, and two empty tensors), not recorded by autograd. ``out`` and ``window_size`` are what out_,
    window_size_left and window_size_right were called by earlier releases."""
    _refuse(out=out, out_=out_)
    _check_hints(num_splits, pack_gqa, sm_margin, scheduler_metadata)
    window = (window_size_left, window_size_right) if window_size is None else window_size
    refused: dict[str, Any] = dict(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    cached = (k_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin)
    with torch.no_grad():
        if any(x is not None for x in cached):
            _refuse(cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q)
            result: Any = _attend_to_cache(
                q,
                k,
                v,
                k_new,
                v_new,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                cache_seqlens=seqused_k,
                cache_batch_idx=kv_batch_idx,
                cache_leftpad=leftpad_k,
                page_table=page_table,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k_new=cu_seqlens_k_new,
                max_seqlen_q=max_seqlen_q,
                rotary_seqlens=seqlens_rotary,
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window,
                attention_chunk=attention_chunk,
                softcap=softcap,
                rotary_interleaved=rotary_interleaved,
                num_splits=num_splits,
                return_softmax_lse=True,
                **refused,
            )
            return result
        result = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q,
            seqused_k,
            softmax_scale,
            causal,
            window_size=window,
            attention_chunk=attention_chunk,
            softcap=softcap,
            return_attn_probs=True,
            **refused,
        )
    attended, lse = result
    return attended, lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: Integer | None = None,
    max_seqlen_k: Integer | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
) -> Tensor:
    """Writes dq, dk and dv. Returns softmax_d, (batch, heads, seqlen_q) or (heads, total_q), without padding.

    ``causal`` and ``window_size`` are what is_causal, window_size_left and window_size_right were called by earlier
    releases.
    """
    as_integer("sm_margin", sm_margin)
    max_seqlen_q, max_seqlen_k = _read_max_seqlens(max_seqlen_q, max_seqlen_k)
    check_optional_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    causal = as_flag("is_causal", is_causal) or as_flag("causal", causal)
    window = (window_size_left, window_size_right) if window_size is None else window_size
    options = score_options(q, softmax_scale, causal, window, softcap)
    options |= dict(seqused_q=sequed_q, seqused_k=sequed_k)
    if cu_seqlens_q is not None:
        options |= dict(
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
        )
    return backward_pass(dout, q, k, v, out, softmax_lse, (dq, dk, dv), 0.0, deterministic, None, options)
