"""``supports`` and ``explain``: what would become of a call, without making it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import flash_ext._plan as _plan
from flash_ext._build_info import build_info
from flash_ext.argument_checks import as_flag, check_names, check_optional_tensors, check_tensors, describe
from flash_ext.functional import DECODE_OPTIONS, SCORE_OPTIONS, _decode_options, _score_options
from flash_ext.ops import DecodeOptions, ScoreOptions, call

_OPS = torch.ops.flash_ext
_ATTENTION = SCORE_OPTIONS | {"deterministic", "return_lse"}
_WEIGHTS = SCORE_OPTIONS - {"sink"} | {"signed"}
_OPTIONS = {
    "forward": _ATTENTION,
    "backward": _ATTENTION,
    "weights": _WEIGHTS,
    "weights_backward": _WEIGHTS,
    "decode": DECODE_OPTIONS | {"return_lse"},
}


def supports(q: Tensor, k: Tensor, v: Tensor, *, operation: str = "forward", **options: Any) -> tuple[bool, str]:
    """Whether a call can run, and if not, why.

    First the device and dtype have to have a kernel for the operation. Where they have, the call's own checks are run,
    with its values of lengths and indices on CPU, and nothing else: no result is computed, no random number drawn.
    What a call refuses because a tensor requires a gradient is not asked.

    Args:
        q, k, v: as for the function that the operation belongs to. "weights" and "weights_backward" do not read v;
            for "decode" k and v are the caches, and no rows are appended to them.
        operation: "forward" and "backward" (of ``attention``), "weights" and "weights_backward" (of
            ``attention_weights``, whose lse is not asked for), or "decode".
        **options: the options of that function.

    Returns:
        (True, "") or (False, reason); the reason is what the call would raise.

    Raises:
        TypeError: an option that the function does not have.
        ValueError: an operation that does not exist.
    """
    _check_options("supports()", operation, options)
    try:
        check_tensors(q=q, k=k, v=v)
        _check_flags(options)
        ok, reason = _plan.supports(_plan.Problem(operation=operation, **describe_device(q.device, q.dtype)))
        if ok:
            with torch.no_grad():
                _check_call(q, k, v, operation, options)
    except (RuntimeError, ValueError, TypeError) as error:
        return False, str(error).removeprefix("flash_ext: ")
    return ok, reason


@dataclass(frozen=True, repr=False)
class Explanation:
    """How a call runs: the planner's problem and plan. ``print`` it."""

    problem: _plan.Problem
    plan: _plan.Plan

    def __repr__(self) -> str:
        problem, plan = self.problem, self.plan
        splits = f"{plan.num_splits}" + (f" of {plan.split_size} keys" if plan.split_size else "")
        # CUDA kernels choose tiles by the shared memory that they find.
        tiles = (
            f"tiles of {plan.block_m} queries x {plan.block_n} keys" if plan.block_n else "tiles of the kernel's own"
        )
        lines = [
            f"flash_ext {problem.operation} by csrc/kernels/{plan.kernel} on {problem.device}, {problem.dtype}",
            f"  q ({problem.batch}, {problem.seqlen_q}, {problem.heads_q}, {problem.head_dim}), "
            f"k ({problem.batch}, {problem.seqlen_k}, {problem.heads_kv}, {problem.head_dim}), "
            f"head_dim of v {problem.head_dim_v}",
            f"  mask class {plan.mask_class}, {tiles}",
            f"  key ranges: {splits} forward, {plan.num_chunks} backward",
        ]
        return "\n".join(lines + [f"  - {reason}" for reason in plan.reasons])

    __str__ = __repr__


def explain(q: Tensor, k: Tensor, v: Tensor, *, operation: str = "forward", **options: Any) -> Explanation:
    """Which kernel runs a call, with which tiles and splits, and why: the plan that the call itself follows.

    The plan depends on sizes and numbers alone: whether the tensors fit together is for ``supports`` to say.

    Args:
        q, k, v, operation, options: as for ``supports``.

    Returns:
        An ``Explanation``, to be printed: ``problem`` is what the planner was told, ``plan`` what it decided, with a
        reason for each choice in ``plan.reasons``.

    Raises:
        ValueError: the planner has no plan for these sizes, numbers, dtype and device, or no such operation.
        RuntimeError: q, k or v has another number of dimensions.
        TypeError: an option that the function does not have, or one of a type that it cannot have.
    """
    _check_options("explain()", operation, options)
    check_tensors(q=q, k=k, v=v)
    _check_flags(options)
    _check_dimensions(q, k, v, options)
    problem = _problem_of_decode if operation == "decode" else _problem_of_attention
    described = problem(q, k, v, operation, **options)
    return Explanation(described, _plan.make_plan(described))


def _check_options(function: str, operation: str, options: dict[str, Any]) -> None:
    if not isinstance(operation, str):
        raise TypeError(f"operation must be a str, got {describe(operation)}")
    if operation not in _OPTIONS:
        raise ValueError(f"operation must be one of {', '.join(_OPTIONS)}, got {operation!r}")
    check_names(f"{function} of {operation}", options, _OPTIONS[operation])


def _check_flags(options: dict[str, Any]) -> None:
    """Those that functions look at themselves, and operators never see."""
    if options.get("deterministic") is not None:
        as_flag("deterministic", options["deterministic"])
    for name in ("return_lse", "signed"):
        as_flag(name, options.get(name, False))


def _check_dimensions(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
    cu_seqlens = {name: options.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    check_optional_tensors(**cu_seqlens)
    num_dims_q, num_dims_k = (4 if given is None else 3 for given in cu_seqlens.values())
    for name, x, expected in (("q", q, num_dims_q), ("k", k, num_dims_k), ("v", v, num_dims_k)):
        if x.dim() != expected:
            raise RuntimeError(f"{name} must be {expected}-dimensional, got shape {tuple(x.shape)}")


def _check_call(q: Tensor, k: Tensor, v: Tensor, operation: str, options: dict[str, Any]) -> None:
    """Raises what the call would raise."""
    if operation == "decode":
        arguments = {name: value for name, value in options.items() if name in DECODE_OPTIONS}
        call(_OPS.attention_decode_check.default, q, k, v, *_decode_options(q, **arguments))
        return
    arguments = {name: value for name, value in options.items() if name in SCORE_OPTIONS}
    scores = ScoreOptions(*_score_options(q, k, **arguments))
    if scores.dropout_p > 0 and scores.rng_state is None and operation in ("forward", "backward"):
        # The call would draw one.
        scores = scores._replace(rng_state=torch.zeros(2, dtype=torch.int64, device=q.device))
    call(_OPS.attention_check.default, q, k, k if operation in ("weights", "weights_backward") else v, *scores)


def _problem_of_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operation: str,
    *,
    deterministic: bool | None = None,
    return_lse: bool = False,
    signed: bool = False,
    **options: Any,
) -> _plan.Problem:
    o = ScoreOptions(*_score_options(q, k, **options))
    return _plan.Problem(
        **_common(q, k, operation, o),
        seqlen_k=k.shape[1] if o.cu_seqlens_k is None else _longest(o.cu_seqlens_k, o.max_seqlen_k, k.shape[0]),
        total_k=0 if o.cu_seqlens_k is None else k.shape[0],
        head_dim_v=(k if operation in ("weights", "weights_backward") else v).shape[-1],
        top_left=o.top_left,
        dropout_p=o.dropout_p,
        broadcast=any(n > 1 and stride == 0 for t in (q, k, v) for n, stride in zip(t.shape, t.stride(), strict=True)),
        varlen=any(t is not None for t in (o.cu_seqlens_q, o.cu_seqlens_k, o.seqused_q, o.seqused_k)),
        has_bias=o.bias is not None,
        **({} if o.bias is None else {"bias_dtype": _name(o.bias.dtype)}),
        has_mask=o.mask is not None,
        has_block_mask=o.block_offsets is not None,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        num_splits=1,
    )


def _problem_of_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, operation: str, *, return_lse: bool = False, **options: Any
) -> _plan.Problem:
    o = DecodeOptions(*_decode_options(q, **options))
    return _plan.Problem(
        **_common(q, k_cache, operation, o),
        seqlen_k=k_cache.shape[1] * (1 if o.block_table is None else o.block_table.shape[1]),
        head_dim_v=v_cache.shape[-1],
        varlen=any(t is not None for t in (o.cu_seqlens_q, o.cache_seqlens, o.cache_leftpad)),
        paged=o.block_table is not None,
        num_splits=o.num_splits,
        batch_invariant=o.batch_invariant,
    )


def _common(q: Tensor, k: Tensor, operation: str, o: ScoreOptions | DecodeOptions) -> dict[str, Any]:
    return dict(
        operation=operation,
        **describe_device(q.device, q.dtype),
        batch=q.shape[0] if o.cu_seqlens_q is None else o.cu_seqlens_q.shape[0] - 1,
        seqlen_q=q.shape[1] if o.cu_seqlens_q is None else _longest(o.cu_seqlens_q, o.max_seqlen_q, q.shape[0]),
        total_q=0 if o.cu_seqlens_q is None else q.shape[0],
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        softmax_scale=o.softmax_scale,
        softcap=o.softcap,
        window_left=o.window_left,
        window_right=o.window_right,
        has_alibi=o.alibi_slopes is not None,
        has_sink=o.sink is not None,
        allow_tf32=o.allow_tf32,
    )


def _longest(cu_seqlens: Tensor, max_seqlen: int, total: int) -> int:
    """The longest packed sequence, as far as a call knows it: by its values on a CPU, else a bound."""
    bound = min(max_seqlen, total)
    if cu_seqlens.device.type != "cpu" or cu_seqlens.numel() < 2:
        return bound
    return min(bound, max(0, int(cu_seqlens.diff().max())))


def describe_device(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What the planner wants to know of them."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return dict(
        device=device.type,
        compute_capability=10 * properties.major + properties.minor if properties else 0,
        own_kernels="90a" in build_info()["cuda_archs"] and _wants_hopper_kernels(),
        num_workers=properties.multi_processor_count if properties else torch.get_num_threads(),
        dtype=_name(dtype),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _wants_hopper_kernels() -> bool:
    value = os.environ.get("FLASH_EXT_HOPPER", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"FLASH_EXT_HOPPER must be 0 or 1, got {value}")
    return value != "0"
