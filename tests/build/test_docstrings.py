"""Every public function says what it takes, what it returns and what it raises."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import flash_ext

REFERENCE = "The others: as for"  # to the docstring of another function


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in flash_ext.__all__:
        value = getattr(flash_ext, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            for method, member in members_of(value).items():
                function = getattr(value, method) if isinstance(member, (staticmethod, classmethod)) else member
                if (inspect.isfunction(function) or inspect.ismethod(function)) and not method.startswith("_"):
                    yield f"{name}.{method}", function


def members_of(cls: type) -> dict[str, Any]:
    """Its own ones, and those of the classes of ours that it is made of."""
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("flash_ext")]
    return {name: member for base in ours for name, member in vars(base).items()}


FUNCTIONS = dict(public_functions())
SHORT = {
    "BlockMask.to",
    "BlockMask.cpu",
    "BlockMask.cuda",
    "BlockMask.to_dense",
    "BlockMask.to_flex",
}  # a sentence says it all


def test_there_are_functions() -> None:
    assert {"attention", "decode", "flash_attn_func", "convert", "BlockMask.document"} <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring(name: str) -> None:
    function = FUNCTIONS[name]
    text = inspect.getdoc(function)
    assert text
    if name in SHORT:
        return
    assert "Returns:" in text and "Raises:" in text
    if REFERENCE in text:
        return
    parameters = [p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]
    assert [p for p in parameters if not re.search(rf"\b{p}\b", text)] == []
