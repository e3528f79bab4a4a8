"""``decode``: microseconds of one new query token over a cache of keys and values.

On a GPU each call is a CUDA graph that is replayed, L2 flushed in between. It is judged by the bytes of keys and values
over the time, and the time in which a reduction reads the same bytes is the floor.

Calls are made as a serving engine makes them: ``cache_seqlens`` says how many rows of the cache are in use, on the
device. FlashAttention-3 takes part with scheduler metadata that is made once, as such an engine makes it for all layers
of a step, and with metadata that each call makes.

Workloads: "full", all rows are in use; "ragged", each sequence has another length; "append", the new token's key and
value are written into the last row; "rotary", they and the query are rotated as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import flash_ext
from benchmarks.arguments import DTYPES, batch_and_seqlen, dtypes_of, head_pair, on_cpu, positive
from benchmarks.ceilings import name_of, read_ms
from benchmarks.checks import Expected, Result, WrongOutput
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.peers import FA3_METADATA, OURS, Peer, Step, ours
from benchmarks.report import Row
from benchmarks.timing import Candidate, Timings
from tests import reference
from tests.oracle import Call

HEADS: Sequence[tuple[int, int]] = ((16, 2), (32, 8), (64, 8), (32, 32))
CONTEXTS: Sequence[tuple[int, int]] = (
    (1, 512), (1, 4096), (1, 16384), (1, 65536), (1, 131072), (8, 8192), (32, 8192), (128, 2048),
)  # fmt: skip
HEAD_DIM = 128
WIDE_HEADS: Sequence[tuple[int, int]] = ((16, 2), (16, 8))  # of head_dim 256
WIDE_CONTEXTS: Sequence[tuple[int, int]] = ((1, 16384), (8, 8192), (32, 8192))
WIDE_HEAD_DIM = 256
SERVING: Sequence[tuple[int, int, int]] = ((32, 8, HEAD_DIM), (16, 2, WIDE_HEAD_DIM))  # heads and head_dim
SERVING_CONTEXTS: Sequence[tuple[int, int]] = ((8, 8192), (32, 8192), (128, 2048))
CPU_HEADS: Sequence[tuple[int, int]] = ((8, 2),)
CPU_CONTEXTS: Sequence[tuple[int, int]] = ((1, 4096), (4, 1024))
WORKLOADS = ("full", "ragged", "append", "rotary")
SHORTEST_SHARE = 8  # of the cache, the shortest ragged sequence
ROTARY_BASE = 10000.0
ROW_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of a rotated key
ALSO_PEERS = (FA3_METADATA,)
PAGE_SIZE = 16
PAGED = f"{OURS} paged"
MEMORY_SHARE = 0.4  # of what is free that the cache may take: the reference and the peers need some too


@dataclass(frozen=True)
class Problem:
    batch: int
    seqlen: int  # of the cache
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str
    workload: str = "full"

    @property
    def lengths(self) -> list[int]:
        """Keys that each sequence attends to."""
        if self.workload != "ragged":
            return [self.seqlen] * self.batch
        shortest, spread = max(1, self.seqlen // SHORTEST_SHARE), max(1, self.batch - 1)
        return [shortest + (self.seqlen - shortest) * b // spread for b in range(self.batch)]

    @property
    def appends(self) -> bool:
        return self.workload in ("append", "rotary")

    @property
    def row_bytes(self) -> int:
        """Of a key and a value of all heads."""
        return 2 * self.heads_kv * self.head_dim * torch.finfo(DTYPES[self.dtype]).bits // 8

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values that are attended to."""
        return sum(self.lengths) * self.row_bytes

    def fits(self, device: torch.device) -> bool:
        cache_bytes = self.batch * self.seqlen * self.row_bytes
        return device.type != "cuda" or cache_bytes < MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=head_pair, nargs="+", metavar="Q/KV", help="default: 16/2 32/8 64/8 32/32")
    parser.add_argument("--contexts", type=batch_and_seqlen, nargs="+", metavar="BxS", help="default: 1x512 ...")
    parser.add_argument("--head-dim", type=positive, nargs="+", metavar="N", help="default: 128, and some of 256")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="default: full, and some of the others")
    parser.add_argument("--page-size", type=positive, default=PAGE_SIZE, help="of the paged cache (%(default)s)")


dtypes = dtypes_of


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    return [partial(measure, problem, chosen.page_size, setting) for problem in problems(chosen)]


def problems(chosen: argparse.Namespace) -> list[Problem]:
    """What was asked for; else full caches of many sizes, some of them at head_dim 256, and the other workloads."""
    every = slice(None, None, 2 if chosen.quick else 1)
    heads = chosen.heads or (CPU_HEADS if on_cpu(chosen) else HEADS[every])
    contexts = chosen.contexts or (CPU_CONTEXTS if on_cpu(chosen) else CONTEXTS[every])
    head_dims, workloads = chosen.head_dim or [HEAD_DIM], chosen.workloads or ["full"]
    asked = any((chosen.heads, chosen.contexts, chosen.head_dim, chosen.workloads))
    found: list[Problem] = []
    for dtype in map(name_of, dtypes_of(chosen)):
        for workload in workloads:
            for head_dim in head_dims:
                found += table(contexts, heads, head_dim, dtype, workload)
        if asked or on_cpu(chosen):
            continue
        found += table(WIDE_CONTEXTS[every], WIDE_HEADS[every], WIDE_HEAD_DIM, dtype)
        for workload in WORKLOADS[1:]:
            for heads_q, heads_kv, head_dim in SERVING:
                found += table(SERVING_CONTEXTS[every], [(heads_q, heads_kv)], head_dim, dtype, workload)
    return found


def table(
    contexts: Sequence[tuple[int, int]],
    heads: Sequence[tuple[int, int]],
    head_dim: int,
    dtype: str,
    workload: str = "full",
) -> list[Problem]:
    return [
        Problem(batch, seqlen, heads_q, heads_kv, head_dim, dtype, workload)
        for heads_q, heads_kv in heads
        for batch, seqlen in contexts
    ]


def measure(problem: Problem, page_size: int, setting: Setting) -> list[Row]:
    if not problem.fits(setting.device):
        return [row_of(problem, page_size, Timings({}), None, {OURS: "the cache does not fit into memory"})]
    step, both_caches = make_step(problem, setting.device)
    call = call_of(problem, step)
    expected = Expected(call)
    comparison = Comparison()
    for name, peer in {OURS: ours(), **setting.peers}.items():
        add(comparison, name, peer, step, call, expected, setting)
    if problem.workload == "full":
        add_paged(comparison, call, page_size, setting)
    attended = both_caches.flatten()[: problem.kv_bytes // both_caches.element_size()]
    floor = read_ms(setting.clock, attended, setting.effort)
    return [row_of(problem, page_size, comparison.measure(setting), floor, comparison.missing)]


def make_step(problem: Problem, device: torch.device) -> tuple[Step, Tensor]:
    """Random normal numbers; both caches are also returned in one piece."""
    dtype, tail = DTYPES[problem.dtype], (problem.heads_kv, problem.head_dim)
    q = torch.randn(problem.batch, 1, problem.heads_q, problem.head_dim, device=device, dtype=dtype)
    caches = torch.randn(2, problem.batch, problem.seqlen, *tail, device=device, dtype=dtype)
    lengths = torch.tensor(problem.lengths, device=device, dtype=torch.int32)
    step = Step(q, caches[0], caches[1], lengths, ragged=problem.workload == "ragged")
    if not problem.appends:
        return step, caches
    k, v = (torch.randn(problem.batch, 1, *tail, device=device, dtype=dtype) for _ in range(2))
    row = torch.tensor([problem.seqlen - 1], device=device)
    step = replace(step, cache_seqlens=lengths - 1, k=k, v=v, row=row)
    if problem.workload == "rotary":
        step = replace(step, rotary=rotary_tables(problem, device))
    return step, caches


def rotary_tables(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, (seqlen, head_dim / 2) (Su et al. 2021)."""
    pairs = torch.arange(problem.head_dim // 2, device=device)
    frequencies = ROTARY_BASE ** (-2 * pairs / problem.head_dim)
    angles = torch.arange(problem.seqlen, device=device)[:, None] * frequencies
    dtype = DTYPES[problem.dtype]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def call_of(problem: Problem, step: Step) -> Call:
    """What the step computes, as plain attention; writes into the caches what it appends."""
    q, k = step.q, step.k
    if k is not None and step.v is not None:
        if step.rotary is not None:
            q, k = (rotated(t, step.rotary, problem.seqlen - 1) for t in (q, k))
        step.k_cache[:, -1:], step.v_cache[:, -1:] = k, step.v
    lengths = torch.tensor(problem.lengths, device=q.device, dtype=torch.int32)
    return Call(q, step.k_cache, step.v_cache, {"seqused_k": lengths} if problem.workload == "ragged" else {})


def rotated(x: Tensor, tables: tuple[Tensor, Tensor], position: int) -> Tensor:
    """In float32, (batch, 1, heads, head_dim), rounded to the dtype that it has."""
    cos, sin = (table.float() for table in tables)
    at = torch.tensor([position], device=x.device)
    return torch.stack([reference.rotate(entry.float(), cos, sin, at, False) for entry in x]).to(x.dtype)


def add(
    comparison: Comparison, name: str, peer: Peer, step: Step, call: Call, expected: Expected, setting: Setting
) -> None:
    """Checks what the peer returns and appends, and lets it take part."""
    if reason := obstacle(name, peer, step):
        comparison.leave_out(name, reason)
        return
    prepare = cache(partial(peer.decode, step))  # where it fails, it fails in the comparison
    rows = tuple(t[:, -1:].clone() for t in (step.k_cache, step.v_cache))  # as they have to be

    def decode() -> Tensor:
        return prepare()()

    def decode_and_look() -> Result:
        with peer.around():
            if step.k is None:
                return {"out": decode()}
            step.k_cache[:, -1:] = step.v_cache[:, -1:] = torch.nan
            try:
                out = decode()
                check_rows(name, step, rows)
            finally:
                step.k_cache[:, -1:], step.v_cache[:, -1:] = rows
            return {"out": out}

    candidate = Candidate(decode, peer.around)
    own = name == OURS
    comparison.add(name, candidate, expected, decode_and_look, repeated_by=setting.clock, required=own)


def obstacle(name: str, peer: Peer, step: Step) -> str | None:
    """Why the peer is not asked at all."""
    if peer.is_too_large(step.q, step.k_cache):
        return "its scores would take more than 2 GiB"
    if name == OURS:
        lengths = {"cache_seqlens": step.cache_seqlens}  # all that it can be asked without appending
        supported, reason = flash_ext.supports(step.q, step.k_cache, step.v_cache, operation="decode", **lengths)
        return None if supported else reason
    return None


def check_rows(who: str, step: Step, expected: Sequence[Tensor]) -> None:
    """Raises WrongOutput where the caches do not hold the new row: among thousands of keys it hardly shows in out."""
    tolerance = ROW_TOLERANCE[step.q.dtype]
    for name, cache_, row in zip(("k_cache", "v_cache"), (step.k_cache, step.v_cache), expected, strict=True):
        if not torch.allclose(cache_[:, -1:], row, rtol=tolerance, atol=tolerance):
            raise WrongOutput(f"{who}: {name} does not hold the new row")


def add_paged(comparison: Comparison, call: Call, page_size: int, setting: Setting) -> None:
    """The same cache as pages that lie anywhere; what is attended to are other keys than those of ``call``, then."""
    batch, seqlen, heads_kv, head_dim = call.k.shape
    if seqlen % page_size != 0:
        comparison.leave_out(PAGED, f"{seqlen} keys are no multiple of a page of {page_size}")
        return
    k_pages, v_pages = (t.view(-1, page_size, heads_kv, head_dim) for t in (call.k, call.v))
    block_table = torch.randperm(len(k_pages), device=call.q.device).view(batch, -1)
    lengths = torch.full((batch,), seqlen, device=call.q.device, dtype=torch.int32)
    options: dict[str, Any] = {"block_table": block_table.to(torch.int32), "cache_seqlens": lengths}
    supported, reason = flash_ext.supports(call.q, k_pages, v_pages, operation="decode", **options)
    if not supported:
        comparison.leave_out(PAGED, reason)
        return
    gathered = Call(call.q, k_pages[block_table].view(call.k.shape), v_pages[block_table].view(call.v.shape))
    candidate = Candidate(partial(flash_ext.decode, call.q, k_pages, v_pages, **options))
    comparison.add(PAGED, candidate, Expected(gathered), repeated_by=setting.clock, required=True)


def row_of(problem: Problem, page_size: int, timings: Timings, floor_ms: float | None, missing: dict[str, str]) -> Row:
    us = timings.scaled(1e3)
    figures = {"KV MB": problem.kv_bytes / 1e6}
    if floor_ms is not None:
        figures["read us"] = 1e3 * floor_ms
    if OURS in us.bursts:
        figures["TB/s"] = problem.kv_bytes / us.bursts[OURS].median / 1e6
    workload = "" if problem.workload == "full" else f", {problem.workload}"
    heads = f"{problem.heads_q} query heads over {problem.heads_kv}"
    defined_by = asdict(problem)
    if problem.workload == "full":
        del defined_by["workload"]  # as in the records that had no other
    return Row.timed(
        us,
        table=f"{problem.dtype}, head_dim {problem.head_dim}, {heads}{workload}",
        label=f"{problem.batch} x {problem.seqlen}",
        problem={**defined_by, "page_size": page_size},
        figures=figures,
        missing=missing,
    )
