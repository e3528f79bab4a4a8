"""SDPA's calls by the operator that torch keeps for other libraries, filled by this one in C++.

torch has the derivative of ``aten::_scaled_dot_product_fused_attention_overrideable`` in C++, and never calls the
operator itself on a CPU or CUDA. A call takes a third of the host's time of one by an ``autograd.Function``. Unlike
torch's other fused operators it may have a boolean mask, a bias that broadcasts, with its gradient, and dropout: nobody
but the kernels of ``csrc/api/aten_attention.h`` reads what the forward leaves for the backward.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_ext.integrations.aten_calls import exceeds_sizes, takes_scale, unsupported
from flash_ext.integrations.aten_cpp import define_python_operators, in_library, is_as_known, libraries
from flash_ext.torch_private import has_kernel, is_forward_mode, is_functorch_active, is_tracing, num_dispatch_modes

_OPERATOR = "_scaled_dot_product_fused_attention_overrideable"
_SCHEMAS = {
    _OPERATOR: (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, "
        "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, "
        "Tensor debug_attn_mask)"
    ),
    f"{_OPERATOR}_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor attn_bias, bool[4] grad_input_mask, "
        "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_bias)"
    ),
}
_FUSED = getattr(torch.ops.aten, _OPERATOR).default
_HEAD_DIM_MULTIPLE = 8
_PLAIN = (Tensor, torch.nn.Parameter)

filled: dict[str, bool] = {}
"""By the type of a device: whether the operator is ours there."""
_filling = threading.RLock()


def fill(device_type: str) -> bool:
    """Registers our kernels for a device, for good: the backward of a graph may come at any time.

    Where this build has none, where another library has filled the operator, or where this torch has it in another
    form, nothing is done.

    Returns:
        Whether the operator is ours on that device.
    """
    key = device_type.upper()
    with _filling:
        if device_type in filled:  # by another thread, meanwhile
            return filled[device_type]
        ours = (
            key in libraries()
            and not has_kernel(f"aten::{_OPERATOR}", key)
            and all(is_as_known(operator, schema) for operator, schema in _SCHEMAS.items())
        )
        if ours:
            define_python_operators()  # what the kernels ask torch for
            in_library("fill_fused_attention", key, key)
        return filled.setdefault(device_type, ours)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """``scaled_dot_product_attention`` of plain (batch, heads, seqlen, head_dim) tensors, none of which is copied or
    broadcast; recorded for autograd. Below autocast.

    Returns:
        (batch, heads, seqlen_q, head_dim_v), in memory in the order of the query; or None where the call is not for
        this operator, because it is wrong, asks for more, or has to be seen by somebody else.
    """
    if _is_watched() or not (_is_plain(query) and _is_plain(key) and _is_plain(value)):
        return None
    device = query.device
    if not (filled[device.type] if device.type in filled else fill(device.type)):
        return None
    if not query.dtype == key.dtype == value.dtype or not device == key.device == value.device:
        return None
    mask_shape = None
    if attn_mask is not None:
        if is_causal or not _is_plain(attn_mask) or attn_mask.device != device:
            return None
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return None
        mask_shape = attn_mask.shape
    if not _fit(query.shape, key.shape, value.shape, mask_shape, device, query.dtype, enable_gqa):
        return None
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1 or 0 in query.stride():
        return None
    if not 0.0 <= dropout_p <= 1.0 or not takes_scale(scale):
        return None
    out: Tensor = _FUSED(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return out


def _is_plain(x: Any) -> bool:
    """A tensor or parameter with strides: no other subclass, whose meaning is its own, and none nested or sparse."""
    return type(x) in _PLAIN and x.layout is torch.strided and not x.is_nested


def _is_watched() -> bool:
    """Whether a compiler, tracer, transform or dispatch mode has to see SDPA itself."""
    if torch.compiler.is_compiling():
        return True
    return num_dispatch_modes() > 0 or is_functorch_active() or is_forward_mode() or is_tracing()


@lru_cache(maxsize=4096)
def _fit(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    attn_mask: torch.Size | None,
    device: torch.device,
    dtype: torch.dtype,
    enable_gqa: bool,
) -> bool:
    """Whether kernels take such shapes as they are."""
    if not len(query) == len(key) == len(value) == 4:
        return False
    batch, heads, seqlen_q, head_dim = query
    heads_kv, seqlen_k, head_dim_v = key[1], key[2], value[3]
    if key != (batch, heads_kv, seqlen_k, head_dim) or value != (batch, heads_kv, seqlen_k, head_dim_v):
        return False
    if heads_kv == 0 or (heads_kv != heads and not (enable_gqa and heads % heads_kv == 0)):
        return False
    if head_dim % _HEAD_DIM_MULTIPLE != 0 or head_dim_v % _HEAD_DIM_MULTIPLE != 0:
        return False
    if unsupported(head_dim, head_dim_v, device, dtype) or exceeds_sizes(device, batch, seqlen_q, seqlen_k):
        return False
    if attn_mask is None:
        return True
    scores = (batch, heads, seqlen_q, seqlen_k)
    return 2 <= len(attn_mask) <= 4 and all(
        given in (1, full) for given, full in zip(reversed(attn_mask), reversed(scores), strict=False)
    )
