"""What the build needs from the machine: torch's headers, a C++ compiler, nvcc, ninja. Nothing here imports torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The stable ABI that the libraries are compiled for. Any torch from here on has the headers and loads the result.
MINIMUM_TORCH = (2, 10)
TORCH_TARGET_VERSION = "0x020a000000000000"

MINIMUM_CUDA = (12, 4)

KERNELS = Path(__file__).resolve().parent.parent / "csrc" / "kernels"
ARCH_OF_ALL = "80"  # runs on Ampere and Ada, and as PTX on everything after

CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")

_FIND_TORCH = """
import importlib.util, json
spec = importlib.util.find_spec("torch")
print(json.dumps(list(spec.submodule_search_locations or []) if spec else []))
"""


class BuildError(SystemExit):
    """The build cannot go on. The message, without a traceback around it, says what to install or to change."""

    def __init__(self, message: str) -> None:
        super().__init__(f"flash-ext: {message}")


@dataclass(frozen=True)
class Torch:
    root: Path
    version: str

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def lib(self) -> Path:
        return self.root / "lib"


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: str


def _run(command: list[str], env: Mapping[str, str] | None = None) -> str | None:
    """Standard output, or None where the command is missing or fails."""
    try:
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _read_torch(root: Path) -> Torch | None:
    """The torch installed at root, or None where it has no headers of the stable ABI."""
    header = root / "include" / "torch" / "headeronly" / "version.h"
    if not header.is_file():
        return None
    match = re.search(r'TORCH_VERSION\s*\\?\s*"([^"]+)"', header.read_text())
    if match is None:
        return None
    torch = Torch(root, match[1])
    major, minor = (int(part) for part in torch.version.split(".")[:2])
    return torch if (major, minor) >= MINIMUM_TORCH else None


def _torch_seen_by(python: str) -> Torch | None:
    # An isolated build puts its own environment on PYTHONPATH, in front of the one that is installed into, and hides
    # the user's site-packages.
    isolation = ("PYTHONPATH", "PYTHONNOUSERSITE")
    env = {name: value for name, value in os.environ.items() if name not in isolation}
    for root in json.loads(_run([python, "-c", _FIND_TORCH], env) or "[]"):
        if (torch := _read_torch(Path(root))) is not None:
            return torch
    return None


def find_torch() -> Torch | None:
    """A torch with the headers we need: this process's own, else that of the environment being installed into."""
    for entry in sys.path:
        if (torch := _read_torch(Path(entry or ".") / "torch")) is not None:
            return torch
    pythons = [sys.executable]
    if environment := os.environ.get("VIRTUAL_ENV"):
        pythons.append(str(Path(environment) / "bin" / "python"))
    return next((torch for python in pythons if (torch := _torch_seen_by(python)) is not None), None)


def require_torch() -> Torch:
    torch = find_torch()
    if torch is None:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        raise BuildError(f"building flash-ext needs the headers of torch >= {wanted}: pip install 'torch>={wanted}'")
    return torch


def cxx() -> list[str]:
    """The C++ compiler's command: CXX, which may hold arguments as in 'ccache g++ -m64', or the system's compiler."""
    try:
        command = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX is '{os.environ['CXX']}', which is no command: {error}") from None
    return command or [shutil.which("g++") or shutil.which("c++") or "c++"]


def host_compiler() -> str:
    """What nvcc calls: the compiler of cxx() without the launcher before it and the options behind it."""
    command = cxx()
    options = [position for position, word in enumerate(command) if position and word.startswith("-")]
    return command[options[0] - 1 if options else -1]


def cxx_version() -> str:
    output = _run([*cxx(), "--version"])
    if output is None:
        raise BuildError(
            f"building flash-ext needs a C++17 compiler; '{shlex.join(cxx())}' does not run "
            "(apt install g++, or set CXX)"
        )
    return output.splitlines()[0]


def compiles(source: str, flags: list[str]) -> bool:
    """Whether the compiler and its assembler can do that with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.cpp"
        file.write_text(source)
        return _run([*cxx(), *flags, "-c", str(file), "-o", str(file.with_suffix(".o"))]) is not None


def ninja() -> str:
    if found := shutil.which("ninja"):
        return found
    try:
        from ninja import BIN_DIR
    except ImportError:
        raise BuildError("building flash-ext needs ninja: pip install ninja") from None
    return str(Path(BIN_DIR) / "ninja")


def _found_nvccs() -> list[Nvcc]:
    """Every nvcc of CUDA_HOME, CUDA_PATH and PATH, in this order, of whatever version."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    paths = [home / "bin" / "nvcc" for home in homes]
    if found := shutil.which("nvcc"):
        paths.append(Path(found))
    nvccs = []
    for path in paths:
        match = re.search(r"\bV(\d+\.\d+\.\d+)", _run([str(path), "--version"]) or "")
        if match:
            nvccs.append(Nvcc(path, match[1]))
    return nvccs


def _is_recent(nvcc: Nvcc) -> bool:
    return tuple(int(part) for part in nvcc.version.split(".")[:2]) >= MINIMUM_CUDA


def find_nvcc() -> Nvcc | None:
    return next((nvcc for nvcc in _found_nvccs() if _is_recent(nvcc)), None)


def missing_nvcc() -> str:
    """Why chosen_nvcc() is None, or would be without the error."""
    if os.environ.get("FLASH_EXT_CUDA") == "0":
        return "FLASH_EXT_CUDA=0"
    wanted = ".".join(map(str, MINIMUM_CUDA))
    outdated = [f"{nvcc.path} is {nvcc.version}" for nvcc in _found_nvccs()]
    found = f": {', '.join(outdated)}" if outdated else ""
    return f"no nvcc {wanted} or later in CUDA_HOME or on PATH{found}"


def chosen_nvcc() -> Nvcc | None:
    """nvcc, or None for a build without CUDA; FLASH_EXT_CUDA=0 or 1 decides where it is set."""
    wanted = os.environ.get("FLASH_EXT_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise BuildError(f"FLASH_EXT_CUDA is '{wanted}'; it may be 0 (no CUDA), 1 (CUDA or an error) or unset")
    nvcc = None if wanted == "0" else find_nvcc()
    if nvcc is None and wanted == "1":
        raise BuildError(
            f"FLASH_EXT_CUDA=1, but there is {missing_nvcc()}; install the CUDA toolkit and set CUDA_HOME to its folder"
        )
    return nvcc


def _listed(name: str, default: str) -> list[str]:
    values = [value.strip() for value in os.environ.get(name, "").replace(",", ";").split(";") if value.strip()]
    return values or default.split(";")


def own_arch(source: str) -> str | None:
    """The only architecture that a source of csrc/kernels is compiled for: sm90's instructions belong to 90a alone.

    None of sources that are for all architectures, those in sm80 among them.
    """
    match = re.match(r"csrc/kernels/sm(\d+)/", source)
    return f"{match[1]}a" if match and match[1] != ARCH_OF_ALL else None


def default_archs() -> list[str]:
    """Those that csrc/kernels has folders for: ['90a', '80']."""
    own = {arch for folder in KERNELS.iterdir() if (arch := own_arch(f"csrc/kernels/{folder.name}/"))}
    return [*sorted(own), ARCH_OF_ALL]


def archs() -> list[str]:
    """FLASH_EXT_ARCHS, such as ['90a', '80']."""
    values = _listed("FLASH_EXT_ARCHS", ";".join(default_archs()))
    for value in values:
        if not re.fullmatch(r"\d{2,3}[af]?", value) or int(value.rstrip("af")) < 80:
            raise BuildError(f"FLASH_EXT_ARCHS has '{value}'; allowed are architectures from 80 on, such as '90a;80'")
    return values


def line_info() -> bool:
    """FLASH_EXT_LINE_INFO=1: profilers show lines of the kernels' sources, for a twelfth more of the build's time."""
    value = os.environ.get("FLASH_EXT_LINE_INFO", "")
    if value not in ("", "0", "1"):
        raise BuildError(f"FLASH_EXT_LINE_INFO is '{value}'; it may be 0, 1 or unset")
    return value == "1"


def gencode_flags(values: list[str]) -> list[str]:
    """Machine code for each architecture, and PTX of the newest one whose PTX runs on later GPUs."""
    portable = [int(value) for value in values if value.isdecimal()]
    flags = []
    for value in values:
        code = f"sm_{value}"
        if portable and value == str(max(portable)):
            code = f"[{code},compute_{value}]"
        flags.append(f"-gencode=arch=compute_{value},code={code}")
    return flags


def _memory() -> int:
    """Bytes of memory: the machine's, or less where the container has a limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_MEMORY_LIMIT.read_text().strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdecimal() else memory


def jobs() -> int:
    """MAX_JOBS, or one per core as far as memory allows for it: one kernel's compilation may take 3 GB."""
    if wanted := os.environ.get("MAX_JOBS"):
        try:
            return max(1, int(wanted))
        except ValueError:
            raise BuildError(f"MAX_JOBS is '{wanted}'; it may be an integer, as in '4', or unset") from None
    return max(1, min(len(os.sched_getaffinity(0)), _memory() // (3 << 30)))


def git_commit(root: Path) -> str | None:
    """The commit of a checkout, marked '+dirty' where files differ from it; None outside of one."""
    if not (root / ".git").exists():
        return None
    commit = _run(["git", "-C", str(root), "rev-parse", "HEAD"])
    changed = _run(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return commit and (f"{commit}+dirty" if changed else commit)
