"""The option kernels of the Hopper backward: those in the library are those that some call reaches."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import flash_ext

SOURCES = Path(__file__).resolve().parents[2] / "csrc"

# Every call there can be, by the header that the launches and the plan decide with: "head_dim loop options".
ENUMERATE = """
#include <cstdio>
#include "kernels/sm90/common/backward/variant.h"
using namespace flash_ext::sm90;
int main() {
  for (int call = 0; call < 1 << 11; ++call) {
    const auto has = [&](int bit) { return (call >> bit & 1) != 0; };
    const bool blocks = has(10);
    const BackwardAsked asked = {has(0), has(1), has(2), has(3), has(4), has(5), has(6), has(7), has(8), has(9)};
    if ((blocks && !asked.masks) || (asked.mask_of_keys && asked.masks) || (asked.large_softcap && !asked.softcap))
      continue;
    if (!asked.bias && (asked.bias_of_keys || asked.bias_by_panels || asked.bias_dtype_of_inputs)) continue;
    const int options = serving_options(asked);
    if (options == 0) continue;
    std::printf("64 %s %d\\n", persists(options) && !blocks ? "persistent" : "own", options);
    std::printf("128 %s %d\\n", pipelines(options, blocks) ? "pipelined" : "own", options);
  }
}
"""

NAMES = {
    "own": r"BackwardOptionsConfigINS0_25BackwardUnpipelinedConfigI{dtype}Li{head_dim}EEELi(n?\d+)E",
    "pipelined": r"BackwardPipelinedOptionsConfigI{dtype}Li{head_dim}ELi(n?\d+)E",
    "persistent": r"BackwardPersistentOptionsConfigI{dtype}Li{head_dim}ELi(n?\d+)E",
}


@pytest.fixture(scope="module")
def reachable(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[int, str, int]]:
    """Head_dim, loop and options."""
    compiler = shutil.which("g++")
    if compiler is None or not SOURCES.is_dir():
        pytest.skip("needs the checkout and a compiler")
    folder = tmp_path_factory.mktemp("variants")
    (folder / "calls.cpp").write_text(ENUMERATE)
    subprocess.run([compiler, "-std=c++17", f"-I{SOURCES}", "calls.cpp", "-o", "calls"], cwd=folder, check=True)
    lines = subprocess.run([folder / "calls"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {(int(head_dim), loop, int(options)) for head_dim, loop, options in map(str.split, lines)}


@pytest.fixture(scope="module")
def library() -> bytes:
    path = Path(flash_ext.__file__).parent / "lib" / "libflash_ext_cuda.so"
    if not path.exists() or "90a" not in flash_ext.build_info()["cuda_archs"]:
        pytest.skip("needs the library with kernels for Hopper")
    return path.read_bytes()


@pytest.mark.parametrize("dtype", ["13__nv_bfloat16", "6__half"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_option_kernel_is_reached_and_no_other_is_built(
    reachable: set[tuple[int, str, int]], library: bytes, dtype: str, head_dim: int
) -> None:
    found = {
        (head_dim, loop, int(options.replace(b"n", b"-")))
        for loop, name in NAMES.items()
        for options in re.findall(name.format(dtype=dtype, head_dim=head_dim).encode(), library)
    }
    assert found == {kernel for kernel in reachable if kernel[0] == head_dim}
