"""Libraries that were linked without some of what they call: how they are loaded, and what they lack."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import re
import sys
from functools import cache
from types import ModuleType


def import_lazily(name: str) -> ModuleType:
    """Imports a module; libraries that it loads look for a function when it is called first, not before.

    Python looks for all of them at once, so that a build of some kernels, which names the others, cannot be imported.

    Raises:
        ImportError: as ``import`` would.
    """
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags & ~os.RTLD_NOW | os.RTLD_LAZY)
    try:
        return importlib.import_module(name)
    finally:
        sys.setdlopenflags(flags)


@cache
def undefined_symbols(file: str, pattern: str) -> tuple[str, ...]:
    """Symbols in the table of a library that is loaded, of names like the pattern, that no library defines.

    Raises:
        OSError: the file cannot be read, or is no library.
    """
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        names = {name.decode() for name in re.findall(pattern.encode() + rb"(?=\0)", content)}
    library = ctypes.CDLL(file)  # as it is loaded already, nothing of it is resolved again
    return tuple(sorted(name for name in names if not hasattr(library, name)))
