"""Where figures come from: machine, software, source, command. Nothing that names a person, a host or a folder."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import flash_ext

ROOT = Path(__file__).resolve().parent.parent
PATH_ARGUMENTS = ("--json", "--plot")


def provenance(command: Sequence[str], device: torch.device, peers: dict[str, str]) -> dict[str, Any]:
    """``command``: the module and the arguments that follow ``python -m``; ``peers``: what their names stand for."""
    origin = {
        "command": printable_command(command),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit(),
        "device": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "flash_ext": flash_ext.build_info(),
        "peers": peers,
        "packages": package_versions("triton", "flash_attn", "flash_attn_3"),
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
    return " ".join(words)


def commit() -> str | None:
    """``git describe`` of the sources, or what the libraries were built from, or None."""
    top = output_of("git", "-C", str(ROOT), "rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == ROOT:  # an unpacked archive may lie in somebody else's repository
        return output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    built_from = flash_ext.build_info()["git_commit"]
    return None if built_from is None else str(built_from)


def describe_gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties()
    queried = output_of("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits") or ""
    driver, _, power = queried.partition("\n")[0].partition(",")
    cudnn = torch.backends.cudnn.version()
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size / 2**20,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver.strip() or None,
        "power_limit_w": power.strip() or None,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
    }


def describe_cpu() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    return {"cpu": cpu, "isa": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}


def package_versions(*names: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def output_of(*command: str) -> str | None:
    """What a program prints, or None where there is no such program or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def headline(origin: dict[str, Any]) -> str:
    """The line above the tables."""
    if origin["device"] == "cuda":
        machine = f"{origin['gpu']}, driver {origin['driver']}, CUDA {origin['cuda']}, cuDNN {origin['cudnn']}"
    else:
        machine = f"{origin['cpu']}, {origin['threads']} threads ({origin['isa']})"
    return f"{machine}, torch {origin['torch']}, commit {origin['commit']}, {origin['date']}"
