"""Tests over several processes: each is a rank of a group, on a GPU of its own (NCCL) or on the CPU (gloo)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def needs_gpus(device: str, world: int = 2) -> None:
    """Skips where the ranks would have to share a GPU."""
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")


def run_processes(device: str, work: Callable[..., None], *args: Any, world: int = 2) -> None:
    """``work(device, mesh, *args)`` in each of ``world`` processes; an error of any of them is raised here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_start, args=(world, device, port, work, *args), nprocs=world)


def _start(rank: int, world: int, device: str, port: int, work: Callable[..., None], *args: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world)
    try:
        torch.manual_seed(0)
        work(device, init_device_mesh(device, (world,)), *args)
    finally:
        dist.destroy_process_group()
    _leave()


def _leave() -> None:
    """Ends a rank that has done its work, without the interpreter's finalization.

    A group that a cache of DTensor's still holds outlives ``destroy_process_group``, and its worker may only then give
    back the tensors of the last collective. Once Python finalizes, waiting for the GIL there ends in ``std::terminate``
    (pytorch/pytorch#190489): a rank would be aborted now and then although all it had to do was done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
