"""``as_flash_attn()``: libraries that import flash_attn or flash_attn_interface get flash_ext."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from flash_ext.argument_checks import as_flag

VERSION = "2.8.3"  # of the interface
VERSION_3 = "3.0.0"
_HERE = "flash_ext.integrations.flash_attn"
# Which of our modules stands under which name; None: a package that holds the others.
_MODULES = {
    "flash_attn_2_cuda": f"{_HERE}.extension_2",
    "flash_attn": f"{_HERE}.interface_2",
    "flash_attn.flash_attn_interface": f"{_HERE}.interface_2",
    "flash_attn.bert_padding": f"{_HERE}.padding",
    "flash_attn.layers": None,
    "flash_attn.layers.rotary": f"{_HERE}.rotary",
    "flash_attn.ops": None,
    "flash_attn.ops.triton": None,
    "flash_attn.ops.triton.rotary": f"{_HERE}.rotary",
    "flash_attn_3": None,
    "flash_attn_interface": f"{_HERE}.interface_3",
}
_VERSIONS = {"flash_attn": VERSION, "flash_attn_3": VERSION_3, "flash_attn_interface": VERSION_3}
_DISTRIBUTIONS = {"flash-attn": ("flash_attn",), "flash-attn-3": ("flash_attn_3", "flash_attn_interface")}


class FlashAttnNames:
    """The names while they are in place. A context manager, which takes them back at its end."""

    def __init__(self, finder: _Distributions | None, replaced: dict[str, ModuleType | None]) -> None:
        self._finder, self._replaced = finder, replaced

    def undo(self) -> None:
        """Takes the names back; what a real installation had imported under them is there again.

        Who has imported our functions keeps them. Undoing twice does nothing, and neither does undoing a call that
        found the names in place already.
        """
        global _in_place
        if self._finder is None:
            return
        sys.meta_path.remove(self._finder)
        for name, before in self._replaced.items():
            sys.modules.pop(name, None)
            if before is not None:
                sys.modules[name] = before
        self._finder = _in_place = None
        _tell_transformers()

    def __enter__(self) -> FlashAttnNames:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


_in_place: FlashAttnNames | None = None


def as_flash_attn(*, force: bool = False) -> FlashAttnNames:
    """Puts flash_ext under the names of FlashAttention, for libraries that import it and cannot be told otherwise.

    They are ``flash_attn`` (version 2.8, with flash_attn_interface and its ``_flash_attn_forward``,
    ``_flash_attn_backward``, their varlen and ``_wrapped_`` forms; bert_padding; layers.rotary), ``flash_attn_2_cuda``
    (the functions of its compiled module) and ``flash_attn_interface`` (FlashAttention-3). ``importlib.metadata`` knows
    them too, as flash-attn and flash-attn-3.
    Call it before those libraries are imported: many look once whether FlashAttention is there. transformers is told
    even afterwards.

    Args:
        force: also where FlashAttention itself is installed, which is then hidden.

    Returns:
        An object whose ``undo()`` takes the names back; ``with`` does so at its end.

    Raises:
        RuntimeError: FlashAttention itself is installed or imported, and ``force`` is not given.
        TypeError: force is no bool.
    """
    global _in_place
    force = as_flag("force", force)
    if _in_place is not None:
        return FlashAttnNames(None, {})
    if not force:
        _refuse_to_hide()
    replaced = {name: sys.modules.get(name) for name in _names_to_replace()}
    for name in replaced:
        sys.modules.pop(name, None)
    for name, source in _MODULES.items():
        sys.modules[name] = _make_module(name, source)
    vars(sys.modules["flash_attn.flash_attn_interface"])["flash_attn_gpu"] = sys.modules["flash_attn_2_cuda"]
    finder = _Distributions()
    sys.meta_path.insert(0, finder)
    _in_place = FlashAttnNames(finder, replaced)
    _tell_transformers()
    return _in_place


def _refuse_to_hide() -> None:
    for name in _VERSIONS:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            raise RuntimeError(
                f"flash_ext: {name} is installed already ({spec.origin}). Uninstall it, or call "
                "as_flash_attn(force=True) to hide it in this process"
            )


def _names_to_replace() -> list[str]:
    """Ours, and those of a real installation's modules, which belong to other functions."""
    theirs = [name for name in sys.modules if name.partition(".")[0] in _VERSIONS]
    return [*_MODULES, *(name for name in theirs if name not in _MODULES)]


def _make_module(name: str, source: str | None) -> ModuleType:
    """A module of its own, with what ours has: the same functions, another name."""
    is_package = source is None or any(other.startswith(f"{name}.") for other in _MODULES)
    spec = importlib.machinery.ModuleSpec(name, None, origin=__file__, is_package=is_package)
    module = importlib.util.module_from_spec(spec)
    if source is not None:
        ours = importlib.import_module(source)
        public = {key: value for key, value in vars(ours).items() if not key.startswith("__")}
        vars(module).update(public)
        module.__doc__, module.__file__ = ours.__doc__, ours.__file__
    if name in _VERSIONS:
        vars(module)["__version__"] = _VERSIONS[name]
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


# ---- Distributions --------------------------------------------------------------------------------------------------


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str, packages: tuple[str, ...]) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {_VERSIONS[packages[0]]}\n"
            "Summary: flash_ext under the name of FlashAttention\n",
            "top_level.txt": "\n".join(packages),
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Distributions:
    """On ``sys.meta_path``: finds distributions, and no modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any) -> Iterator[importlib.metadata.Distribution]:
        for name, packages in _DISTRIBUTIONS.items():
            if context.name is None or _normalized(context.name) == name:
                yield _Distribution(name, packages)


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _tell_transformers() -> None:
    """It remembers what is installed."""
    remembered = sys.modules.get("transformers.utils.import_utils")
    if remembered is None:
        return
    packages = getattr(remembered, "PACKAGE_DISTRIBUTION_MAPPING", None)
    if isinstance(packages, dict):
        installed = importlib.metadata.packages_distributions()
        for package in _VERSIONS:
            packages.pop(package, None)
            if package in installed:
                packages[package] = list(installed[package])
    for name, function in vars(remembered).items():
        if isinstance(function, functools._lru_cache_wrapper) and ("flash_attn" in name or "distribution" in name):
            function.cache_clear()
