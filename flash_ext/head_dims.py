"""Padding of head dims, for the functions with other libraries' names, which take any head_dim up to 256.

``attend``, ``weights`` and ``decode`` are the functions of ``flash_ext`` with padding. They check head dims before they
pad, because padding would make different sizes equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_ext import functional
from flash_ext.argument_checks import as_integer, check_tensors

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8  # of the kernels


def check_head_dims(*groups: Mapping[str, Tensor]) -> None:
    """Raises unless the last dimensions are from 1 to 256 and equal within each group of named tensors."""
    for group in groups:
        first, expected = "", 0
        for name, x in group.items():
            if type(x) is not Tensor or x.is_nested or x.layout is not torch.strided:
                check_tensors(**{name: x})
            shape = x.shape
            size = shape[-1] if shape else 0
            if not 1 <= size <= MAX_HEAD_DIM:
                raise RuntimeError(f"{name} must have a head_dim from 1 to {MAX_HEAD_DIM}, got shape {tuple(shape)}")
            if not first:
                first, expected = name, size
            if size != expected:
                raise RuntimeError(
                    f"{name} must have the head_dim of {first}: expected {expected} in the last dimension, "
                    f"got shape {tuple(shape)}"
                )


def pad_head_dim(x: Tensor) -> Tensor:
    """``x`` with zeros behind its last dimension up to the next size that kernels take, contiguous in that dimension.

    Scores do not change. F.pad alone would keep the memory order of what looks like channels_last.
    """
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    if missing:
        x = F.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def cut_head_dim(out: Tensor, head_dim: int) -> Tensor:
    """``out`` without what padding added. A slice of everything would still be another tensor to make."""
    return out if out.shape[-1] == head_dim else out[..., :head_dim]


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """The default is that of q before padding."""
    return float(q.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale


def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``attention``. A ``softmax_scale`` of None among the options becomes a number there."""
    check_head_dims({"q": q, "k": k}, {"v": v})
    if options["softmax_scale"] is None:
        options["softmax_scale"] = scale_of(q, None)
    out, lse = functional.attention(pad_head_dim(q), pad_head_dim(k), pad_head_dim(v), return_lse=True, **options)
    return cut_head_dim(out, v.shape[-1]), lse


def weights(q: Tensor, k: Tensor, lse: Tensor, options: dict[str, Any]) -> Tensor:
    """``attention_weights``, negative where dropout drops, with the options of ``attend``."""
    scores = {name: value for name, value in options.items() if name != "deterministic"}
    return functional.attention_weights(pad_head_dim(q), pad_head_dim(k), lse, signed=True, **scores)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    softmax_scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``decode``. ``cache_seqlens`` may be one integer, which is that of all sequences. Caches that have
    to be padded are copied, and copied back where there are k and v."""
    new_k, new_v = ({} if x is None else {name: x} for name, x in (("k", k), ("v", v)))
    check_head_dims({"q": q, "k_cache": k_cache, **new_k}, {"v_cache": v_cache, **new_v})
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = _lengths(cache_seqlens, batch, k_cache.device)
    # A cache is written to in place: one that the kernels can take as it is must not become a copy.
    caches = [x if x.shape[-1] % HEAD_DIM_MULTIPLE == 0 else pad_head_dim(x) for x in (k_cache, v_cache)]
    out, lse = functional.decode(
        pad_head_dim(q),
        *caches,
        k=None if k is None else pad_head_dim(k),
        v=None if v is None else pad_head_dim(v),
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        softmax_scale=scale_of(q, softmax_scale),
        return_lse=True,
        **options,
    )
    if k is not None:
        for cache, padded in zip((k_cache, v_cache), caches, strict=True):
            if padded is not cache:
                cache.copy_(padded[..., : cache.shape[-1]])
    return cut_head_dim(out, v_cache.shape[-1]), lse


def _lengths(rows: Any, batch: int, device: torch.device) -> Tensor:
    number = as_integer("cache_seqlens", rows, "an integer, a Tensor or None")
    if not 0 <= number < 2**31:
        raise ValueError(f"cache_seqlens must be from 0 to 2^31 - 1, got {number}")
    return torch.full((batch,), number, dtype=torch.int32, device=device)
