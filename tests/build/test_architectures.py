"""Folders of csrc/kernels, architectures of the build and rows of the plan say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_ext import _plan

ROOT = Path(__file__).resolve().parents[2]

toolchain = pytest.importorskip("build_support.toolchain", reason="needs the checkout")


def test_each_folder_of_kernels_is_built() -> None:
    folders = {path.name for path in (ROOT / "csrc" / "kernels").glob("sm*")}
    archs = toolchain.default_archs()
    assert {f"sm{arch.rstrip('a')}" for arch in archs} == folders
    assert archs[-1] == "80"


@pytest.mark.parametrize(
    ("source", "arch"),
    [
        ("csrc/kernels/sm90/forward/inst/bf16_64.cu", "90a"),
        ("csrc/kernels/sm100/forward/inst/bf16_64.cu", "100a"),
        ("csrc/kernels/sm80/forward/inst/bf16_64.cu", None),
        ("csrc/kernels/common/tensor_map.cpp", None),
        ("csrc/kernels/launch.cpp", None),
        ("csrc/api/cuda_attention.cpp", None),
    ],
)
def test_an_architecture_of_its_own(source: str, arch: str | None) -> None:
    assert toolchain.own_arch(source) == arch


def test_the_plan_names_the_architectures_of_their_own() -> None:
    own = [arch for arch in toolchain.default_archs() if arch != "80"]
    assert [special.target for special in _plan.SPECIAL_ARCHITECTURES] == own
    rooms = {kernel.split("/")[0] for kernel in _plan.KERNELS}
    for special in _plan.SPECIAL_ARCHITECTURES:
        assert f"sm{special.compute_capability}" in rooms and special.target == f"{special.compute_capability}a"
