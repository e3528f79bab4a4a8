"""Good calls with one thing wrong, for tests of what is said of it.

On CUDA values that lie in tensors are checked with FLASH_EXT_CHECK=1 only, which is read once per process: these tests
run there in a process of their own (``test_all_of_it_on_cuda``), on a CPU otherwise.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import decode_oracle, oracle
from tests.decode_oracle import Decode

ON_CUDA = os.environ.get("FLASH_EXT_CHECK") == "1" and torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
if ON_CUDA:
    torch.set_default_device(DEVICE)

ERRORS = (RuntimeError, ValueError, TypeError)
NAN, INF = math.nan, math.inf


def random(*shape: int) -> Tensor:
    return oracle.random(*shape, device=DEVICE)


def int32(values: Sequence[int], device: str = DEVICE) -> Tensor:
    return oracle.int32(values, device)


def cumulative(lengths: Sequence[int]) -> Tensor:
    return oracle.cumulative(lengths, DEVICE)


def make_decode(*sizes: int, **options: Any) -> Decode:
    return decode_oracle.make_decode(*sizes, device=DEVICE, **options)


Change = Callable[[dict[str, Any]], dict[str, Any]]
Case = tuple[str, str, Change]  # the argument to be named, what is wrong with it, what to change in a good call


def case(name: str, wrong: str, **changes: Any) -> Case:
    """A good call with other values; a function is given the old value."""

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        return {key: new(arguments[key]) if callable(new) else new for key, new in changes.items()}

    return name, wrong, change


def ids(cases: list[Case]) -> list[str]:
    return [f"{name}-{wrong}".replace(" ", "_") for name, wrong, _ in cases]


def assert_raises_naming(name: str, function: Callable[[], Any]) -> None:
    with pytest.raises(ERRORS) as caught:
        function()
    message = str(caught.value)
    assert re.search(rf"\b{name}\b", message), f"{name} is not named: {message}"


def not_last_contiguous(t: Tensor) -> Tensor:
    return torch.stack([t, t], dim=-1)[..., 0]


def to_meta(t: Tensor) -> Tensor:
    return t.to("meta")


def replaced(position: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[position] = value
        return t

    return change
