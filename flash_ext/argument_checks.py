"""Checks that come before an operator's own: of what its schema would refuse in words that are not the caller's, or
would take and misread.

Functions that are called often test for the common case themselves (``type(q) is Tensor``) and come here with the rest.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_ext.torch_private import CAUSAL_BIAS, DTENSOR, MASKED_TENSOR, NESTED_TENSOR, full_name, is_instance

P = ParamSpec("P")
R = TypeVar("R")

# ---- Tensors --------------------------------------------------------------------------------------------------------

# With what to pass in their place. A class that learns the operators is taken out by allow_class().
_REFUSED_CLASSES = {
    DTENSOR: "pass its to_local() where batch or heads are sharded, or call register_dtensor() of "
    "flash_ext.integrations.distributed.dtensor first, also for a sharded sequence",
    NESTED_TENSOR: "torch.cat(x.unbind()) packs its sequences, for functions that take cu_seqlens",
    MASKED_TENSOR: "pass its get_data(), and a mask",
    CAUSAL_BIAS: "causal=True with top_left=True or False means the same, and scaled_dot_product_attention takes it",
}


def allow_class(name: str) -> None:
    """From now on tensors of that class are passed on: they handle the operators themselves."""
    _REFUSED_CLASSES.pop(name, None)


def check_tensors(**arguments: Any) -> None:
    """Raises TypeError, with the argument's name, for what is no tensor that operators can take."""
    for name, value in arguments.items():
        if type(value) is not Tensor or value.is_nested or value.layout is not torch.strided:
            _check_tensor(name, value, "a Tensor")


def check_optional_tensors(**arguments: Any) -> None:
    """The same of options; None stands for one that is not given."""
    for name, value in arguments.items():
        if value is None:
            continue
        if type(value) is not Tensor or value.is_nested or value.layout is not torch.strided:
            _check_tensor(name, value, "a Tensor or None")


def _check_tensor(name: str, value: Any, expected: str) -> None:
    """The rule for subclasses: one that has a ``__torch_dispatch__`` gets to see the operators and answers for itself
    (FakeTensor, AsyncCollectiveTensor), unless it is known not to know them. Of any other, operators would read the
    storage, whatever that means."""
    cls = type(value)
    if cls is Tensor or cls is Parameter:
        check_dense(name, value)
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {expected}, got {describe(value)}")
    for refused, way_out in _REFUSED_CLASSES.items():
        if is_instance(value, refused):
            raise TypeError(f"{name} must be {expected} of no class of its own, got a {cls.__name__}: {way_out}")
    if cls.__torch_dispatch__ is Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name} must be {expected} of no class of its own, got a {full_name(cls)}: pass "
            f"{name}.as_subclass(torch.Tensor) where its storage means what a Tensor's does"
        )


def check_dense(name: str, value: Tensor) -> None:
    """Raises TypeError for a tensor whose memory is no array of its elements."""
    if value.is_nested:
        raise TypeError(f"{name} must be a dense Tensor, got a nested one: {_REFUSED_CLASSES[NESTED_TENSOR]}")
    if value.layout is not torch.strided or value.is_quantized:
        kind = f"quantized {value.dtype}" if value.is_quantized else f"layout {value.layout}"
        raise TypeError(f"{name} must be a dense Tensor, got {kind}")


# ---- Numbers and flags ----------------------------------------------------------------------------------------------


def as_number(name: str, value: Any, way_out: str = "pass its item()") -> float:
    """A float of any real number. Raises TypeError for a tensor, whose gradient would be lost, a bool or a string."""
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value  # type: ignore[return-value]
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} must be a number that a float holds, got a longer one") from None
    if isinstance(value, Tensor):
        if _is_size_in_trace(value):
            return float(value)
        raise TypeError(f"{name} must be a number, got a Tensor: {way_out}")
    raise TypeError(f"{name} must be a number, got {describe(value)}")


KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # on a CPU; the last one there alone
_LEAST, _MOST = -(2**63), 2**63 - 1  # what operators take as an integer


def as_integer(name: str, value: Any, expected: str = "an integer") -> int:
    """An int of any integer. Raises TypeError for a tensor, a bool, a string or a fraction, even if it is whole."""
    if type(value) is int and (torch.compiler.is_compiling() or _LEAST <= value <= _MOST):
        return value  # compiled, it may be a symbol, of which a comparison would become a guard
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor) and _is_size_in_trace(value) and not value.is_floating_point():
        return int(value)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be {expected}, got {describe(value)}")
    number = int(value)
    if not _LEAST <= number <= _MOST:
        raise ValueError(f"{name} must be an integer of 64 bits, got {number}")
    return number


def as_size(name: str, value: Any) -> int:
    """``as_integer``, of a count or a size."""
    size = as_integer(name, value)
    if size < 0:
        raise ValueError(f"{name} must be at least 0, got {size}")
    return size


def as_flag(name: str, value: Any) -> bool:
    """A bool of torch's, numpy's or Python's. Raises TypeError for all else: "False" and None are no truth values."""
    if isinstance(value, (bool, torch.SymBool)) or _is_numpy_bool(value):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {describe(value)}")


def check_window(window_size: Any) -> tuple[int, int]:
    """(left, right) of a pair of integers."""
    left, right = as_pair("window_size", "(left, right)", window_size)
    if type(left) is int and type(right) is int:
        if torch.compiler.is_compiling() or (_LEAST <= left <= _MOST and _LEAST <= right <= _MOST):
            return left, right  # compiled, they may be symbols, as in as_integer
    return as_integer("window_size[0]", left), as_integer("window_size[1]", right)


def as_pair(name: str, axes: str, value: Any) -> tuple[Any, Any]:
    """Its two parts, of any type. Raises ValueError for what has not two of them."""
    try:
        first, second = value
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {axes}, got {value!r}") from None
    return first, second


def _is_size_in_trace(value: Tensor) -> bool:
    """While ``torch.jit.trace`` looks, sizes and what is made of them are tensors."""
    return torch.jit.is_tracing() and value.dim() == 0 and not value.requires_grad  # type: ignore[attr-defined]


def _is_numpy_bool(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.bool_)


def check_device(device: Any) -> None:
    """Raises TypeError for what cannot name a device: None would be torch's default one, wherever that is."""
    if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
        raise TypeError(f"device must be a torch.device, a str or a number, got {describe(device)}")


# ---- Words ----------------------------------------------------------------------------------------------------------


def describe(value: object) -> str:
    """What came, for a message: None, or the type; strings and numbers as they are."""
    if value is None:
        return "None"
    name = full_name(type(value))
    return f"{name} {value!r}" if isinstance(value, (str, bool, int, float)) else name


def check_names(function: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises TypeError for an option that the function does not have."""
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise TypeError(f"{function} got an unexpected keyword argument {unknown[0]!r}")


def rename_arguments(error: Exception, names: Mapping[str, str]) -> None:
    """Makes the message of a check name arguments as the caller of another function wrote them."""
    if type(error) in (RuntimeError, ValueError, TypeError):
        words, theirs = ("|".join(map(re.escape, some)) for some in (names, set(names.values())))
        message = re.sub(rf"\b({words})\b", lambda found: names[found[0]], str(error))
        # Two arguments may be parts of one of the caller's, which is then named once.
        error.args = (re.sub(rf"\b({theirs})((, | and )\1\b)+", r"\1", message),)


def errors_name(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that hands its arguments on under other names: errors have them as its caller wrote them."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (RuntimeError, ValueError, TypeError) as error:
                rename_arguments(error, names)
                raise

        return call

    return decorate
