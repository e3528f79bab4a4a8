"""``tools/pytorch_sdpa_tests.py``: which tests fail under ``activate()`` and not without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "pytorch_sdpa_tests.py"
TESTS = """
import pytest
from flash_ext.integrations import sdpa_provider
class TestSDPA:
    def test_torchs_alone(self):
        assert not sdpa_provider.is_active()
    def test_both(self):
        pass
    def test_neither(self):
        assert False
    @pytest.mark.parametrize("size", [f"{n:02}" for n in range(40)])
    def test_sizes(self, size):
        pass
"""


def run(folder: Path, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sdpa.py").write_text(tests)
    command = [sys.executable, str(TOOL), str(folder / "test_sdpa.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_what_fails_under_activate_alone(tmp_path: Path) -> None:
    ran = run(tmp_path, TESTS, "--at-most", "5", "--", "-p", "no:xdist")
    assert ran.returncode == 1, ran.stderr
    without, within, count, name = ran.stdout.splitlines()
    assert without.startswith("torch alone: ") and " 1 failed, 0 skipped" in without
    assert within.startswith("under activate(): ") and " 2 failed, 0 skipped" in within
    assert 2 < int(without.split()[2]) < 20  # a sample of the sizes
    assert count.endswith(": 1") and name.endswith("::test_torchs_alone")


def test_nothing_that_fails(tmp_path: Path) -> None:
    ran = run(tmp_path, "class TestSDPA:\n    def test_both(self):\n        pass\n")
    assert ran.returncode == 0 and "torch alone: 1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_a_file_that_does_not_load(tmp_path: Path) -> None:
    ran = run(tmp_path, "import there_is_no_such_module\n")
    assert ran.returncode == 1
