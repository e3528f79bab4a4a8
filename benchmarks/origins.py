"""Where an implementation comes from: versions, commits, and the digest of a library that has neither."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import torch

COMMIT_DIGITS = 12


def torch_origin(cudnn: bool = False) -> dict[str, str]:
    """``cudnn``: with the version of cuDNN, which does the work."""
    origin = {"torch": torch.__version__, "commit": str(torch.version.git_version)[:COMMIT_DIGITS]}
    version = cudnn_version() if cudnn else None
    return origin if version is None else {**origin, "cudnn": version}


def cudnn_version() -> str | None:
    number = torch.backends.cudnn.version()
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def package_origin(name: str, extension: ModuleType | None) -> dict[str, str]:
    """Version of a distribution, the commit that pip installed it from (PEP 610), and what its library holds.

    Args:
        name: of the distribution; what is unpacked by hand has none.
        extension: the module whose file holds the kernels.
    """
    origin: dict[str, str] = {}
    try:
        package = distribution(name)
        origin["version"] = package.version
        commit = json.loads(package.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id")
        origin |= {"commit": commit[:COMMIT_DIGITS]} if commit else {}
    except PackageNotFoundError:
        pass
    file = None if extension is None else extension.__file__
    if file is not None:
        origin["sha256"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:COMMIT_DIGITS]
    return origin
