"""The build_ext command: compiles all libraries by one ninja file and records what they were built with."""

from __future__ import annotations

import fcntl
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from build_support import toolchain
from build_support.ninja_file import Object, SharedLibrary, ninja_text

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"

# Said also to compilers that default to a later x86-64: the libraries run on any, and pick better kernels at run time.
BASELINE_FLAGS = ["-march=x86-64"] if platform.machine() in ("x86_64", "AMD64") else []
CXX_FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-Wall", f"-I{ROOT / 'csrc'}"]
CXX_FLAGS += BASELINE_FLAGS
NVCC_FLAGS = ["-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", f"-I{ROOT / 'csrc'}"]
NVCC_FLAGS += [f"-Xcompiler={flag}" for flag in BASELINE_FLAGS]
# -O1 is for what the host does, which is little beside launches. Kernels are optimised in full whatever it says.
KERNEL_FLAGS = ["-O1", "--expt-relaxed-constexpr", "-Xptxas=-v"]
BUILD_INFO = "_build_info.json"


class TorchLibrary(Extension):
    """A shared library of operators; source_flags adds flags per source. Only csrc/api sees torch's headers."""

    def __init__(
        self, name: str, sources: Sequence[str], source_flags: dict[str, list[str]] | None = None, cuda: bool = False
    ) -> None:
        super().__init__(name, list(sources))
        self.source_flags = source_flags or {}
        self.cuda = cuda


def _api_flags(source: str, extension: TorchLibrary, torch: toolchain.Torch) -> list[str]:
    """Operators are registered for the device of the library, which torch calls its dispatch key."""
    if not source.startswith("csrc/api/"):
        return []
    dispatch_key = f"-DFLASH_EXT_DISPATCH_KEY={'CUDA' if extension.cuda else 'CPU'}"
    return [f"-DTORCH_TARGET_VERSION={toolchain.TORCH_TARGET_VERSION}", dispatch_key, "-isystem", str(torch.include)]


def _torch_link_flags(torch: toolchain.Torch) -> list[str]:
    # libtorch.so alone, even where no symbol of it is used: it brings libtorch_cpu and, where there is one,
    # libtorch_cuda into the scope that the aoti_torch_* symbols are looked up in.
    return [f"-L{torch.lib}", "-Wl,--no-as-needed", "-ltorch"]


def _own_arch_flags(sources: Sequence[str]) -> list[str]:
    """What csrc/api reads: the architectures with kernels of their own in this build, and those that it leaves out."""
    own = {arch for arch in map(toolchain.own_arch, sources) if arch}
    built = own & set(toolchain.archs())
    left_out = [f"-DFLASH_EXT_NO_SM{arch.rstrip('a')}" for arch in sorted(own - built)]
    return [f"-DFLASH_EXT_OWN_ARCHS={'_'.join(sorted(built))}", *left_out]


def _host_object(extension: TorchLibrary, source: str, torch: toolchain.Torch) -> Object:
    return Object(
        ROOT / source, CXX_FLAGS + extension.source_flags.get(source, []) + _api_flags(source, extension, torch)
    )


def _cpu_library(extension: TorchLibrary, output: Path, torch: toolchain.Torch) -> SharedLibrary:
    objects = [_host_object(extension, source, torch) for source in extension.sources]
    return SharedLibrary(output, objects, _torch_link_flags(torch))


def _cuda_library(extension: TorchLibrary, output: Path, torch: toolchain.Torch) -> SharedLibrary:
    flags = [*NVCC_FLAGS, f"-ccbin={toolchain.host_compiler()}"]
    flags += ["-lineinfo"] if toolchain.line_info() else []
    objects = []
    for source in extension.sources:
        own_arch = toolchain.own_arch(source)
        if own_arch and own_arch not in toolchain.archs():
            continue
        if source.endswith(".cpp") and not source.startswith(("csrc/api/cuda", "csrc/kernels/")):
            objects.append(_host_object(extension, source, torch))  # as the other library has it
            continue
        # nvcc compiles C++ too: it hands it to the host compiler and knows where the CUDA headers are.
        if source.endswith(".cu"):
            own = KERNEL_FLAGS + toolchain.gencode_flags([own_arch] if own_arch else toolchain.archs())
        else:
            own = ["-O3", *_api_flags(source, extension, torch), *_own_arch_flags(extension.sources)]
        objects.append(Object(ROOT / source, flags + own + extension.source_flags.get(source, []), nvcc=True))
    link = ["-cudart=static", f"-ccbin={toolchain.host_compiler()}", "-Xlinker=--exclude-libs,ALL"]
    link += [flag.replace("-Wl,", "-Xlinker=", 1) for flag in _torch_link_flags(torch)]
    return SharedLibrary(output, objects, link, nvcc=True)


def _pybind11_headers() -> Path:
    """A copy in the build folder: an isolated build has pybind11 in a folder of its own, another one each time."""
    import pybind11

    kept = BUILD / f"pybind11-{pybind11.__version__}"
    if not kept.exists():
        unfinished = kept.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(pybind11.get_include(), unfinished)
        unfinished.rename(kept)
    return kept


def _plan_module(extension: Extension, output: Path) -> SharedLibrary:
    includes = ["-isystem", sysconfig.get_path("include"), "-isystem", str(_pybind11_headers())]
    binds = "csrc/plan/bindings.cpp"
    objects = [Object(ROOT / s, CXX_FLAGS + (includes if s == binds else [])) for s in extension.sources]
    return SharedLibrary(output, objects, [])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two builds of one folder take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class BuildLibraries(build_ext):
    """Links the libraries in the tree, and for a wheel copies them, stripped, from there.

    Whoever runs ``pip install .`` in a checkout and then Python in the same folder imports the package of the checkout,
    not the installed one: it has to find its libraries too.
    """

    def get_ext_filename(self, fullname: str) -> str:
        parts = fullname.split(".")
        if parts[-1].startswith("lib"):
            return str(Path(*parts).with_suffix(".so"))
        return super().get_ext_filename(fullname)

    def finalize_options(self) -> None:
        """Objects go to one folder, whatever the kind of build: setuptools gives an editable install one in /tmp."""
        chosen = self.build_temp
        super().finalize_options()
        self.build_temp = chosen or str(BUILD / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}")

    def run(self) -> None:
        torch = toolchain.require_torch()
        compiler = toolchain.cxx_version()
        nvcc = toolchain.chosen_nvcc()
        if nvcc is None:
            print(f"flash-ext: no CUDA kernels in this build ({toolchain.missing_nvcc()})")
        else:
            print(f"flash-ext: CUDA kernels for {';'.join(toolchain.archs())} with {nvcc.path} {nvcc.version}")
        with _locked(BUILD):
            self._drop_cuda_library_of_earlier_build(nvcc)
            self._compile(self._libraries(torch, nvcc), nvcc)
            self._write_build_info(torch, compiler, nvcc)
            if not self.inplace:
                self._copy_to_wheel()

    def get_outputs(self) -> list[str]:
        files = [self._path_in_wheel(extension) for extension in self.extensions]
        return [str(path) for path in [*files, self._wheel_folder() / BUILD_INFO] if path.exists()]

    def _path_in_tree(self, extension: Extension) -> Path:
        return ROOT / self.get_ext_filename(extension.name)

    def _path_in_wheel(self, extension: Extension) -> Path:
        return Path(self.build_lib) / self.get_ext_filename(extension.name)

    def _wheel_folder(self) -> Path:
        return Path(self.build_lib) / "flash_ext"

    def _libraries(self, torch: toolchain.Torch, nvcc: toolchain.Nvcc | None) -> list[SharedLibrary]:
        libraries = []
        for extension in self.extensions:
            output = self._path_in_tree(extension)
            if not isinstance(extension, TorchLibrary):
                libraries.append(_plan_module(extension, output))
            elif not extension.cuda:
                libraries.append(_cpu_library(extension, output, torch))
            elif nvcc is not None:
                libraries.append(_cuda_library(extension, output, torch))
        return libraries

    def _drop_cuda_library_of_earlier_build(self, nvcc: toolchain.Nvcc | None) -> None:
        for extension in self.extensions:
            if isinstance(extension, TorchLibrary) and extension.cuda:
                self._path_in_wheel(extension).unlink(missing_ok=True)
                if nvcc is None:
                    self._path_in_tree(extension).unlink(missing_ok=True)

    def _compile(self, libraries: list[SharedLibrary], nvcc: toolchain.Nvcc | None) -> None:
        build_dir = Path(self.build_temp).absolute()
        build_dir.mkdir(parents=True, exist_ok=True)
        ninja_file = build_dir / "build.ninja"
        ninja_file.write_text(ninja_text(libraries, build_dir, ROOT, toolchain.cxx(), str(nvcc.path) if nvcc else None))
        # -k 0: one broken library does not keep the others from being built.
        command = [toolchain.ninja(), "-f", str(ninja_file), "-j", str(toolchain.jobs()), "-k", "0"]
        if subprocess.run(command).returncode:
            raise toolchain.BuildError("the build failed, see the compiler's messages above")

    def _copy_to_wheel(self) -> None:
        strip = shutil.which("strip")
        for extension in self.extensions:
            source, target = self._path_in_tree(extension), self._path_in_wheel(extension)
            if not source.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            if strip:
                subprocess.run([strip, str(target)], check=True)
        shutil.copyfile(ROOT / "flash_ext" / BUILD_INFO, self._wheel_folder() / BUILD_INFO)

    def _write_build_info(self, torch: toolchain.Torch, compiler: str, nvcc: toolchain.Nvcc | None) -> None:
        info = {
            "version": self.distribution.get_version(),
            "git_commit": toolchain.git_commit(ROOT),
            "python": platform.python_version(),
            "compiler": compiler,
            "torch_headers": torch.version,
            "torch_target": ".".join(map(str, toolchain.MINIMUM_TORCH)),
            "cpu_isas": self._cpu_isas(),
            "nvcc": nvcc and nvcc.version,
            "cuda_archs": toolchain.archs() if nvcc else [],
        }
        (ROOT / "flash_ext" / BUILD_INFO).write_text(json.dumps(info, indent=2) + "\n")

    def _cpu_isas(self) -> list[str]:
        sources = [Path(source).stem for extension in self.extensions for source in extension.sources]
        return [stem.removeprefix("isa_") for stem in sources if stem.startswith("isa_")]
