"""What ``.ci/run`` counts on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import flash_ext

ROOT = Path(__file__).parents[2]


def list_of(name: str) -> list[str]:
    """What a list of tests in the script holds."""
    found = re.search(rf"^{name}=\(([^)]*)\)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert found is not None, name
    return found[1].split()


def test_rows_of_the_wheel_need_nothing_of_the_checkout(tmp_path: Path) -> None:
    """They run where there is the installed package and the tests, and no benchmarks, tools or pages."""
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "flash_ext").symlink_to(Path(flash_ext.__file__).parent)
    files = sorted({*list_of("numbers"), *list_of("with_torch")})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(installed)
    done = subprocess.run([*command, *files], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
