"""Where an implementation comes from: versions, commits, and the digest of a library that has neither."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import torch

COMMIT_DIGITS = 12
COMMIT_VARIABLE = "COMMIT_OF_"  # and the distribution, as in COMMIT_OF_FLASH_ATTN_3: of what pip did not install


def torch_origin(cudnn: bool = False) -> dict[str, str]:
    """``cudnn``: with the version of cuDNN, which does the work."""
    origin = {"torch": torch.__version__, "commit": str(torch.version.git_version)[:COMMIT_DIGITS]}
    version = cudnn_version() if cudnn else None
    return origin if version is None else {**origin, "cudnn": version}


def cudnn_version() -> str | None:
    number = torch.backends.cudnn.version()
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def package_origin(name: str, extension: ModuleType | None) -> dict[str, str]:
    """Version of a distribution, the commit that it was built from, and what its library holds.

    The commit is the one that pip installed (PEP 610), or else what the environment says (COMMIT_VARIABLE).

    Args:
        name: of the distribution; what is unpacked by hand has none.
        extension: the module whose file holds the kernels.

    Raises:
        ValueError: the environment names no commit.
    """
    origin: dict[str, str] = {}
    commit = commit_of_environment(name)
    try:
        package = distribution(name)
        origin["version"] = package.version
        installed = json.loads(package.read_text("direct_url.json") or "{}").get("vcs_info", {})
        commit = installed.get("commit_id") or commit
    except PackageNotFoundError:
        pass
    origin |= {"commit": commit[:COMMIT_DIGITS]} if commit else {}
    file = None if extension is None else extension.__file__
    if file is not None:
        origin["sha256"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:COMMIT_DIGITS]
    return origin


def commit_of_environment(distribution_name: str) -> str:
    """What somebody who built a package by hand says of it; else empty."""
    variable = COMMIT_VARIABLE + re.sub(r"\W", "_", distribution_name).upper()
    commit = os.environ.get(variable, "")
    if commit and not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        raise ValueError(f"{variable} must be a commit of 7 to 40 hexadecimal digits, got {commit!r}")
    return commit


def words_of(origin: Mapping[str, str]) -> str:
    """ "3.0.0, commit 0251105a2fb1"; the digest of the library alone where nothing else is known."""
    found = [origin[name] for name in ("version", "torch") if name in origin]
    found += [f"cuDNN {origin['cudnn']}"] if "cudnn" in origin else []
    found += [f"commit {origin['commit']}"] if "commit" in origin else []
    return ", ".join(found) or (f"library {origin['sha256']}" if "sha256" in origin else "")
