"""Builds of one checkout share their objects, whatever kind of install they are for; on a tree of two sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SETUP = """
from setuptools import Extension, setup
from build_support.build_command import BuildLibraries, TorchLibrary

setup(
    ext_modules=[
        TorchLibrary("flash_ext.lib.libflash_ext_cpu", ["csrc/api/one.cpp"]),
        Extension("flash_ext._plan", ["csrc/plan/bindings.cpp"]),
    ],
    cmdclass={"build_ext": BuildLibraries},
)
"""
API = '#include <torch/headeronly/version.h>\nextern "C" int one() { return 1; }\n'
BINDINGS = '#include <pybind11/pybind11.h>\nPYBIND11_MODULE(_plan, m) { m.attr("one") = 1; }\n'

KINDS = {
    "in place": "import runpy, sys; sys.argv[1:] = ['build_ext', '--inplace']; runpy.run_path('setup.py')",
    "editable": "from build_support import backend; backend.build_editable('dist')",
    "wheel": "from build_support import backend; backend.build_wheel('dist')",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for needed in ("setuptools", "pybind11"):
        pytest.importorskip(needed)
    if not (ROOT / "build_support").is_dir() or shutil.which("ninja") is None:
        pytest.skip("needs the checkout and ninja")
    tree = tmp_path / "checkout"
    shutil.copytree(ROOT / "build_support", tree / "build_support")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    files = {
        "setup.py": SETUP,
        "csrc/api/one.cpp": API,
        "csrc/plan/bindings.cpp": BINDINGS,
        "flash_ext/__init__.py": "",
    }
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content)
    return tree


def build(tree: Path, kind: str, isolated: Path) -> list[str]:
    """What was compiled or linked, with build requirements in a folder that the next build does not have."""
    import pybind11

    shutil.copytree(Path(pybind11.__file__).parent, isolated / "pybind11")
    environment = os.environ | {"FLASH_EXT_CUDA": "0", "PYTHONPATH": str(isolated), "MAX_JOBS": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {KINDS[kind]}"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    shutil.rmtree(isolated)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return re.findall(r"\[\d+/\d+\] (?:CXX|LINK) .*?(\w+\.\w+)\S*$", ran.stdout, re.MULTILINE)


@pytest.mark.parametrize("first", KINDS)
def test_later_builds_compile_nothing(tree: Path, first: str, tmp_path: Path) -> None:
    built = build(tree, first, tmp_path / "isolated-0")
    assert {"one.cpp", "bindings.cpp"} <= set(built)
    for number, kind in enumerate(KINDS, start=1):
        assert build(tree, kind, tmp_path / f"isolated-{number}") == []
    assert sorted(wheel.name.partition("-")[0] for wheel in (tree / "dist").glob("*.whl")) == ["flash_ext"] * 2


def test_a_changed_source_is_compiled(tree: Path, tmp_path: Path) -> None:
    build(tree, "wheel", tmp_path / "isolated-0")
    (tree / "csrc/api/one.cpp").write_text(API.replace("return 1", "return 2"))
    assert "one.cpp" in build(tree, "editable", tmp_path / "isolated-1")
    assert build(tree, "wheel", tmp_path / "isolated-2") == []
