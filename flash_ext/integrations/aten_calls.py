"""What the kernels with aten's schemas share: which calls are ours, the way to our operators, the forms of results.

The operators are called straight at the device's kernel: autograd and autocast have had their turn.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

import flash_ext._plan as _plan
from flash_ext.argument_checks import KERNEL_DTYPES
from flash_ext.functional import may_use_tf32
from flash_ext.head_dims import MAX_HEAD_DIM
from flash_ext.integrations.layouts import in_order_of
from flash_ext.ops import ScoreOptions
from flash_ext.planning import describe_device
from flash_ext.torch_private import DispatchKey, DispatchKeySet, handle_of

_OPS = torch.ops.flash_ext
_FORWARD, _PLAIN = handle_of(_OPS.attention_forward.default), handle_of(_OPS.attention_forward_plain.default)
_BACKWARD = handle_of(_OPS.attention_backward.default)
KEYS = {"cpu": DispatchKeySet(DispatchKey.CPU), "cuda": DispatchKeySet(DispatchKey.CUDA)}
_LARGEST_SCALE = torch.finfo(torch.float32).max
_EFFICIENT_LSE_MULTIPLE = 32  # torch pads the rows of its log-sum-exp up to this
_EFFICIENT_BIAS_MULTIPLE = 16  # and those of the gradient of a bias up to this


# ---- What is supported ----------------------------------------------------------------------------------------------

WRONG = "torch says what is wrong with the call"


class NotServed(str):
    """Why a kernel does not take a call, which then goes on to torch's."""

    __slots__ = ()


@cache
def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in KERNEL_DTYPES:
        return False
    described = describe_device(device, dtype)
    return all(_plan.supports(_plan.Problem(operation=name, **described))[0] for name in ("forward", "backward"))


def unsupported(head_dim: int, head_dim_v: int, device: torch.device, dtype: torch.dtype) -> str:
    """Why there are no kernels for such queries and values, or an empty string."""
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM):
        return f"head_dim must be from 1 to {MAX_HEAD_DIM}, got {head_dim} of query and {head_dim_v} of value"
    return "" if _has_kernels(device, dtype) else f"no kernels for {dtype} on {device}"


def takes_scale(scale: float | None) -> bool:
    """Whether our operators do: torch computes with Inf and NaN, too. A symbol of a compiler is some number."""
    return type(scale) is not float or abs(scale) <= _LARGEST_SCALE


TOO_LARGE = (
    f"on CUDA there may be {_plan.MAX_CUDA_BATCH} batch entries, {_plan.MAX_CUDA_SEQLEN_Q} queries and "
    f"{_plan.MAX_CUDA_SEQLEN_K} keys at most"
)


def exceeds_sizes(device: torch.device, batch: int, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether a call on CUDA has more batch entries, queries or keys than our kernels count to: ``TOO_LARGE``."""
    return device.type == "cuda" and (
        batch > _plan.MAX_CUDA_BATCH or seqlen_q > _plan.MAX_CUDA_SEQLEN_Q or seqlen_k > _plan.MAX_CUDA_SEQLEN_K
    )


# ---- Calling our operators -------------------------------------------------------------------------------------------


def options_of(
    query: Tensor, scale: float, window: tuple[int, int], top_left: bool, bias: Tensor | None = None, **more: Any
) -> tuple[Any, ...]:
    """The options of an operator, those at the end left out where all have their defaults."""
    if bias is None and not more and not may_use_tf32(query):
        return (scale, *window, top_left)
    return ScoreOptions(scale, *window, top_left, bias=bias, allow_tf32=may_use_tf32(query), **more)


def run_forward(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Straight to the kernel of the device: autograd and autocast have had their turn."""
    kernel = _PLAIN if len(options) == 4 else _FORWARD
    out, lse = kernel.redispatch_boxed(KEYS[q.device.type], q, k, v, *options)
    return out, lse


def run_backward(
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
        KEYS[q.device.type], grad_out, None, q, k, v, out, lse, deterministic, *needed, *options
    )
    return dq, dk, dv, dbias


def scale_of(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def window_of(causal: bool) -> tuple[int, int]:
    return (-1, 0) if causal else (-1, -1)


# ---- Forms of results ------------------------------------------------------------------------------------------------


def in_order_of_inputs(gradients: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(in_order_of(gradient, like) for gradient, like in zip(gradients, inputs, strict=False))


def flash_rng(query: Tensor) -> tuple[Tensor, Tensor]:
    """What torch's flash kernel leaves for dropout, without dropout."""
    device = query.device
    return torch.empty(2, dtype=torch.uint64, device=device), torch.empty((), dtype=torch.uint64, device=device)


def no_seed(query: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=query.device)


def padded_lse(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen_q) with rows of a length that is a multiple of 32."""
    missing = -lse.shape[-1] % _EFFICIENT_LSE_MULTIPLE
    return torch.nn.functional.pad(lse, (0, missing), value=torch.inf) if missing else lse


def padded_gradient(dbias: Tensor) -> Tensor:
    """The same, in memory whose rows are a multiple of 16 long."""
    seqlen_k = dbias.shape[-1]
    missing = -seqlen_k % _EFFICIENT_BIAS_MULTIPLE
    if not missing:
        return dbias
    padded = dbias.new_empty((*dbias.shape[:-1], seqlen_k + missing))[..., :seqlen_k]
    return padded.copy_(dbias)
