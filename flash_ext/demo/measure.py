"""Time and peak memory of causal attention, forward and backward, at growing sequence length.

On a CPU each implementation runs in a process of its own, because the peak that counts is the process's: it includes
what a kernel allocates behind torch's back, and never shrinks. ``python -m flash_ext.demo.measure``, which loads torch
but starts none of its threads, forks them.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext

HEADS, HEAD_DIM = 4, 64
REPEATS = 3
WARM_UP_SEQLEN = 64
UNFUSED_LIMIT = 4096  # the longest sequence that is worth the quadratic memory


@dataclass(frozen=True)
class Measurement:
    """Median seconds of forward and of backward, and the bytes at the peak, inputs and gradients included."""

    seqlen: int
    forward: float
    backward: float
    peak: int


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flash_ext.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's, which wants (batch, heads, seqlen, head_dim): the views cost nothing."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Vaswani et al. 2017, equation 1, one operation at a time."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / HEAD_DIM**0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "flash_ext": ours,
    "SDPA": sdpa,
    "unfused": unfused,
}


def measure(seqlens: list[int], device: torch.device) -> dict[str, list[Measurement]]:
    """Measures all ``IMPLEMENTATIONS`` at each length."""
    if device.type != "cpu":
        return {name: measure_here(name, seqlens, device) for name in IMPLEMENTATIONS}
    command = [sys.executable, "-m", "flash_ext.demo.measure", str(torch.get_num_threads()), *map(str, seqlens)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {name: [Measurement(*row) for row in rows] for name, rows in json.loads(output).items()}


def measure_here(name: str, seqlens: list[int], device: torch.device) -> list[Measurement]:
    if name == "unfused":
        seqlens = [seqlen for seqlen in seqlens if seqlen <= UNFUSED_LIMIT]
    attend = IMPLEMENTATIONS[name]
    run(attend, WARM_UP_SEQLEN, device)
    start = occupied(device)
    # In this order the peak of each length is above that of the lengths before it.
    return [measure_one(attend, seqlen, start, device) for seqlen in sorted(seqlens)]


def measure_one(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], seqlen: int, start: int, device: torch.device
) -> Measurement:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = [run(attend, seqlen, device) for _ in range(REPEATS)]
    forward, backward = (sorted(column)[REPEATS // 2] for column in zip(*times, strict=True))
    return Measurement(seqlen, forward, backward, peak(device) - start)


def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor], seqlen: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    generator = torch.Generator(device).manual_seed(seqlen)
    shape = (1, seqlen, HEADS, HEAD_DIM)
    q, k, v, grad = (torch.randn(shape, device=device, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    begin = now(device)
    out = attend(*leaves)
    middle = now(device)
    torch.autograd.grad(out, leaves, grad)
    return middle - begin, now(device) - middle


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def occupied(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident("VmRSS")


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(field: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at the most (VmHWM)."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(rf"{field}:\s+(\d+) kB", status.read_text())
        assert found is not None, f"/proc/self/status has no {field}"
        return int(found[1]) * 1024
    # Elsewhere only the peak is to be had; macOS counts it in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(num_threads: int, *seqlens: int) -> None:
    """Prints as JSON what ``measure`` returns."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1, torch.set_num_threads, (num_threads,), maxtasksperchild=1) as pool:
        calls = [(name, list(seqlens), torch.device("cpu")) for name in IMPLEMENTATIONS]
        results = pool.starmap(measure_here, calls, chunksize=1)
    rows = [[astuple(measurement) for measurement in measurements] for measurements in results]
    print(json.dumps(dict(zip(IMPLEMENTATIONS, rows, strict=True))))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
