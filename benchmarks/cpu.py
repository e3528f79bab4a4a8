"""How fast is attention on a CPU beside torch's own?    python -m benchmarks.cpu [--threads N] [--json FILE]

Forward and backward of ``flash_ext.attention`` and of ``F.scaled_dot_product_attention`` take turns in one process, on
the same tensors, random normal; each figure is the median of the rounds. Results are compared before they are timed.
FLOPs: 4 batch heads seqlen^2 head_dim forward, half of it for causal, backward 2.5 times that.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import flash_ext

SHAPES = [(1, 2048, 8, 64), (4, 512, 8, 64), (1, 2048, 8, 128)]  # batch, seqlen, heads, head_dim
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}


def measure(shape: tuple[int, int, int, int], dtype: torch.dtype, causal: bool, rounds: int) -> dict[str, Any]:
    """Median milliseconds of both, forward without gradient and backward alone."""
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=dtype)

    def ours() -> Tensor:
        return flash_ext.attention(q, k, v, causal=causal)

    def sdpa() -> Tensor:
        swapped = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*swapped, is_causal=causal).transpose(1, 2)

    outs = {"flash_ext": ours(), "sdpa": sdpa()}
    gradients = [torch.autograd.grad(out, (q, k, v), grad, retain_graph=True) for out in outs.values()]
    for mine, theirs in zip((outs["flash_ext"], *gradients[0]), (outs["sdpa"], *gradients[1]), strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    def backward(out: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    with torch.no_grad():
        forward_ms = take_turns({"flash_ext": ours, "sdpa": sdpa}, rounds)
    backward_ms = take_turns({name: backward(out) for name, out in outs.items()}, rounds)
    return {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "causal": causal,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
    }


def take_turns(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(times[1:]) for name, times in seconds.items()}


def row(result: dict[str, Any]) -> str:
    batch, seqlen, heads, head_dim = result["shape"]
    flops = 4 * batch * heads * seqlen**2 * head_dim / (2 if result["causal"] else 1)
    cells = [f"{batch} x {seqlen} x {heads} x {head_dim}", result["dtype"], "causal" if result["causal"] else "full"]
    for direction, factor in (("forward_ms", 1.0), ("backward_ms", 2.5)):
        mine, theirs = result[direction]["flash_ext"], result[direction]["sdpa"]
        cells += [f"{mine:.1f}", f"{theirs:.1f}", f"{theirs / mine:.2f}", f"{factor * flops / mine / 1e6:.0f}"]
    return "| " + " | ".join(cells) + " |"


def provenance(threads: int) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    return {
        "command": "python -m benchmarks.cpu " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "cpu": cpu,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "torch": torch.__version__,
        "flash_ext": flash_ext.build_info(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    problems = [(shape, dtype, causal) for dtype in DTYPES for shape in SHAPES for causal in (False, True)]
    results = [measure(*problem, options.rounds) for problem in tqdm(problems)]
    origin = provenance(options.threads)
    print(
        f"{origin['cpu']}, {options.threads} threads, torch {origin['torch']} ({origin['torch_isa']}), {origin['date']}"
    )
    print("| batch x seqlen x heads x head_dim | dtype | mask | forward ms | SDPA | ratio | GFLOP/s ", end="")
    print("| backward ms | SDPA | ratio | GFLOP/s |")
    print("|---" * 11 + "|")
    for result in results:
        print(row(result))
    if options.json is not None:
        options.json.write_text(json.dumps({**origin, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
