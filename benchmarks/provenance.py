"""Where figures come from: machine, software, source, command. Nothing that names a person, a host or a folder."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import flash_ext
from benchmarks.gpu_state import query_gpu
from benchmarks.origins import COMMIT_DIGITS, cudnn_version, torch_origin
from benchmarks.peers import Peer
from benchmarks.programs import output_of
from benchmarks.timing import Effort

ROOT = Path(__file__).resolve().parent.parent
PATH_ARGUMENTS = ("--json", "--plot")
ENVIRONMENT = "FLASH_EXT_"  # what begins so chooses kernels and checks
SOURCES = ("csrc", "flash_ext")  # of what is measured
BUILT_SOURCES = ("csrc", "setup.py", "build_support")  # of the libraries
RECORD_ROUNDS = 12  # at least, of every candidate


def provenance(
    command: Sequence[str],
    device: torch.device,
    peers: Mapping[str, Peer],
    titles: Mapping[str, str],
    effort: Effort,
    trial: bool,
    packages: Sequence[str] = (),
) -> dict[str, Any]:
    """What a record says of itself.

    Args:
        command: the module and the arguments that follow ``python -m``.
        peers: who was asked to take part.
        titles: of others that the benchmark brings itself.
        trial: the run is no record, whatever the reason.
        packages: distributions that the benchmark itself uses, whose versions are kept.
    """
    origin = {
        "command": printable_command(command),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit(),
        "device": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_commit": torch_origin()["commit"],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "flash_ext": flash_ext.build_info(),
        "environment": environment(),
        "trial": trial,
        "rounds": {"fewest": effort.fewest, "most": effort.most},
        "peers": {**{name: peer.title for name, peer in peers.items()}, **titles},
        "peer_origins": {name: dict(peer.origin) for name, peer in peers.items()},
        "packages": package_versions("triton", "flash_attn", "flash_attn_3", *packages),
    }
    return origin | (describe_gpu() if device.type == "cuda" else describe_cpu())


def printable_command(command: Sequence[str]) -> str:
    """The command, files named without their folders."""
    words = ["python", "-m"]
    for before, word in zip(("", *command), command, strict=False):
        option, equals, value = word.partition("=")
        if before in PATH_ARGUMENTS:
            words.append(Path(word).name)
        elif option in PATH_ARGUMENTS and equals:
            words.append(f"{option}={Path(value).name}")
        else:
            words.append(word)
    return shlex.join(words)


def environment() -> dict[str, str]:
    """Variables that change what runs; of a path its last part."""
    found = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    return {name: Path(value).name if os.sep in value else value for name, value in sorted(found.items())}


def commit() -> str | None:
    """``git describe`` of the sources, or what the libraries were built from, or None."""
    if in_checkout():
        return output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", f"--abbrev={COMMIT_DIGITS}")
    built_from = flash_ext.build_info()["git_commit"]
    return None if built_from is None else str(built_from)


def in_checkout() -> bool:
    """Whether the sources lie in their own repository: an unpacked archive may lie in somebody else's."""
    top = output_of("git", "-C", str(ROOT), "rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == ROOT


def why_no_record(effort: Effort) -> str | None:
    """Why nobody could repeat this run, or rely on it; None: it can be a record."""
    if effort.fewest < RECORD_ROUNDS:
        return f"{effort.fewest} rounds are fewer than {RECORD_ROUNDS}"
    found, built_from = commit(), flash_ext.build_info()["git_commit"]
    for what, name in (("the sources", found), ("the libraries", built_from)):
        if name is None:
            return f"nobody knows which commit {what} are from"
        if name.endswith("dirty"):
            return f"{what} differ from their commit ({name})"
    if in_checkout():
        git = ("git", "-C", str(ROOT))
        if untracked := output_of(*git, "ls-files", "--others", "--exclude-standard", *SOURCES):
            return f"no commit holds {untracked.splitlines()[0]}"
        if output_of(*git, "diff", "--quiet", built_from, "HEAD", "--", *BUILT_SOURCES) is None:
            return f"the libraries were built from {built_from[:COMMIT_DIGITS]}, whose sources are others: build again"
    return None


def describe_gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties()
    queried = query_gpu(["driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem"])
    driver, power, sm_clock, memory_clock = queried or (None,) * 4
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size / 2**20,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver,
        "power_limit_w": power,
        "max_sm_clock_mhz": sm_clock,
        "max_memory_clock_mhz": memory_clock,
        "cuda": torch.version.cuda,
        "cudnn": cudnn_version(),
    }


def describe_cpu() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    return {"cpu": cpu, "isa": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}


def load_average() -> float | None:
    """Of the last minute: what else the machine has to do, where it is asked before a run."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def package_versions(*names: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def headline(origin: dict[str, Any]) -> str:
    """The line above the tables."""
    if origin["device"] == "cuda":
        machine = f"{origin['gpu']}, driver {origin['driver']}, CUDA {origin['cuda']}, cuDNN {origin['cudnn']}"
    else:
        load = f", load {origin['load_average']} before" if origin.get("load_average") is not None else ""
        machine = f"{origin['cpu']}, {origin['threads']} threads ({origin['isa']}){load}"
    return f"{machine}, torch {origin['torch']}, commit {origin['commit']}, {origin['date']}"
