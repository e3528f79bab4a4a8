"""What a loaded library calls and does not have."""

from __future__ import annotations

import ctypes
import mmap
import re
from functools import cache


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
