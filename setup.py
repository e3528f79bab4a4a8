"""Sources and flags of the three libraries; the machinery is in build_support/, the metadata in pyproject.toml."""

import platform
from pathlib import Path

from setuptools import Extension, setup

from build_support.build_command import BuildLibraries, TorchLibrary
from build_support.toolchain import compiles

ROOT = Path(__file__).resolve().parent


def sources(pattern: str) -> list[str]:
    """The files of a pattern, relative to the checkout: what lies in the tree is built."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


API = sources("csrc/api/*.cpp")
CUDA_API = [path for path in API if Path(path).name.startswith("cuda")]
CPU_API = [path for path in API if Path(path).name.startswith(("cpu", "ops"))]
SHARED_API = [path for path in API if path not in CUDA_API + CPU_API]
# What launches kernels and has none: the host compiler alone reads it.
LAUNCH = [*sources("csrc/kernels/*.cpp"), *sources("csrc/kernels/common/*.cpp")]
PLAN = [path for path in sources("csrc/plan/*.cpp") if not path.endswith("/bindings.cpp")]

# A false alarm of GCC 12 in its own avx512fintrin.h; Clang does not know the warning.
AVX512_WARNING_FLAGS = ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
# The same kernels once more per instruction set; the library picks one when it runs. The flags come behind the
# -march=x86-64 that every source gets.
AMX_FLAGS = ["-mavx512bf16", "-mamx-tile", "-mamx-bf16"]  # GCC 11, Clang 12, and an assembler of their time
AMX_PROBE = "#include <immintrin.h>\nvoid probe() { _tile_dpbf16ps(0, 1, 2); }\n"
X86_ISA_FLAGS = {
    "csrc/kernels/cpu/isa_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "csrc/kernels/cpu/isa_avx512.cpp": [*AVX512_FLAGS, *AVX512_WARNING_FLAGS],
    "csrc/kernels/cpu/isa_amx.cpp": [*AVX512_FLAGS, *AMX_FLAGS, *AVX512_WARNING_FLAGS],
}


def isa_flags() -> dict[str, list[str]]:
    """Flags of the instruction sets that are built, by source."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    if compiles(AMX_PROBE, AMX_FLAGS):
        return {**X86_ISA_FLAGS, "csrc/kernels/cpu/attention.cpp": ["-DFLASH_EXT_HAS_AMX"]}
    return {source: flags for source, flags in X86_ISA_FLAGS.items() if not source.endswith("_amx.cpp")}


ISA_FLAGS = isa_flags()

CPU = [
    *ISA_FLAGS,
    *CPU_API,
    *SHARED_API,
    *(path for path in sources("csrc/kernels/cpu/*.cpp") if path not in {**X86_ISA_FLAGS, **ISA_FLAGS}),
    *PLAN,
]
CUDA = [
    *CUDA_API,
    *SHARED_API,
    *sources("csrc/kernels/*/*/inst/*.cu"),
    *LAUNCH,
    *PLAN,
]

setup(
    ext_modules=[
        # What takes longest comes first: at the end, no core waits long for another.
        TorchLibrary("flash_ext.lib.libflash_ext_cuda", CUDA, cuda=True),
        TorchLibrary("flash_ext.lib.libflash_ext_cpu", CPU, source_flags=ISA_FLAGS),
        Extension("flash_ext._plan", [*PLAN, "csrc/plan/bindings.cpp"]),
    ],
    cmdclass={"build_ext": BuildLibraries},
)
