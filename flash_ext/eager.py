"""How an operator is called eagerly: past what torch's dispatcher would do in Python.

The host's time is most of a small call. By the Autograd key's Python kernel an operator of this library takes 10
microseconds more where no gradient is wanted, and 25 where one is. Decided here beforehand it takes 2, those of a guard
(docs/tuning/host.md). Nothing is lost: a compiler, a tracer, a transform, autocast or a mode still gets the whole call.
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
"""Of an operator, what makes the same call and records its derivative: (how to call, operator, arguments)."""


def call(op: Any, *args: Any) -> Any:
    """``op(*args)``, by the shortest way there is.

    Where nothing asks for a derivative, autograd is left out. Else the derivative is recorded here, unless somebody
    else has to see the call first.
    """
    try:
        return _call(op, args)
    except NotImplementedError as error:
        if str(error).startswith("Could not run"):
            _refuse_backend(op, args)
        raise


def _call(op: Any, args: tuple[Any, ...]) -> Any:
    if torch.compiler.is_compiling() or is_functorch_active() or is_forward_mode():
        return op(*args)  # they have to see it all
    if is_tracing():
        return op(*args)  # one and the same operator in the graph, whatever requires a gradient while tracing
    if has_torch_function(args):
        return op(*args)  # what it calls may want derivatives
    if torch.is_grad_enabled() and any_requires_grad(*args):
        record = recorders.get(op)
        if record is None or is_any_autocast_enabled():
            return op(*args)
        return record(_call_below_autograd, op, *args)
    return _call_below_autograd(op, *args)


def _call_below_autograd(op: Any, *args: Any) -> Any:
    if op is _FORWARD and len(args) == _NUM_PLAIN and num_dispatch_modes() == 0:
        op = _PLAIN  # 4 us less; who watches operators gets to see one and not two
    with BelowAutograd():
        return op._op(*args)  # what op(*args) does, a frame later


def _refuse_backend(op: Any, args: tuple[Any, ...]) -> None:
    """Says of which argument the dispatcher found no kernel, in place of its list of all backends that there are."""
    named = [(a.name, t) for a, t in zip(arguments_of(op), args, strict=False) if type(t) is Tensor]
    for name, t in named:
        check_dense(name, t)
    for name, t in named:
        if t.device.type != "cpu":
            raise RuntimeError(
                f"flash_ext: {name} must be on a device that this build has kernels for (flash_ext.build_info()), "
                f"got {t.device}"
            ) from None
