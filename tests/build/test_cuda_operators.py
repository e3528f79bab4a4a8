"""Each operator on CUDA makes its tensors' device the current one: read from the sources, as one GPU cannot tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

API = Path(__file__).resolve().parents[2] / "csrc" / "api"
FUNCTION = re.compile(r"^[\w:<>&* ]+? (\w+)\(([^{};]*)\)\s*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
REGISTERED = re.compile(r'm\.impl\("(\w+)", TORCH_BOX\(&(\w+)\)\)')
INCLUDED = re.compile(r'^#include "(\w+\.h)"', re.MULTILINE)
SCHEMA = re.compile(r'm\.def\(\s*"(\w+)\(Tensor')


def operators() -> set[str]:
    """Those that take tensors."""
    return set(SCHEMA.findall((API / "ops.cpp").read_text()))


def implementations() -> list[tuple[str, str, dict[str, str]]]:
    """(operator, function, bodies of the functions of its file and of what that includes) of all that CUDA has."""
    found = []
    for path in sorted(API.glob("cuda*.cpp")):
        text = path.read_text()
        headers = [API / name for name in INCLUDED.findall(text)]
        sources = [header.read_text() for header in headers if header.exists()] + [text]
        bodies = {name: body for source in sources for name, _, body in FUNCTION.findall(source)}
        registered = REGISTERED.findall(text)
        found += [(operator, function, bodies) for operator, function in registered if operator in operators()]
    return found


def sets_device(function: str, bodies: dict[str, str]) -> bool:
    """By itself, or in a function of ``bodies`` that it calls."""
    body = bodies[function]
    if re.search(r"\bconst CudaDevice \w+\(\w+\);", body):
        return True
    called = [name for name in bodies if name != function and re.search(rf"(return|=) {name}\(", body)]
    return bool(called) and all(sets_device(name, bodies) for name in called)


@pytest.mark.parametrize(
    ("operator", "function", "bodies"), implementations(), ids=lambda x: x if type(x) is str else ""
)
def test_the_device_is_set(operator: str, function: str, bodies: dict[str, str]) -> None:
    assert sets_device(function, bodies), f"{operator}: {function}() in csrc/api has no CudaDevice"


def test_every_operator_is_found() -> None:
    assert {operator for operator, _, _ in implementations()} == operators()
