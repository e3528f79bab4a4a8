"""What the compiled libraries were built with, and whether the torch that is here can load them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

MINIMUM_TORCH = (2, 10)

_RECORD = Path(__file__).parent / "_build_info.json"


@cache
def _record() -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(_RECORD.read_text())
    except FileNotFoundError:
        raise ImportError(
            "flash_ext is not built: in a checkout run `python setup.py build_ext --inplace`, "
            "or install the package with `pip install .` and import it from another folder"
        ) from None
    return record


def build_info() -> dict[str, Any]:
    """What this installation was built with.

    Returns:
        A new dict: ``version``, ``git_commit`` (None outside of a checkout), ``python``, ``compiler``,
        ``torch_headers`` (the torch it was compiled against), ``torch_target`` (the oldest torch that loads it),
        ``cpu_isas`` (instruction sets that the CPU kernels exist for), ``nvcc`` (None for a build without CUDA)
        and ``cuda_archs``.

    Raises:
        ImportError: the package was not built.
    """
    return {name: list(value) if isinstance(value, list) else value for name, value in _record().items()}


def require_torch(version: str) -> None:
    """Raises ImportError where ``version``, as in ``torch.__version__``, is too old for the libraries."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < MINIMUM_TORCH:
        needed = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(
            f"flash_ext needs torch >= {needed}, but torch {version} is installed: pip install 'torch>={needed}'"
        )
