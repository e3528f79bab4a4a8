"""Which way a call of ``scaled_dot_product_attention`` goes; ``sdpa_provider`` says why."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from flash_ext.functional import attention
from flash_ext.head_dims import cut_head_dim, pad_head_dim
from flash_ext.integrations import aten_fused
from flash_ext.integrations.aten_calls import (
    KEYS,
    TOO_LARGE,
    WRONG,
    NotServed,
    exceeds_sizes,
    takes_scale,
    unsupported,
)
from flash_ext.integrations.layouts import BY_HEADS, BY_ROWS, Arrangement, arrangement_of, can_merge, in_order_of
from flash_ext.sdpa import scaled_dot_product_attention
from flash_ext.torch_private import (
    SDP_CHOICE,
    TRACERS,
    handle_of,
    is_cudnn_sdp_enabled,
    is_efficient_sdp_enabled,
    is_flash_sdp_enabled,
    is_forward_mode,
    is_functorch_active,
    num_dispatch_modes,
    sdp_priority_order,
)

_CHOICE = handle_of(SDP_CHOICE)
_MATH, _FLASH = SDPBackend.MATH.value, SDPBackend.FLASH_ATTENTION.value
_EFFICIENT, _CUDNN = SDPBackend.EFFICIENT_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value
_ENABLED: dict[int, Callable[[], bool]] = {
    _FLASH: is_flash_sdp_enabled,
    _EFFICIENT: is_efficient_sdp_enabled,
    _CUDNN: is_cudnn_sdp_enabled,
}


def is_torchs(
    device_type: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> bool:
    """Whether this is one of the common calls that torch sends to a fused operator. ``serve`` gives ``NotImplemented``
    for them too, 5 microseconds later.

    Plain tensors only: shapes that a compiler traces with must not be compared.
    """
    if attn_mask is not None or dropout_p != 0.0:
        return False
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return False
    shape, shape_k = query.shape, key.shape
    if len(shape) != 4 or value.shape != shape_k:
        return False
    if shape != shape_k and (is_causal or shape[:2] != shape_k[:2] or shape[3:] != shape_k[3:]):
        return False
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        return False
    if device_type == "cpu":
        return is_flash_sdp_enabled()
    # On CUDA this operator is the one that takes them all, of these head dims: beside them torch may choose math.
    return shape[3] % 8 == 0 and is_efficient_sdp_enabled()


def serve(
    device_type: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Torch's function by ours, in the memory order that torch would have given; or ``NotServed`` where torch's math is
    right; or ``NotImplemented`` where torch's fused operators are, or where torch's own way calls others who decide.
    """
    if not (_is_plain(query) and _is_plain(key) and _is_plain(value) and _is_plain(attn_mask)) or _is_observed():
        return NotImplemented
    if query.dtype != key.dtype or query.dtype != value.dtype or query.is_nested:
        return NotImplemented
    backend = _CHOICE.redispatch_boxed(
        KEYS[device_type], query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if backend == _MATH:
        if _wants_math(device_type):
            return NotServed(_MATH_WANTED)
    elif backend not in _ENABLED or (dropout_p == 0 and (attn_mask is None or _suits_torch(attn_mask))):
        return NotImplemented
    elif dropout_p > 0 and _is_alone(backend):
        return NotImplemented
    if attn_mask is not None and attn_mask.dtype == torch.bool and _is_recorded(query, key, value):
        attn_mask = _copy_of(attn_mask)
    if backend != _EFFICIENT or _is_by_rows(query):
        out = aten_fused.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if out is not None:
            return out.contiguous() if backend == _MATH else out
    reason = _NUMBERS if not 0.0 <= dropout_p <= 1.0 or not takes_scale(scale) else ""
    if reason := reason or _why_not(query, key, value, attn_mask, is_causal, enable_gqa):
        return NotServed(reason) if backend == _MATH else NotImplemented
    if _has_one_batch(query, key, value, enable_gqa):
        return _attend(backend, query, key, value, attn_mask, dropout_p, is_causal, scale)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.contiguous()  # as from math: torch's backends do not take such shapes


# ---- Whether to -----------------------------------------------------------------------------------------------------


def _is_plain(x: Tensor | None) -> bool:
    return x is None or type(x) is Tensor or _has_plain_type(type(x))


@cache
def _has_plain_type(kind: type[Tensor]) -> bool:
    """Whether such a tensor's storage holds its values, or it is a compiler's stand-in for one of which that is so."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or kind.__module__ in TRACERS


def _is_observed() -> bool:
    """By those who have to see torch's own operators."""
    return is_functorch_active() or is_forward_mode() or torch.compiler.is_exporting()


def _wants_math(device_type: str) -> bool:
    """Whether math is what somebody asked for, not just what is left: nothing fused is allowed, or not before math."""
    if device_type == "cpu":
        return not is_flash_sdp_enabled()
    order = sdp_priority_order()
    before_math = order[: order.index(_MATH)]
    return not any(enabled() for backend, enabled in _ENABLED.items() if backend in before_math)


def _is_alone(backend: int) -> bool:
    """Whether ``sdpa_kernel`` leaves this fused backend and no other: who asks for one means its random numbers too."""
    return not any(enabled() for other, enabled in _ENABLED.items() if other != backend)


def _suits_torch(attn_mask: Tensor) -> bool:
    """Whether torch's fused operators do with a mask what ours would, or have to be seen."""
    watched = num_dispatch_modes() > 0
    return watched or (attn_mask.dtype != torch.bool and not attn_mask.is_cuda)


_MATH_WANTED = "math was asked for, by sdpa_kernel or torch.backends.cuda"
_NUMBERS = "dropout_p must be from 0 to 1, and scale a finite number of float32"
_NO_HEADS = "tensors without heads"
_MASK = "attn_mask must be bool, float32 or of the dtype of query, and broadcast to the scores"


def _why_not(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> str:
    """Why our function does not take the call or means something else by it, or an empty string."""
    dims = query.dim(), key.dim(), value.dim()
    if min(dims) < 2 or (min(dims) == 2 and max(dims) > 2):
        return WRONG
    if query.device != key.device or query.device != value.device:
        return WRONG
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return WRONG
    if reason := unsupported(query.shape[-1], value.shape[-1], query.device, query.dtype):
        return reason
    lead = _leading_dimensions(query, key, value, enable_gqa)
    if lead is None:
        return WRONG
    if lead[-1:] == (0,):
        return _NO_HEADS
    if exceeds_sizes(query.device, math.prod(lead[:-1]), query.shape[-2], key.shape[-2]):
        return TOO_LARGE
    if attn_mask is None:
        return ""
    if is_causal:
        return WRONG
    return "" if _broadcasts(attn_mask, query, (*lead, query.shape[-2], key.shape[-2])) else _MASK


def _broadcasts(attn_mask: Tensor, query: Tensor, scores: tuple[int, ...]) -> bool:
    if attn_mask.device != query.device or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    if not 2 <= attn_mask.dim() <= len(scores):
        return False
    return all(given in (1, full) for given, full in zip(reversed(attn_mask.shape), reversed(scores), strict=False))


def _leading_dimensions(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...] | None:
    """The dimensions of the scores before the last two, or None where those of the inputs do not go together."""
    if not enable_gqa or query.dim() == 2:
        return _broadcast(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    heads, heads_k, heads_v = query.shape[-3], key.shape[-3], value.shape[-3]
    if heads_k == 0 or heads_v == 0 or heads % heads_k != 0 or heads % heads_v != 0:
        return None
    lead = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    return None if lead is None else (*lead, heads)


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    if shapes[0] == shapes[1] == shapes[2]:
        return shapes[0]
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def _has_one_batch(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether nothing is broadcast but heads in groups."""
    if query.dim() != 4 or key.shape[:2] != value.shape[:2] or query.shape[0] != key.shape[0]:
        return False
    return enable_gqa or query.shape[1] == key.shape[1]


def _is_by_rows(query: Tensor) -> bool:
    """Whether the memory order is that in which the efficient backend gives its results."""
    if query.dim() != 4:
        return False
    of_batch, of_heads, of_rows, _ = query.stride()
    return of_batch >= of_rows >= of_heads


def _is_recorded(*inputs: Tensor) -> bool:
    """Whether eager autograd keeps the inputs. Compiled, a copy would not be kept: it would be made again."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return any(x.requires_grad for x in inputs)


def _copy_of(attn_mask: Tensor) -> Tensor:
    """torch keeps a boolean mask as numbers, so that callers may change theirs before the backward.

    What the mask repeats is copied once, and left to broadcast.
    """
    strides = attn_mask.stride()
    if 0 not in strides:
        return attn_mask.clone()
    once = [1 if stride == 0 else size for size, stride in zip(attn_mask.shape, strides, strict=True)]
    return attn_mask.as_strided(once, strides).clone()


# ---- How ------------------------------------------------------------------------------------------------------------


def _attend(
    backend: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """(batch, heads, seqlen, head_dim) tensors, recorded for autograd."""
    scores = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
    arrangement = _arrangement(backend, query, key, value, scores)
    if scores is not None:
        scores = arrangement.to_scores(scores)
    is_bool = scores is not None and scores.dtype == torch.bool
    out = attention(
        *(pad_head_dim(arrangement.to_rows(x)) for x in (query, key, value)),
        causal=is_causal,
        top_left=True,
        softmax_scale=query.shape[-1] ** -0.5 if scale is None else scale,
        mask=scores if is_bool else None,
        bias=None if is_bool else scores,
        dropout_p=dropout_p,
    )
    assert isinstance(out, Tensor)
    rows = cut_head_dim(out, value.shape[-1]).contiguous()
    out = arrangement.from_rows(rows, (query.shape[0], query.shape[1]))
    if backend == _MATH:
        return out.contiguous()
    return out if backend == _EFFICIENT else in_order_of(out, query)


def _arrangement(backend: int, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None) -> Arrangement:
    """The one whose result has the memory order of the backend's."""
    if backend == _EFFICIENT:
        return BY_ROWS
    if backend == _MATH:
        return BY_HEADS if can_merge(query, key, value, scores) else BY_ROWS
    return arrangement_of(query, key, value, scores)
