"""``supports`` and ``explain``: whether and how a call would run, without making it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_ext._plan as _plan
from flash_ext import nested
from flash_ext.argument_checks import as_flag, check_names, check_tensors, describe
from flash_ext.eager import call
from flash_ext.functional import DECODE_OPTIONS, SCORE_OPTIONS, checked_decode_options, checked_score_options
from flash_ext.ops import ScoreOptions
from flash_ext.torch_private import TRACERS

_OPS = torch.ops.flash_ext
_ATTENTION = SCORE_OPTIONS | {"deterministic", "return_lse", "return_max_logit"}
_WEIGHTS = SCORE_OPTIONS - {"sink"} | {"signed"}
_WITHOUT_VALUES = ("weights", "weights_backward")
_OPTIONS = {
    "forward": _ATTENTION,
    "backward": _ATTENTION,
    "weights": _WEIGHTS,
    "weights_backward": _WEIGHTS,
    "decode": DECODE_OPTIONS | {"return_lse"},
}


class ServedClass(NamedTuple):
    """A class of tensors whose calls become calls on plain tensors."""

    is_theirs: Callable[..., bool]  # (q, k, v)
    check: Callable[..., None]  # (q, k, v, operation, options); raises what the call would raise
    local_call: Callable[..., Any]  # (q, k, v, operation, options) -> the same of the call on plain tensors


_classes_served: list[ServedClass] = []


def explain_class(served: ServedClass) -> None:
    """From now on ``supports`` and ``explain`` take these tensors."""
    _classes_served.append(served)


def _class_of(q: Tensor, k: Tensor, v: Tensor) -> ServedClass | None:
    return next((served for served in _classes_served if served.is_theirs(q, k, v)), None)


def supports(q: Tensor, k: Tensor, v: Tensor, *, operation: str = "forward", **options: Any) -> tuple[bool, str]:
    """Whether a call can run, and if not, why.

    Runs the call's own checks, on a CPU also those of the values of lengths and indices, and nothing else: it computes
    no result and draws no random number. Then checks that the device has a kernel for the operation. It ignores whether
    tensors require a gradient.

    Args:
        q, k, v: as for the function that the operation belongs to. "weights" and "weights_backward" do not read v;
            for "decode" k and v are the caches, and no rows are appended to them. Of DTensors (after
            ``register_dtensor``) the answer is the same on all ranks, and one of them may ask alone.
        operation: "forward" and "backward" (of ``attention``), "weights" and "weights_backward" (of
            ``attention_weights``, without its lse), or "decode".
        **options: the options of that function.

    Returns:
        (True, "") or (False, reason); the reason is the message that the call would raise. Of meta tensors, of which
        the call would give a shape, the answer is False.

    Raises:
        TypeError: the function does not have an option.
        ValueError: there is no such operation.
    """
    _check_options("supports()", operation, options)
    try:
        q, k, v, options = _packed(q, k, v, operation, options)
        check_tensors(q=q, k=k, v=v)
        _check_flags(options)
        with torch.no_grad():
            _check_call(q, k, v, operation, options)
        # Meta tensors pass these checks, and there are no kernels for them.
        ok, reason = _plan.supports(_plan.Problem(operation=operation, **describe_device(q.device, q.dtype)))
    except (RuntimeError, ValueError, TypeError) as error:
        return False, str(error).removeprefix("flash_ext: ")
    return ok, reason


@dataclass(frozen=True, repr=False)
class Explanation:
    """How a call runs: the problem that describes it and the plan for it. Made to be printed."""

    problem: _plan.Problem
    plan: _plan.Plan
    of_rank: bool = False  # of this rank's part of DTensors

    def __repr__(self) -> str:
        problem, plan = self.problem, self.plan
        splits = f"{plan.num_splits}" + (f" of {plan.split_size} keys" if plan.split_size else "")
        tiles = (
            f"tiles of {plan.block_m} queries x {plan.block_n} keys" if plan.block_n else "tiles of the kernel's own"
        )
        lines = [
            f"flash_ext {problem.operation} by csrc/kernels/{plan.kernel} on {problem.device}, {problem.dtype}",
            f"  q ({problem.batch}, {problem.seqlen_q}, {problem.heads_q}, {problem.head_dim}), "
            f"k ({problem.batch}, {problem.seqlen_k}, {problem.heads_kv}, {problem.head_dim}), "
            f"head_dim of v {problem.head_dim_v}",
            f"  mask class {plan.mask_class}, {tiles}" + (f", variant for {plan.variant}" if plan.variant else ""),
            f"  key ranges: {splits} forward, {plan.num_chunks} backward",
        ]
        if self.of_rank:
            lines.insert(1, "  this rank's part of DTensors")
        return "\n".join(lines + [f"  - {reason}" for reason in plan.reasons])

    __str__ = __repr__


def explain(q: Tensor, k: Tensor, v: Tensor, *, operation: str = "forward", **options: Any) -> Explanation:
    """Which kernel runs a call, with which tiles and splits, and why: the plan that the call itself follows.

    The operator itself describes the call, so that the explanation and the call follow the same plan. No result is
    computed.

    Args:
        q, k, v, operation, options: as for ``supports``. Of DTensors, the call on this rank's part of them.

    Returns:
        An ``Explanation``, to be printed: ``problem`` describes the call, ``plan`` holds the decisions, and
        ``plan.reasons`` a reason for each.

    Raises:
        ValueError: no kernel serves these sizes, numbers, dtype and device, or there is no such operation.
        RuntimeError: the tensors do not fit together, or there are no kernels for their device.
        TypeError: the function does not have an option, an option has a type that is not allowed, or a tensor is fake
            or meta.
        NotImplementedError: DTensors that the call would redistribute first, or of which it makes several calls
            (sharded along the sequence).
    """
    _check_options("explain()", operation, options)
    problem = problem_of(q, k, v, operation, **options)
    return Explanation(problem, _plan.make_plan(problem), of_rank=_class_of(q, k, v) is not None)


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operation: str,
    *,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    signed: bool = False,
    **options: Any,
) -> _plan.Problem:
    """The problem of a call, as the operator itself describes it to the plan.

    Args and Raises: as for ``explain``, except errors of the plan.
    """
    q, k, v, options = _packed(q, k, v, operation, options)
    check_tensors(q=q, k=k, v=v)
    served = _class_of(q, k, v)
    if served is not None:
        q, k, v, options = served.local_call(q, k, v, operation, options)
    _check_memory(q=q, k=k, v=v)
    _check_flags(
        dict(deterministic=deterministic, return_lse=return_lse, return_max_logit=return_max_logit, signed=signed)
    )
    if operation == "decode":
        return _plan.problem_of(
            call(_OPS.attention_decode_describe.default, q, k, v, *checked_decode_options(q, **options))
        )
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    value = None if operation in _WITHOUT_VALUES else v
    scores = _with_seed(checked_score_options(q, k, **options), q)
    return _plan.problem_of(
        call(_OPS.attention_describe.default, q, k, value, operation, deterministic, return_max_logit, *scores)
    )


def _packed(
    q: Tensor, k: Tensor, v: Tensor, operation: str, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """The call that ``attention`` makes of one with nested tensors; others as they are."""
    if operation not in ("forward", "backward") or not isinstance(q, Tensor) or not q.is_nested:
        return q, k, v, options
    rows, options = nested.as_packed(q, k, v, options)
    return *rows, options


def _check_memory(**tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.is_meta or type(t).__module__ in TRACERS:
            raise TypeError(
                f"{name} must be a tensor in memory, as the operator itself describes the call, "
                f"got {describe(t)} on {t.device}"
            )


def _with_seed(given: tuple[Any, ...], q: Tensor) -> tuple[Any, ...]:
    """The options with a seed where the call would draw one."""
    scores = ScoreOptions(*given)
    if scores.dropout_p == 0 or scores.rng_state is not None:
        return given
    return scores._replace(rng_state=torch.zeros(2, dtype=torch.int64, device=q.device))


def _check_options(function: str, operation: str, options: dict[str, Any]) -> None:
    if not isinstance(operation, str):
        raise TypeError(f"operation must be a str, got {describe(operation)}")
    if operation not in _OPTIONS:
        raise ValueError(f"operation must be one of {', '.join(_OPTIONS)}, got {operation!r}")
    check_names(f"{function} of {operation}", options, _OPTIONS[operation])


def _check_flags(options: dict[str, Any]) -> None:
    """Checks the flags that functions evaluate themselves and operators never get."""
    if options.get("deterministic") is not None:
        as_flag("deterministic", options["deterministic"])
    for name in ("return_lse", "return_max_logit", "signed"):
        as_flag(name, options.get(name, False))


def _check_call(q: Tensor, k: Tensor, v: Tensor, operation: str, options: dict[str, Any]) -> None:
    """Raises what the call would raise."""
    served = _class_of(q, k, v)
    if served is not None:
        served.check(q, k, v, operation, options)
        return
    if operation == "decode":
        arguments = {name: value for name, value in options.items() if name in DECODE_OPTIONS}
        call(_OPS.attention_decode_check.default, q, k, v, *checked_decode_options(q, **arguments))
        return
    arguments = {name: value for name, value in options.items() if name in SCORE_OPTIONS}
    scores = checked_score_options(q, k, **arguments)
    if operation not in _WITHOUT_VALUES:
        scores = _with_seed(scores, q)
    call(_OPS.attention_check.default, q, k, k if operation in _WITHOUT_VALUES else v, *scores)


def describe_device(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a Problem that decide whether there are kernels at all, for ``_plan.supports``."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return dict(
        device=device.type,
        compute_capability=10 * capability[0] + capability[1],
        dtype=str(dtype).removeprefix("torch."),
    )
