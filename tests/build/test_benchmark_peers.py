"""How ``benchmarks`` finds, loads and calls packages of others."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.extensions import import_lazily, undefined_symbols

# A module of a build that lacks a kernel: it can be imported, and called where it does not need that kernel.
EXTENSION = """
#include <Python.h>
extern int kernel_that_was_not_linked(void);
int needs_the_kernel(void) { return kernel_that_was_not_linked(); }
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "partial_extension", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_partial_extension(void) { return PyModule_Create(&definition); }
"""
PACKAGE = """
import partial_extension
def flash_attn_func(q, k, v, causal=False): ...
def flash_attn_with_kvcache(q, k_cache, v_cache, page_table=None): ...
"""


@pytest.fixture
def partial_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose extension has an undefined symbol, and can be found."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    include = sysconfig.get_paths()["include"]
    if compiler is None or not (Path(include) / "Python.h").exists():
        pytest.skip("there is no compiler, or no Python.h")
    (tmp_path / "partial_package.py").write_text(PACKAGE)
    source = tmp_path / "partial_extension.c"
    source.write_text(EXTENSION)
    flags = ["-shared", "-fPIC", "-Wl,-z,lazy", f"-I{include}"]
    subprocess.run([compiler, *flags, "-o", str(source.with_suffix(".so")), str(source)], check=True)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("partial_package", "partial_extension"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "partial_package"


def test_a_build_of_some_kernels_is_a_peer(partial_package: str) -> None:
    with pytest.raises(ImportError, match="kernel_that_was_not_linked"):
        importlib.import_module(partial_package)
    peer = peers._flash_attn_package("a package", partial_package, "of-nobody", "partial_extension")
    assert peer is not None and "sha256" in peer.origin
    file = sys.modules["partial_extension"].__file__
    assert file is not None
    assert undefined_symbols(file, "kernel_that_was_not_linked") == ("kernel_that_was_not_linked",)


def test_binding_is_lazy_for_one_import_alone(partial_package: str, tmp_path: Path) -> None:
    flags = sys.getdlopenflags()
    (tmp_path / "reads_flags.py").write_text("import sys; flags = sys.getdlopenflags()")
    (tmp_path / "raises.py").write_text("raise ImportError('for a reason of its own')")
    found = import_lazily("reads_flags").flags
    assert found & os.RTLD_LAZY and not found & os.RTLD_NOW
    assert sys.getdlopenflags() == flags
    with pytest.raises(ImportError, match="for a reason of its own"):
        import_lazily("raises")
    assert sys.getdlopenflags() == flags
    assert import_lazily(partial_package).__name__ == partial_package and sys.getdlopenflags() == flags
