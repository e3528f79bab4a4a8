"""Eager calls of operators, without what torch's dispatcher would do in Python.

Host time dominates a small call. The Python kernel of the Autograd key adds 10 microseconds to a call of an operator
that needs no gradient, and 25 to one that does. Deciding here whether autograd is needed costs 2, those of a guard
(docs/tuning/host.md). A compiler, a tracer, a transform, autocast or a mode still gets the whole call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from flash_ext.argument_checks import check_dense
from flash_ext.libraries import OPS
from flash_ext.torch_private import (
    BelowAutograd,
    any_requires_grad,
    arguments_of,
    is_any_autocast_enabled,
    is_forward_mode,
    is_functorch_active,
    is_tracing,
    num_dispatch_modes,
)

_FORWARD, _PLAIN = OPS.attention_forward.default, OPS.attention_forward_plain.default
_NUM_PLAIN = len(arguments_of(_PLAIN))

recorders: dict[Any, Callable[..., Any]] = {}
"""For an operator, a function (how to call, operator, arguments) that makes the call and records its derivative."""


def call(op: Any, *args: Any) -> Any:
    """``op(*args)`` with the least host time.

    If no argument needs a gradient, the call bypasses autograd. Otherwise the derivative is recorded here, unless
    autocast or another layer of torch must see the call first.
    """
    try:
        return _call(op, args)
    except NotImplementedError as error:
        if str(error).startswith("Could not run"):
            _refuse_backend(op, args)
        raise


def _call(op: Any, args: tuple[Any, ...]) -> Any:
    if torch.compiler.is_compiling() or is_functorch_active() or is_forward_mode():
        return op(*args)  # these have to see the whole call
    if is_tracing():
        return op(*args)  # the graph must hold the same operator whether or not a gradient is required while tracing
    if has_torch_function(args):
        return op(*args)  # the override may want derivatives
    if torch.is_grad_enabled() and any_requires_grad(*args):
        record = recorders.get(op)
        if record is None or is_any_autocast_enabled():
            return op(*args)
        return record(_call_below_autograd, op, *args)
    return _call_below_autograd(op, *args)


def _call_below_autograd(op: Any, *args: Any) -> Any:
    if op is _FORWARD and len(args) == _NUM_PLAIN and num_dispatch_modes() == 0:
        op = _PLAIN  # 4 us less; not under a mode, which should see one operator and not two
    with BelowAutograd():
        return op._op(*args)  # what op(*args) calls, without its Python frame


def _refuse_backend(op: Any, args: tuple[Any, ...]) -> None:
    """Raises an error that names the argument without a kernel, instead of the dispatcher's list of all backends."""
    named = [(a.name, t) for a, t in zip(arguments_of(op), args, strict=False) if type(t) is Tensor]
    for name, t in named:
        check_dense(name, t)
    for name, t in named:
        if t.device.type != "cpu":
            raise RuntimeError(
                f"flash_ext: {name} must be on a device that this build has kernels for (flash_ext.build_info()), "
                f"got {t.device}"
            ) from None
