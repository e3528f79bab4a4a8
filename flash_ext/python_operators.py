"""Operators in Python that the compiled libraries call: ``torch.ops.flash_ext_python.*``.

No exception passes through torch's C functions. So each operator that may raise has a result more: a tensor that holds
nothing, or an exception, which C++ throws behind torch's C functions (``csrc/api/python_operators.h``).
"""

from __future__ import annotations

import torch
from torch import Tensor

import flash_ext._plan as _plan

LIBRARY = torch.library.Library("flash_ext_python", "DEF")


def numbers(values: int | tuple[int, ...]) -> Tensor:
    """On the CPU, where C++ reads them, whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def no_exception() -> Tensor:
    """The last result of an operator that did not raise."""
    return numbers(())


def as_result(error: BaseException) -> Tensor:
    """The last result of an operator that raised ``error``."""
    return numbers(_plan.thrower_of(error))


def _empty_strided(like: Tensor, size: list[int], stride: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``torch.empty_strided`` on the device of ``like``."""
    try:
        return torch.empty_strided(size, stride, dtype=dtype, device=like.device), no_exception()
    except BaseException as error:
        return numbers(()), as_result(error)


LIBRARY.define("empty_strided(Tensor like, int[] size, int[] stride, ScalarType dtype) -> (Tensor, Tensor)")
LIBRARY.impl("empty_strided", _empty_strided, "CompositeExplicitAutograd")
