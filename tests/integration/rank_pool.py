"""Processes that are ranks of one group, which tests over shards of a sequence hand their problems to."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import flash_ext
from flash_ext.integrations.distributed import context_parallel_attention, join_sequence, split_sequence
from tests.oracle import Call, Oracle, Result, collect_gradients

METHODS = ("ring", "gather", "ulysses")
LAYOUTS = ("contiguous", "zigzag")
OF_ROWS = ("bias", "mask")  # options of which a rank has its own rows
SUMMED = ("bias", "sink")  # of which all ranks have a copy, if it has no rows


# ---- Processes ------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    call: Call
    layout: str
    method: str
    gradients_of: tuple[str, ...]


def on_rank(task: Task, device: str) -> Result:
    """What one rank computes of it."""

    def to(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor | flash_ext.BlockMask) else x

    def own(x: Tensor, dim: int) -> Tensor:
        return split_sequence(to(x), None, layout=task.layout, dim=dim).contiguous()  # type: ignore[arg-type]

    call, dim = task.call, 0 if task.call.varlen else 1
    options = {name: to(value) for name, value in call.options.items()}
    for name in OF_ROWS:
        if name in options and options[name].shape[2] > 1 and not call.varlen:
            options[name] = own(options[name], 2)
    if options.get("cu_seqlens_q") is not None and torch.equal(options["cu_seqlens_q"], options["cu_seqlens_k"]):
        options["cu_seqlens_k"] = options["cu_seqlens_q"]
    mine = replace(
        call,
        q=own(call.q, dim),
        k=own(call.k, dim),
        v=own(call.v, dim),
        options=options,
        grad_out=None if call.grad_out is None else own(call.grad_out, dim),
        grad_lse=None if call.grad_lse is None else own(call.grad_lse, 1 if call.varlen else 2),
    )
    leaves = {name: x.detach().requires_grad_(name in task.gradients_of) for name, x in mine.inputs().items()}
    given = {**options, **leaves}
    out, lse = context_parallel_attention(
        given.pop("q"),
        given.pop("k"),
        given.pop("v"),
        None,
        layout=task.layout,  # type: ignore[arg-type]
        method=task.method,  # type: ignore[arg-type]
        return_lse=True,
        **given,
    )
    return collect_gradients(mine, out, lse, {name: leaves[name] for name in task.gradients_of})


def join(task: Task, name: str, x: Tensor) -> Tensor:
    """A result of all ranks, of those that each of them has."""
    packed = task.call.varlen
    if name[1:] in SUMMED and (name == "dsink" or packed or task.call.options["bias"].shape[2] == 1):
        total = x.clone()
        dist.all_reduce(total)
        return total
    dim = {"lse": 1 if packed else 2, "dbias": 2}.get(name, 0 if packed else 1)
    return join_sequence(x, None, layout=task.layout, dim=dim)  # type: ignore[arg-type]


def serve(rank: int, world: int, device: str, store: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    while (task := tasks.get()) is not None:
        try:
            if isinstance(task, Task):
                found = on_rank(task, device)
                answer: Any = {name: join(task, name, x).cpu() for name, x in found.items()}
            else:
                answer = task(device)
        except Exception as error:
            answer = (type(error), str(error), traceback.format_exc())
        results.put((rank, answer))
    dist.destroy_process_group()


class Pool:
    """Processes of one group."""

    def __init__(self, world: int, device: str, folder: Path) -> None:
        context = mp.get_context("spawn")
        self.world = world
        self._results = context.Queue()
        self._tasks = [context.Queue() for _ in range(world)]
        store = str(folder / "store")
        self._processes = [
            context.Process(target=serve, args=(rank, world, device, store, self._tasks[rank], self._results))
            for rank in range(world)
        ]
        for process in self._processes:
            process.start()

    def run(self, task: Task | Callable[[str], Any]) -> Any:
        """What rank 0 answers; an error of any rank is raised."""
        for queue in self._tasks:
            queue.put(task)
        answers = dict(self._results.get(timeout=120) for _ in range(self.world))
        for rank in range(self.world):
            if isinstance(answers[rank], tuple):
                kind, message, trace = answers[rank]
                raise kind(f"{message}\non rank {rank}: {trace}")
        return answers[0]

    def close(self) -> None:
        for queue in self._tasks:
            queue.put(None)
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()


def refusal(pool: Pool, call: Call, **how: Any) -> str:
    how = {"layout": "contiguous", "method": "ring", **how}
    with pytest.raises((ValueError, NotImplementedError)) as error:
        pool.run(Task(call, how["layout"], how["method"], ()))
    return str(error.value)


# ---- Against the oracle ---------------------------------------------------------------------------------------------


def assert_matches(
    pool: Pool, call: Call, layout: str, method: str, gradients_of: tuple[str, ...] | None = None
) -> None:
    """``assert_matches_oracle``, of the result that the ranks have together."""
    gradients_of = tuple(call.inputs()) if gradients_of is None else gradients_of
    call = call if call.grad_out is not None or call.grad_lse is not None else call.with_random_gradients()
    assert_within_bounds(call, gradients_of, pool.run(Task(call, layout, method, gradients_of)))


def assert_within_bounds(call: Call, gradients_of: tuple[str, ...], found: Result) -> None:
    oracle = Oracle.of(call, gradients_of)
    assert found.keys() == oracle.ref.keys()
    for name, ref in oracle.ref.items():
        if name == "dsink":
            oracle.slack[name] += 1e-3 * ref.abs().max()  # a sum over all rows, in another order
        assert found[name].shape == ref.shape
        oracle.assert_within_bound(name, found[name])


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 0)},
    "window of both sides": {"window_size": (5, 9)},
    "narrow window": {"window_size": (1, 1)},
    "softcap": {"causal": True, "softcap": 2.0, "softmax_scale": 0.3},
}


def split_of(x: Tensor, world: int, layout: str) -> list[Tensor]:
    """Of a vector, each rank's part."""
    if layout == "contiguous":
        return list(x.chunk(world))
    chunks = x.chunk(2 * world)
    return [torch.cat([chunks[rank], chunks[2 * world - 1 - rank]]) for rank in range(world)]
