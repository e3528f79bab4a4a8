"""``decode``: microseconds of one new query token over a cache of keys and values.

On a GPU each call is a CUDA graph that is replayed, L2 flushed in between. It is judged by the bytes of keys and values
over the time, and the time in which a reduction reads the same bytes is the floor.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

import flash_ext
from benchmarks.arguments import DTYPES, batch_and_seqlen, dtypes_of, head_pair, on_cpu, positive
from benchmarks.ceilings import name_of, read_ms
from benchmarks.checks import Expected
from benchmarks.contest import Contest, Setting, Work
from benchmarks.forward_backward import obstacle
from benchmarks.peers import OURS, ours
from benchmarks.report import Row
from benchmarks.timing import Contestant
from tests.oracle import Call

HEADS: Sequence[tuple[int, int]] = ((16, 2), (32, 8), (64, 8), (32, 32))
CONTEXTS: Sequence[tuple[int, int]] = (
    (1, 512), (1, 4096), (1, 16384), (1, 65536), (1, 131072), (8, 8192), (32, 8192), (128, 2048),
)  # fmt: skip
CPU_HEADS: Sequence[tuple[int, int]] = ((8, 2),)
CPU_CONTEXTS: Sequence[tuple[int, int]] = ((1, 4096), (4, 1024))
HEAD_DIM = 128
PAGE_SIZE = 16
PAGED = f"{OURS} paged"
MEMORY_SHARE = 0.4  # of what is free that the cache may take: the reference and the peers need some too


@dataclass(frozen=True)
class Problem:
    batch: int
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str

    @property
    def kv_bytes(self) -> int:
        element_size = torch.finfo(DTYPES[self.dtype]).bits // 8
        return 2 * self.batch * self.seqlen * self.heads_kv * self.head_dim * element_size

    def fits(self, device: torch.device) -> bool:
        return device.type != "cuda" or self.kv_bytes < MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=head_pair, nargs="+", metavar="Q/KV", help="default: 16/2 32/8 64/8 32/32")
    parser.add_argument("--contexts", type=batch_and_seqlen, nargs="+", metavar="BxS", help="default: 1x512 ...")
    parser.add_argument("--head-dim", type=positive, nargs="+", default=[HEAD_DIM], metavar="N", help="default: 128")
    parser.add_argument("--page-size", type=positive, default=PAGE_SIZE, help="of the paged cache (%(default)s)")


dtypes = dtypes_of


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    every = slice(None, None, 2 if chosen.quick else 1)
    heads = chosen.heads or (CPU_HEADS if on_cpu(chosen) else HEADS[every])
    contexts = chosen.contexts or (CPU_CONTEXTS if on_cpu(chosen) else CONTEXTS[every])
    found = [
        Problem(batch, seqlen, heads_q, heads_kv, head_dim, name_of(dtype))
        for dtype in dtypes_of(chosen)
        for head_dim in chosen.head_dim
        for heads_q, heads_kv in heads
        for batch, seqlen in contexts
    ]
    return [partial(measure, problem, chosen.page_size, setting) for problem in found]


def measure(problem: Problem, page_size: int, setting: Setting) -> list[Row]:
    if not problem.fits(setting.device):
        return [row_of(problem, page_size, {}, None, {OURS: "the cache does not fit into memory"})]
    q, cache = make_tensors(problem, setting.device)
    call = Call(q, cache[0], cache[1])
    expected = Expected(call)
    contest = Contest()
    for name, peer in {OURS: ours(), **setting.peers}.items():
        if reason := obstacle(name, peer, call, ["decode"]):
            contest.leave_out(name, reason)
            continue
        function = partial(peer.decode, call.q, call.k, call.v)
        contestant = Contestant(function, peer.around)
        contest.enter(name, contestant, expected, repeated_by=setting.clock, required=name == OURS)
    enter_paged(contest, call, page_size, setting)
    floor = read_ms(setting.clock, cache, setting.effort)
    return [row_of(problem, page_size, contest.measure(setting), floor, contest.missing)]


def make_tensors(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """q and, in one piece, K and V."""
    dtype = DTYPES[problem.dtype]
    q = torch.randn(problem.batch, 1, problem.heads_q, problem.head_dim, device=device, dtype=dtype)
    cache_shape = (2, problem.batch, problem.seqlen, problem.heads_kv, problem.head_dim)
    return q, torch.randn(cache_shape, device=device, dtype=dtype)


def enter_paged(contest: Contest, call: Call, page_size: int, setting: Setting) -> None:
    """The same cache as pages that lie anywhere; what is attended to are other keys than those of ``call``, then."""
    batch, seqlen, heads_kv, head_dim = call.k.shape
    if seqlen % page_size != 0:
        contest.leave_out(PAGED, f"{seqlen} keys are no multiple of a page of {page_size}")
        return
    k_pages, v_pages = (t.view(-1, page_size, heads_kv, head_dim) for t in (call.k, call.v))
    block_table = torch.randperm(len(k_pages), device=call.q.device).view(batch, -1)
    table = block_table.to(torch.int32)
    supported, reason = flash_ext.supports(call.q, k_pages, v_pages, operation="decode", block_table=table)
    if not supported:
        contest.leave_out(PAGED, reason)
        return
    gathered = Call(call.q, k_pages[block_table].view(call.k.shape), v_pages[block_table].view(call.v.shape))
    contestant = Contestant(partial(flash_ext.decode, call.q, k_pages, v_pages, block_table=table))
    contest.enter(PAGED, contestant, Expected(gathered), repeated_by=setting.clock, required=True)


def row_of(
    problem: Problem, page_size: int, ms: dict[str, float], floor_ms: float | None, missing: dict[str, str]
) -> Row:
    us = {name: 1e3 * value for name, value in ms.items()}
    figures = {"KV MB": problem.kv_bytes / 1e6}
    if floor_ms is not None:
        figures["read us"] = 1e3 * floor_ms
    if OURS in us:
        figures["TB/s"] = problem.kv_bytes / us[OURS] / 1e6
    return Row(
        table=f"{problem.dtype}, head_dim {problem.head_dim}, {problem.heads_q} query heads over {problem.heads_kv}",
        label=f"{problem.batch} x {problem.seqlen}",
        problem={**asdict(problem), "page_size": page_size},
        measured=us,
        figures=figures,
        missing=missing,
    )
