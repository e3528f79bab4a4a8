"""Checks that come before an operator's own, of what its schema would refuse in words that are not the caller's."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

INTEGERS: Any = (int, torch.SymInt, Integral)


def check_tensors(**arguments: Any) -> None:
    """Raises TypeError with the name of what is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")


def check_optional_tensors(**arguments: Any) -> None:
    """The same of options; None stands for one that is not given."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor or None, got {type(value).__name__}")


def check_numbers(**arguments: Any) -> None:
    """Raises TypeError with the name of what is None and has to be a number."""
    for name, value in arguments.items():
        if value is None:
            raise TypeError(f"{name} must be a number, got None")


def check_names(function: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises TypeError for an option that the function does not have."""
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise TypeError(f"{function} got an unexpected keyword argument {unknown[0]!r}")


def check_window(window_size: Any) -> tuple[int, int]:
    """(left, right) of a pair of integers."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be (left, right), got {window_size!r}") from None
    if not (isinstance(left, INTEGERS) and isinstance(right, INTEGERS)):
        raise TypeError(f"window_size must be two integers, got {window_size!r}")
    return left, right
