"""``tools/mutants.py``: which objects a planted bug is compiled into."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants import Bug, Build

CPU, CUDA, PLAN = "flash_ext/lib/libflash_ext_cpu.so", "flash_ext/lib/libflash_ext_cuda.so", "flash_ext/_plan.so"
AVX2, AMX = "build/libflash_ext_cpu/isa_avx2.o", "build/libflash_ext_cpu/isa_amx.o"


def build_of(shared: str) -> Build:
    """With checks and plan in both libraries, and their objects in the folder of one of them."""
    checks, plan, launch = f"build/{shared}/checks.o", f"build/{shared}/plan.o", "build/libflash_ext_cuda/launch.o"
    linked = {CPU: [AVX2, AMX, checks, plan], CUDA: [launch, checks, plan], PLAN: [plan]}
    sources = {
        checks: {"csrc/checks.cpp", "csrc/checks.h"}, plan: {"csrc/plan.cpp", "csrc/plan.h"},
        launch: {"csrc/launch.cpp", "csrc/checks.h", "csrc/plan.h"}, AVX2: {"csrc/isa.h"}, AMX: {"csrc/isa.h"},
    }  # fmt: skip
    commands = {library: f"link {' '.join(objects)} -o {library}" for library, objects in linked.items()}
    return Build(Path("build"), {**commands, **{name: f"compile {name}" for name in sources}}, sources)


@pytest.mark.parametrize("shared", ["libflash_ext_cpu", "libflash_ext_cuda"])
@pytest.mark.parametrize(
    ("file", "objects", "libraries"),
    [("checks.cpp", ["checks"], {CPU}), ("checks.h", ["checks"], {CPU}), ("plan.cpp", ["plan"], {CPU, PLAN})],
)
def test_objects_of_both_libraries(shared: str, file: str, objects: list[str], libraries: set[str]) -> None:
    """In a build with CUDA they lie in its folder. What CUDA's library alone links is left alone."""
    build, bug = build_of(shared), Bug(f"csrc/{file}", "", "", "", isa="avx2")
    found = build.objects_of(bug)
    assert [Path(name).stem for name in found] == objects
    assert set(build.libraries_of(bug, found)) == libraries


def test_one_instruction_set_is_compiled() -> None:
    assert build_of("libflash_ext_cpu").objects_of(Bug("csrc/isa.h", "", "", "", isa="avx2")) == [AVX2]
    assert build_of("libflash_ext_cpu").objects_of(Bug("csrc/isa.h", "", "", "", isa="amx")) == [AMX]


def test_a_bug_of_cuda_names_its_objects() -> None:
    build, bug = build_of("libflash_ext_cuda"), Bug("csrc/plan.h", "", "", "", objects="launch")
    assert build.objects_of(bug) == ["build/libflash_ext_cuda/launch.o"]
    assert build.libraries_of(bug, build.objects_of(bug)) == [CUDA]
