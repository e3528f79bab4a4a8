"""``host``: microseconds of CPU time that one eager call takes, on a problem too small to matter otherwise.

The calls of a batch follow each other without waiting for the GPU; a reading is the mean of a batch, the figure the
median over batches, and the candidates take turns. On a CPU the computation itself is in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flash_ext
from benchmarks.arguments import dtypes_of, on_cpu, positive
from benchmarks.ceilings import name_of
from benchmarks.checks import Expected, Result
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.forward_backward import obstacle
from benchmarks.peers import OURS, Peer, Step, ours, sdpa, sdpa_decode
from benchmarks.report import Row
from benchmarks.timing import WARM_UP_CALLS, Candidate, Sample, Timings, host_microseconds
from tests.oracle import Call

SHAPE = (1, 128, 4, 64)  # batch, seqlen, heads, head_dim
CPU_SHAPE = (1, 8, 1, 64)
CALLS, BATCHES = 200, 12
PEERS = {"sdpa": "what torch SDPA chooses"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=positive, default=CALLS, help="in a row (%(default)s)")


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    size = CPU_SHAPE if on_cpu(chosen) else SHAPE
    return [partial(measure, size, dtype, chosen.calls, setting) for dtype in dtypes_of(chosen)]


def ours_by_its_names() -> dict[str, Peer]:
    mine = ours()

    def as_flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        return flash_ext.flash_attn_func(q, k, v, causal=causal)

    def as_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        q_, k_, v_ = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return flash_ext.scaled_dot_product_attention(q_, k_, v_, is_causal=causal).transpose(1, 2)

    return {
        OURS: mine,
        f"{OURS}.flash_attn_func": Peer("as flash_attn has it", as_flash_attn, mine.decode),
        f"{OURS}.scaled_dot_product_attention": Peer("as torch has it", as_sdpa, mine.decode),
        f"{OURS}.activate": Peer("torch SDPA with our kernels", sdpa, sdpa_decode, flash_ext.activated),
    }


@dataclass(frozen=True)
class Way:
    """To call attention; ``output`` names what the calls return, ``operation`` what flash_ext has to support."""

    name: str
    operation: str
    output: str
    expected: Expected
    call_of: Callable[[Peer], Callable[[], Tensor]]


def ways(plain: Call) -> list[Way]:
    q, k, v, grad = plain.q, plain.k, plain.v, plain.grad_out
    q_leaf, k_leaf, v_leaf = (t.clone().requires_grad_() for t in (q, k, v))
    one = q[:, :1]

    def attend(peer: Peer) -> Callable[[], Tensor]:
        return partial(peer.attention, q, k, v, False)

    def attend_with_grad(peer: Peer) -> Callable[[], Tensor]:
        return partial(peer.attention, q_leaf, k_leaf, v_leaf, False)

    def differentiate(peer: Peer) -> Callable[[], Tensor]:
        attend = attend_with_grad(peer)
        return lambda: torch.autograd.grad(attend(), (q_leaf, k_leaf, v_leaf), grad)[0]

    def decode(peer: Peer) -> Callable[[], Tensor]:
        return peer.decode(Step(one, k, v))

    forward = Expected(Call(q, k, v))
    return [
        Way("without grad", "forward", "out", forward, attend),
        Way("with grad", "forward", "out", forward, attend_with_grad),
        Way("forward and backward", "backward", "dq", Expected(plain, ("q", "k", "v")), differentiate),
        Way("decode", "decode", "out", Expected(Call(one, k, v)), decode),
    ]


def measure(shape: tuple[int, int, int, int], dtype: torch.dtype, calls: int, setting: Setting) -> list[Row]:
    """A row for each way."""
    q, k, v, grad = (torch.randn(shape, device=setting.device, dtype=dtype) for _ in range(4))
    plain = Call(q, k, v, grad_out=grad)
    return [measure_way(way, plain, calls, setting) for way in ways(plain)]


def measure_way(way: Way, plain: Call, calls: int, setting: Setting) -> Row:
    mine = {OURS: ours()} if way.operation == "decode" else ours_by_its_names()
    comparison = Comparison()
    for name, peer in {**mine, "sdpa": Peer(PEERS["sdpa"], sdpa, sdpa_decode), **setting.peers}.items():
        if reason := obstacle(OURS if name in mine else name, peer, plain, [way.operation]):
            comparison.leave_out(name, reason)
        else:
            add(comparison, name, Candidate(way.call_of(peer), peer.around), way, required=name in mine)
    shape = list(plain.q.shape)
    return Row.timed(
        Timings(take_turns(comparison.candidates, calls, setting.device)),
        table=f"{name_of(plain.dtype)}, {' x '.join(map(str, shape))}",
        label=way.name,
        problem={"shape": shape, "dtype": name_of(plain.dtype), "calls": calls},
        missing=comparison.missing,
    )


def add(comparison: Comparison, name: str, candidate: Candidate, way: Way, required: bool) -> None:
    def result() -> Result:
        return {way.output: candidate().detach()}

    comparison.add(name, candidate, way.expected, result, required=required)


def take_turns(candidates: Mapping[str, Candidate], calls: int, device: torch.device) -> dict[str, Sample]:
    """Microseconds of a call of each, a reading for each batch. Every other round goes backwards."""
    for candidate in candidates.values():
        host_microseconds(device, candidate, WARM_UP_CALLS)
    batches: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(BATCHES):
        for name in candidates if turn % 2 == 0 else reversed(list(candidates)):
            batches[name].append(host_microseconds(device, candidates[name], calls))
    return {name: Sample(tuple(values)) for name, values in batches.items()}
