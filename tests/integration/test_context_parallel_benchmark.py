"""``benchmarks.context_parallel``, as each of its processes runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def benchmark_of(device: str) -> dict[str, Any]:
    """What ``benchmarks.context_parallel`` does in each of its processes."""
    from benchmarks import context_parallel

    sizes = ["--seqlen", "64", "--heads", "2", "--head-dim", "16", "--dtype", "float32", "--rounds", "1"]
    how = ["--device", device, "--ranks", "2", "--methods", "ring", "gather"]
    chosen = context_parallel.make_parser().parse_args([*sizes, *how])
    here = torch.device(device, dist.get_rank()) if device == "cuda" else torch.device(device)
    for method in chosen.methods:
        context_parallel.check(context_parallel.problem_of(chosen, 64), method, here)
    row = context_parallel.measure(context_parallel.problem_of(chosen, 64), chosen, here)
    context_parallel.add_rates([row])
    return {"measured": row.measured, "figures": row.figures}


def test_benchmark(pools: Any, device: str) -> None:
    row = pools(2, device).run(benchmark_of)
    assert set(row["measured"]) == {"flash_ext", "flash_ext, gather", "flash_ext, one"}
    assert row["figures"]["x one"] > 0 and row["figures"]["x one at 64"] > 0
