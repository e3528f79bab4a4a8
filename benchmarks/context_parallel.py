"""How much faster several GPUs of one machine are at a long sequence than one of them: forward and backward, causal.

python -m benchmarks.context_parallel                          on all GPUs that there are, 65536 to 524288 tokens
python -m benchmarks.context_parallel --ranks 2 --methods ring gather --seqlen 131072 --json run.json

Each rank has a zigzag shard. A step is timed on every rank from a barrier on, and the slowest counts; the figure is the
median of the rounds. In each round one GPU also computes the same problem whole, in the same processes, while the
others wait. Outputs and gradients of all ranks together are held against the oracle first, at a short length. FLOPs are
those of ``forward_backward``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import flash_ext
from benchmarks import report
from benchmarks.arguments import DTYPES, check_files, positive
from benchmarks.checks import Expected
from benchmarks.forward_backward import Problem, make_call
from benchmarks.gpu_state import GpuState
from benchmarks.peers import OURS
from benchmarks.provenance import RECORD_ROUNDS, provenance
from benchmarks.timing import Effort, Sample, Timings
from flash_ext.integrations.distributed import (
    Layout,
    Method,
    context_parallel_attention,
    join_sequence,
    split_sequence,
)

SEQLENS, CPU_SEQLENS = (65536, 131072, 262144, 524288), (512,)
CHECKED_SEQLEN = 1024
WARM_UP = 2
ALONE = f"{OURS}, one"
LAYOUT: Layout = "zigzag"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    check_files(parser, chosen, effort_of(chosen))
    if chosen.device == "cuda" and torch.cuda.device_count() < chosen.ranks:
        parser.error(f"argument --ranks: must be at most the number of GPUs, {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, args=(chosen, arguments, str(Path(folder) / "store")), nprocs=chosen.ranks)
    return 0


def make_parser() -> argparse.ArgumentParser:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--ranks", type=positive, default=max(2, torch.cuda.device_count()), help="(%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=("ring", "gather", "ulysses"), default=["ring"])
    parser.add_argument("--seqlen", type=positive, nargs="+", metavar="N", help="default: 65536 ... 524288")
    parser.add_argument("--heads", type=positive, default=16, help="(%(default)s)")
    parser.add_argument("--heads-kv", type=positive, help="default: as many")
    parser.add_argument("--head-dim", type=positive, default=128, help="(%(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--rounds", type=positive, default=RECORD_ROUNDS, help="(%(default)s)")
    parser.add_argument("--alone-up-to", type=positive, metavar="N", help="longest sequence for one GPU; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the run here, if it can be a record")
    parser.add_argument("--trial", action="store_true", help="keep it although it is none: uncommitted, or few rounds")
    return parser


def effort_of(chosen: argparse.Namespace) -> Effort:
    """As many rounds as asked for, however long they take: all ranks have to agree on them."""
    return Effort(most=chosen.rounds, fewest=chosen.rounds, budget_ms=0)


def run(rank: int, chosen: argparse.Namespace, arguments: Sequence[str], store: str) -> None:
    """One process."""
    device = torch.device(chosen.device, rank) if chosen.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=chosen.ranks)
    for method in chosen.methods:
        check(problem_of(chosen, CHECKED_SEQLEN), method, device)
    seqlens = chosen.seqlen or (CPU_SEQLENS if device.type == "cpu" else SEQLENS)
    with GpuState(device if rank == 0 else torch.device("cpu")) as state:
        rows = [measure(problem_of(chosen, seqlen), chosen, device) for seqlen in seqlens]
    dist.destroy_process_group()
    if rank > 0:
        return
    add_rates(rows)
    command = ["benchmarks.context_parallel", *arguments]
    origin = provenance(command, device, {}, {}, effort_of(chosen), chosen.trial)
    origin |= {"ranks": chosen.ranks, "backend": name_of_backend(backend), "gpu_state": state.summary()}
    record = report.Record("context_parallel", "ms", "TFLOP/s", "seqlen", origin, {}, rows)
    print(report.markdown(record))
    if chosen.json is not None:
        record.write(chosen.json)


def name_of_backend(backend: str) -> str:
    if backend != "nccl":
        return backend
    return f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"


def problem_of(chosen: argparse.Namespace, seqlen: int) -> Problem:
    return Problem(1, seqlen, chosen.heads, chosen.heads_kv or chosen.heads, chosen.head_dim, True, chosen.dtype)


def shard_of(problem: Problem, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of out, of this rank."""
    rows = problem.seqlen // dist.get_world_size()
    heads = (problem.heads_q, problem.heads_kv, problem.heads_kv, problem.heads_q)
    tensors = [
        torch.randn(1, rows, n, problem.head_dim, device=device).to(DTYPES[problem.dtype]).requires_grad_()
        for n in heads
    ]
    return [*tensors[:3], tensors[3].detach()]


def step_of(method: Method, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    out = context_parallel_attention(q, k, v, None, layout=LAYOUT, method=method, causal=True)
    assert isinstance(out, Tensor)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)


def check(problem: Problem, method: Method, device: torch.device) -> None:
    """Raises WrongOutput on rank 0, of what all ranks have together."""
    torch.manual_seed(0)  # the same call everywhere
    call = make_call(problem, device, with_gradients=True)
    assert call.grad_out is not None
    whole = (call.q, call.k, call.v, call.grad_out)
    shards = [split_sequence(x.detach(), None, layout=LAYOUT) for x in whole]
    q, k, v = (x.clone().requires_grad_() for x in shards[:3])
    found = [join_sequence(x, None, layout=LAYOUT) for x in step_of(method, q, k, v, shards[3])]
    if dist.get_rank() == 0:
        result = dict(zip(("out", "dq", "dk", "dv"), found, strict=True))
        Expected(call, ("q", "k", "v")).check(method, result)


def measure(problem: Problem, chosen: argparse.Namespace, device: torch.device) -> report.Row:
    tensors = shard_of(problem, device)
    steps: dict[str, Callable[[], float]] = {}
    for method in chosen.methods:
        name = OURS if method == chosen.methods[0] else f"{OURS}, {method}"
        steps[name] = partial(slowest_time, partial(step_of, method, *tensors), device)
    missing = {}
    if chosen.alone_up_to is None or problem.seqlen <= chosen.alone_up_to:
        steps[ALONE] = partial(time_of_one, step_of_one(problem, device), device)
    else:
        missing[ALONE] = f"longer than {chosen.alone_up_to} tokens (--alone-up-to)"
    timings = Timings(take_turns(steps, chosen.rounds))
    flops = problem.flops("forward") + problem.flops("backward")
    return report.Row.timed(
        timings,
        table=f"forward and backward, {problem.heading}, {chosen.ranks} ranks",
        label=f"{problem.seqlen}",
        problem={**asdict(problem), "ranks": chosen.ranks, "layout": LAYOUT},
        shown={name: flops / (1e9 * milliseconds) for name, milliseconds in timings.medians().items()},
        figures=gain_over_one(timings.bursts),
        missing=missing,
    )


def gain_over_one(samples: Mapping[str, Sample]) -> dict[str, float]:
    """How many times as fast as one GPU, with its lower quartile; each is a ratio of the same round."""
    if ALONE not in samples:
        return {}
    gain = samples[ALONE].over(samples[OURS])
    return {"x one": gain.median, "x one, lower": gain.quartiles[0]}


def take_turns(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Sample]:
    """Milliseconds of each, after rounds that do not count. Every other round goes backwards."""
    readings: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(WARM_UP + rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            readings[name].append(steps[name]())
    return {name: Sample(tuple(taken[WARM_UP:])) for name, taken in readings.items()}


def slowest_time(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of the slowest rank."""
    dist.barrier()
    slowest = torch.tensor([elapsed(step, device)], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def step_of_one(problem: Problem, device: torch.device) -> Callable[[], object]:
    """The whole problem on one GPU; on ranks that only wait, nothing."""
    if dist.get_rank() > 0:
        return lambda: None
    call = make_call(problem, device, with_gradients=True)
    inputs = (call.q, call.k, call.v)

    def step() -> object:
        out = flash_ext.attention(*inputs, causal=True)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, inputs, call.grad_out)

    return step


def time_of_one(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of the first rank, on all ranks."""
    dist.barrier()
    milliseconds = torch.tensor([elapsed(step, device)], device=device)
    dist.broadcast(milliseconds, 0)
    return float(milliseconds)


def elapsed(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds until the device has done all of it."""
    if device.type == "cpu":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    step()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


def add_rates(rows: Sequence[report.Row]) -> None:
    """Of each row, its rate over that of one rank at 131072 tokens, or at the longest length that one has done."""
    alone: dict[int, Any] = {row.problem["seqlen"]: row.shown[ALONE] for row in rows if ALONE in row.shown}
    if not alone:
        return
    length = 131072 if 131072 in alone else max(alone)
    for row in rows:
        row.figures[f"x one at {length}"] = row.shown[OURS] / alone[length]


if __name__ == "__main__":
    sys.exit(main())
