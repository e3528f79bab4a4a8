"""PEP 517 backend: setuptools', but it uses the torch that is there instead of asking pip for another one.

Naming torch in [build-system] requires would bring the newest torch and several GB of CUDA libraries into the isolated
build environment. Any torch >= 2.10 has the headers, so the one of the environment being installed into will do.
"""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (hooks of the backend)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from build_support.toolchain import MINIMUM_TORCH, find_torch


def _torch_requirement() -> list[str]:
    return [] if find_torch() is not None else [f"torch>={'.'.join(map(str, MINIMUM_TORCH))}"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()
