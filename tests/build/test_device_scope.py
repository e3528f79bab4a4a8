"""Each operator makes its tensors' device the current one: read from the sources, as one GPU cannot tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

API = Path(__file__).resolve().parents[2] / "csrc" / "api"
FUNCTION = re.compile(r"^[\w:<>&* ]+? (\w+)\(([^{};]*)\)\s*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
REGISTERED = re.compile(r'm\.impl\("(\w+)", TORCH_BOX\(&(\w+)\)\)')
SCHEMA = re.compile(r'm\.def\(\s*"(\w+)\(Tensor')
SCOPE = re.compile(r"\bconst DeviceScope \w+\(\w+\);")


SOURCES = [path.read_text() for path in sorted(API.glob("*.cpp")) if "FLASH_EXT_OPERATORS(m)" in path.read_text()]
OPERATORS = {operator: function for source in SOURCES for operator, function in REGISTERED.findall(source)}
BODIES = {name: body for source in SOURCES for name, _, body in FUNCTION.findall(source)}


def sets_device(function: str) -> bool:
    """By itself, or in the function of these files that it calls."""
    body = BODIES[function]
    called = [name for name in BODIES if name != function and re.search(rf"(return|=) {name}\(", body)]
    return bool(SCOPE.search(body)) or (bool(called) and all(map(sets_device, called)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_device_is_set(operator: str) -> None:
    function = OPERATORS[operator]
    assert sets_device(function), f"{operator}: {function}() in csrc/api has no DeviceScope"


def test_every_operator_that_takes_tensors_is_found() -> None:
    assert set(OPERATORS) == set(SCHEMA.findall((API / "ops.cpp").read_text()))
