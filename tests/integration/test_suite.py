"""What a run of pytest without arguments collects."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest


def test_no_folder_of_tests_is_left_out(request: pytest.FixtureRequest) -> None:
    """By itself pytest leaves out folders of certain names, such as build."""
    patterns = request.config.getini("norecursedirs")
    folders = [path.parent.name for path in Path(__file__).resolve().parents[1].glob("*/test_*.py")]
    assert "build" in folders
    assert not [name for name in folders for pattern in patterns if fnmatch(name, pattern)]
