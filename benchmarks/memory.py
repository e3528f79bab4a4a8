"""``memory``: MiB at the peak of a forward or a backward, inputs not counted, as the sequence grows.

On a GPU it is what torch's allocator had handed out at the most. On a CPU, of Linux, it is the most memory that the
process occupied, after the heap was given back to the system.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import dtypes_of, on_cpu, positive
from benchmarks.ceilings import name_of
from benchmarks.checks import Expected
from benchmarks.comparison import Setting, Work, first_line
from benchmarks.forward_backward import Problem, make_call, obstacle
from benchmarks.option_calls import cannot
from benchmarks.peers import OURS, Peer, ours
from benchmarks.report import Row
from benchmarks.timing import finish
from tests.oracle import Call

SEQLENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
CPU_SEQLENS = (512, 1024, 2048)
HEADS, HEAD_DIM = 16, 64
CHECKED_SEQLEN = 1024  # outputs are checked up to here: what is measured is not their speed
MEBIBYTE, PAGE = 2**20, 4096


def unfused(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Vaswani et al. 2017, equation 1, one operation at a time."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


UNFUSED_NAME = "unfused"
UNFUSED = Peer(
    "plain PyTorch, one operation at a time", unfused, lambda step: cannot("is not asked to decode"), stores_scores=True
)


@dataclass(frozen=True)
class Peak:
    """Bytes above what was occupied at the start."""

    forward: int
    backward: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=positive, nargs="+", metavar="N", help="default: 1024 ... 65536")
    parser.add_argument("--heads", type=positive, default=HEADS, help="(%(default)s)")
    parser.add_argument("--head-dim", type=positive, default=HEAD_DIM, help="(%(default)s)")


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    seqlens = chosen.seqlen or (CPU_SEQLENS if on_cpu(chosen) else SEQLENS[:: 2 if chosen.quick else 1])
    return [
        partial(measure, Problem(1, seqlen, chosen.heads, chosen.heads, chosen.head_dim, True, name_of(dtype)), setting)
        for dtype in dtypes_of(chosen)
        for seqlen in seqlens
    ]


def measure(problem: Problem, setting: Setting) -> list[Row]:
    """A row for forward and one for forward and backward."""
    found: dict[str, Peak] = {}
    missing: dict[str, str] = {}
    for name, peer in {OURS: ours(), **setting.peers, UNFUSED_NAME: UNFUSED}.items():
        call = make_call(problem, setting.device, with_gradients=True)
        reason = obstacle(name, peer, call, ["forward", "backward"])
        # A GPU that runs out of memory says so; a CPU makes the system end the process.
        if reason and (name == OURS or setting.device.type == "cpu"):
            missing[name] = reason
            continue
        try:
            found[name] = peak_of(peer, call, setting.device)
        except RuntimeError as error:
            if name == OURS:
                raise
            missing[name] = first_line(error)
    return [
        Row(
            table=f"{direction}, {problem.heading}",
            label=f"{problem.seqlen}",
            problem={**asdict(problem), "direction": direction},
            measured={name: max(peak, PAGE) / MEBIBYTE for name, peak in peaks.items()},
            missing=missing,
        )
        for direction, peaks in (
            ("forward", {name: peak.forward for name, peak in found.items()}),
            ("forward and backward", {name: peak.backward for name, peak in found.items()}),
        )
    ]


def peak_of(peer: Peer, call: Call, device: torch.device) -> Peak:
    leaves = (call.q, call.k, call.v)

    def forward() -> Tensor:
        with torch.no_grad():
            return peer.attention(*leaves, bool(call.options["causal"]))

    def both() -> tuple[Tensor, ...]:
        out = peer.attention(*leaves, bool(call.options["causal"]))
        return torch.autograd.grad(out, leaves, call.grad_out)

    with peer.around():
        check(peer, call)
        return Peak(growth(forward, device), growth(both, device))


def check(peer: Peer, call: Call) -> None:
    if call.q.shape[1] > CHECKED_SEQLEN:
        return
    out = peer.attention(call.q, call.k, call.v, bool(call.options["causal"]))
    gradients = torch.autograd.grad(out, (call.q, call.k, call.v), call.grad_out)
    result = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
    Expected(call, ("q", "k", "v")).check(peer.title, result)


def growth(function: Callable[[], object], device: torch.device) -> int:
    """Bytes at the peak of the call, above those before it."""
    gc.collect()
    finish(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return int(torch.cuda.max_memory_allocated(device) - before)
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets the peak
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def trim_heap() -> None:
    """glibc keeps what is freed, and would answer the next call from it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def resident(field: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at the most (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024
