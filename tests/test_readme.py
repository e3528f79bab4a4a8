"""README.md's recipes run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_recipes_run() -> None:
    recipes = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(recipes) >= 8
    names: dict[str, object] = {}
    for recipe in recipes:
        exec(compile(recipe, str(README), "exec"), names)
