"""``shapes``: TFLOP/s of the shapes that users have, beside the peers: short sequences, small batches, chunks of a
prompt over dense keys or a cache, cross-attention, packed sequences, wide heads.

FLOPs are 4 head_dim for each query head and visible pair, with a triangle of n x n counted as n^2 / 2; backward 2.5
times that. "flash_ext dense" is the dense call with the tokens of a pack, in sequences as long as its longest: what a
pack would reach if its lengths cost nothing. "flash_ext no max_seqlen" is the packed call that gives no bound on them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

import flash_ext
from benchmarks.arguments import DTYPES, dtypes_of, on_cpu
from benchmarks.ceilings import name_of
from benchmarks.checks import Expected
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.forward_backward import BACKWARD_OVER_FORWARD, INPUTS
from benchmarks.options import Variant, add
from benchmarks.peers import OURS, Peer, Step, ours, serving_arguments
from benchmarks.report import Row
from benchmarks.timing import Candidate
from flash_ext.planning import Explanation
from tests.oracle import Call, cumulative

GROUPS = ("short", "small", "prefill", "cached", "cross", "packed", "wide")
DIRECTIONS = ("forward", "backward")
CHUNK_GROUPS = ("prefill", "cached")  # forward only
DENSE, NO_MAX = f"{OURS} dense", f"{OURS} no max_seqlen"
QUICK_STEP = 3  # of every so many problems one

Heads = tuple[int, int, int]  # of queries, of keys, head_dim
Runs = tuple[tuple[int, int], ...]  # (how many sequences, length of each), in the order of the pack


@dataclass(frozen=True)
class Chunks:
    """Queries at the end of each context that is long enough. ``pages``: of the caches; 0 is a contiguous one."""

    heads: Heads
    batch: int
    queries: Sequence[int]
    contexts: Sequence[int]
    pages: Sequence[int]
    groups: Sequence[str] = CHUNK_GROUPS


@dataclass(frozen=True)
class Pack:
    name: str
    runs: Runs
    heads: Heads
    without_max: bool = False  # is also measured without max_seqlen


@dataclass(frozen=True)
class Tables:
    """The shapes of each group."""

    short_tokens: int
    short: Mapping[Heads, Sequence[int]]  # lengths
    small: Mapping[Heads, Sequence[tuple[int, int]]]  # batch, seqlen
    chunks: Sequence[Chunks]
    cross: tuple[int, int, int, Heads]  # batch, queries, keys
    packs: Sequence[Pack]
    wide: Sequence[tuple[int, int, Heads, bool]]  # batch, seqlen, heads, causal


# 32768 tokens in 24 sequences of 64 to 8192, some of them of odd lengths.
SKEWED = (
    64, 4091, 128, 512, 8192, 197, 1019, 96, 2053, 251, 6144, 80, 391, 3072, 761, 160, 1541, 315, 1280, 640, 112, 901,
    704, 64,
)  # fmt: skip


def skewed(lengths: Sequence[int]) -> Runs:
    return tuple((1, length) for length in lengths)


def one_among(longest: int, count: int, short: int) -> Runs:
    return ((count // 2, short), (1, longest), (count - count // 2, short))


H64, H128, GROUPED = (16, 16, 64), (16, 16, 128), (32, 8, 128)
ONE_LONG = one_among(16384, 64, 64)
PAGES = (0, 16, 64, 256)
GPU = Tables(
    short_tokens=8192,
    short={H64: (64, 128, 197, 256, 384), H128: (128, 197, 256)},
    small={heads: ((1, 64), (1, 197), (1, 512), (4, 128), (4, 256), (8, 197)) for heads in (H64, H128)},
    chunks=(
        Chunks(GROUPED, 1, (128, 512, 1024, 2048), (4096, 16384, 32768, 65536), PAGES),
        Chunks((16, 4, 128), 2, (512,), (8192,), PAGES),
        *(
            Chunks((32, 8, head_dim), 1, (queries,), (context,), PAGES, ("cached",))
            for head_dim in (64, 256)
            for queries, context in ((512, 32768), (1024, 16384))
        ),
    ),
    cross=(2, 1000, 3500, H128),
    packs=(
        *(Pack("16384 among 64 x 64", ONE_LONG, heads) for heads in (H128, H64, GROUPED)),
        *(Pack("skewed, 64 to 8192", skewed(SKEWED), heads) for heads in (H128, H64, GROUPED)),
        *(Pack(f"{n} x {length}", ((n, length),), H128) for n, length in ((64, 256), (32, 512), (8, 2048))),
        Pack("4096 x 256", ((4096, 256),), (4, 4, 128), without_max=True),
        Pack("65536 among 4095 x 16", one_among(65536, 4095, 16), (4, 4, 128), without_max=True),
    ),
    wide=((4, 1024, (8, 8, 256), True), (16, 1024, H128, False)),
)
CPU = Tables(
    short_tokens=64,
    short={(2, 2, 16): (16, 33)},
    small={(2, 2, 16): ((1, 9),)},
    chunks=(Chunks((4, 2, 16), 1, (16, 40), (32, 64), (0, 8)), Chunks((4, 1, 32), 2, (8,), (48,), (0, 16))),
    cross=(2, 10, 35, (2, 2, 16)),
    packs=(
        Pack("96 among 6 x 8", one_among(96, 6, 8), (4, 2, 16)),
        Pack("skewed, 3 to 70", skewed((3, 70, 17, 1, 32)), (2, 2, 16)),
        Pack("40 x 8", ((40, 8),), (2, 2, 16), without_max=True),
    ),
    wide=((1, 64, (2, 2, 64), True), (2, 40, (2, 2, 32), False)),
)


@dataclass(frozen=True)
class Problem:
    """A call: ``batch`` sequences alike, or packed ones where there are ``runs``."""

    group: str
    batch: int
    seqlen_q: int  # of the longest sequence
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool
    dtype: str
    page_size: int | None = None  # of the cache; 0: it is contiguous; None: there is none
    runs: Runs = ()
    name: str = ""  # of the pack
    without_max: bool = False

    @property
    def label(self) -> str:
        over = "" if self.seqlen_k == self.seqlen_q else f" over {self.seqlen_k}"
        return self.name or f"{self.batch} x {self.seqlen_q}{over}"

    def table(self, direction: str) -> str:
        cache = {None: "", 0: ", contiguous cache"}.get(self.page_size, f", pages of {self.page_size}")
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        mask = "causal" if self.causal else "full"
        return f"{self.group}{cache}, {direction}, {self.dtype}, {heads} heads of {self.head_dim}, {mask}"

    @property
    def lengths(self) -> list[int]:
        """Of the packed sequences."""
        return [length for count, length in self.runs for _ in range(count)]

    @property
    def directions(self) -> Sequence[str]:
        return DIRECTIONS[:1] if self.group in (*CHUNK_GROUPS, "small") else DIRECTIONS

    def flops(self, direction: str) -> float:
        sizes = [(n, n) for n in self.lengths] or [(self.seqlen_q, self.seqlen_k)] * self.batch
        pairs = sum(n * (keys - n / 2 if self.causal else keys) for n, keys in sizes)
        return 4.0 * self.heads_q * self.head_dim * pairs * (BACKWARD_OVER_FORWARD if direction == "backward" else 1.0)

    def as_dense(self) -> Problem:
        """As many tokens, in sequences as long as the longest of the pack."""
        batch = max(1, sum(self.lengths) // self.seqlen_q)
        return replace(self, batch=batch, runs=(), name="", without_max=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="default: all")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="default: both")


dtypes = dtypes_of


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    """Problems that have the same tensors are one piece of work: their reference is computed once."""
    # Hosts need longer to launch the backward of short sequences than one write of the buffer takes.
    setting = replace(setting, clock=setting.clock.with_more_time().with_more_time())
    alike: dict[Problem, list[Problem]] = {}
    for problem in problems(chosen):
        alike.setdefault(replace(problem, group="", page_size=None), []).append(problem)
    return [partial(measure, same, chosen.directions, setting) for same in alike.values()]


def problems(chosen: argparse.Namespace) -> list[Problem]:
    tables = CPU if on_cpu(chosen) else GPU
    of_group = {
        "short": short(tables),
        "small": small(tables),
        "prefill": chunks(tables, "prefill"),
        "cached": chunks(tables, "cached"),
        "cross": [problem_of("cross", *tables.cross, causal=False)],
        "packed": packed(tables),
        "wide": [problem_of("wide", b, n, n, heads, causal=causal) for b, n, heads, causal in tables.wide],
    }
    step = QUICK_STEP if chosen.quick else 1
    return [
        replace(problem, dtype=name_of(dtype))
        for dtype in dtypes_of(chosen)
        for group in GROUPS
        if group in chosen.groups
        for problem in of_group[group][::step]
        if set(problem.directions) & set(chosen.directions)
    ]


def problem_of(group: str, batch: int, seqlen_q: int, seqlen_k: int, heads: Heads, *, causal: bool) -> Problem:
    """Of a dtype that is yet to be said."""
    return Problem(group, batch, seqlen_q, seqlen_k, *heads, causal, dtype="")


def short(tables: Tables) -> list[Problem]:
    return [
        problem_of("short", tables.short_tokens // n, n, n, heads, causal=causal)
        for heads, lengths in tables.short.items()
        for causal in (False, True)
        for n in lengths
    ]


def small(tables: Tables) -> list[Problem]:
    """Batches of models that serve one request or a few at a time."""
    return [
        problem_of("small", batch, n, n, heads, causal=causal)
        for heads, sizes in tables.small.items()
        for causal in (False, True)
        for batch, n in sizes
    ]


def chunks(tables: Tables, group: str) -> list[Problem]:
    return [
        replace(problem_of(group, of.batch, queries, keys, of.heads, causal=True), page_size=page_size)
        for of in tables.chunks
        if group in of.groups
        for page_size in (of.pages if group == "cached" else (None,))
        for queries in of.queries
        for keys in of.contexts
        if queries <= keys
    ]


def packed(tables: Tables) -> list[Problem]:
    def problem(pack: Pack) -> Problem:
        batch, longest = sum(count for count, _ in pack.runs), max(length for _, length in pack.runs)
        dense = problem_of("packed", batch, longest, longest, pack.heads, causal=True)
        return replace(dense, runs=pack.runs, name=pack.name, without_max=pack.without_max)

    return [problem(pack) for pack in tables.packs]


def measure(alike: Sequence[Problem], directions: Sequence[str], setting: Setting) -> list[Row]:
    """A row for each problem and direction; all have the same tensors."""
    call = make_call(alike[0], setting.device)
    backward = any("backward" in problem.directions for problem in alike) and "backward" in directions
    expected = Expected(call, INPUTS if backward else ())
    rows = []
    for problem in alike:
        if problem.group == "cached":
            rows.append(measure_cached(problem, call, expected, setting))
            continue
        twin = twin_of(problem, backward, setting)
        rows += [
            measure_attention(problem, direction, call, expected, twin, setting)
            for direction in problem.directions
            if direction in directions
        ]
    return rows


def make_call(problem: Problem, device: torch.device) -> Call:
    """Random normal numbers."""

    def random(seqlen: int, heads: int) -> Tensor:
        lead = [sum(problem.lengths)] if problem.runs else [problem.batch, seqlen]
        return torch.randn(*lead, heads, problem.head_dim, device=device, dtype=DTYPES[problem.dtype])

    q, grad = (random(problem.seqlen_q, problem.heads_q) for _ in range(2))
    k, v = (random(problem.seqlen_k, problem.heads_kv) for _ in range(2))
    call = Call(q, k, v, {"causal": problem.causal}, grad_out=grad)
    if not problem.runs:
        return call
    ends = cumulative(problem.lengths, str(device))
    longest = {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    return call.with_options(cu_seqlens_q=ends, cu_seqlens_k=ends, **longest)


Twin = tuple[Problem, Call, Expected]


def twin_of(problem: Problem, backward: bool, setting: Setting) -> Twin | None:
    """What a pack is compared with."""
    if not problem.runs:
        return None
    dense = problem.as_dense()
    call = make_call(dense, setting.device)
    return dense, call, Expected(call, INPUTS if backward else ())


def measure_attention(
    problem: Problem, direction: str, call: Call, expected: Expected, twin: Twin | None, setting: Setting
) -> Row:
    comparison = Comparison()
    flops: dict[str, float] = {}
    variant = Variant(problem.label, call)
    for name, peer in {OURS: ours(), **setting.peers}.items():
        add(comparison, name, peer, variant, direction, expected)
    if problem.without_max:
        unbounded = call.with_options(max_seqlen_q=None, max_seqlen_k=None)
        add(comparison, NO_MAX, ours(), replace(variant, call=unbounded), direction, expected)
    if twin is not None:
        dense, dense_call, dense_expected = twin
        add(comparison, DENSE, ours(), Variant(DENSE, dense_call), direction, dense_expected)
        flops[DENSE] = dense.flops(direction)
    explain = partial(flash_ext.explain, call.q, call.k, call.v, operation=direction, **call.options)
    return row_of(problem, direction, comparison, flops, explain, setting)


def measure_cached(problem: Problem, call: Call, expected: Expected, setting: Setting) -> Row:
    step = make_step(problem, call)
    comparison = Comparison()
    for name, peer in {OURS: ours(), **setting.peers}.items():
        add_cached(comparison, name, peer, step, expected)
    arguments = serving_arguments(step)
    explain = partial(flash_ext.explain, step.q, step.k_cache, step.v_cache, operation="decode", **arguments)
    return row_of(problem, "forward", comparison, {}, explain, setting)


def make_step(problem: Problem, call: Call) -> Step:
    """The same keys and values in a cache; its pages lie anywhere."""
    batch, seqlen, heads_kv, head_dim = call.k.shape
    lengths = torch.full((batch,), seqlen, device=call.q.device, dtype=torch.int32)
    step = Step(call.q, call.k, call.v, lengths, causal=problem.causal)
    if not problem.page_size:
        return step
    table = torch.randperm(batch * seqlen // problem.page_size, device=call.q.device)
    pages = [t.view(-1, problem.page_size, heads_kv, head_dim)[table.argsort()] for t in (call.k, call.v)]
    block_table = table.view(batch, -1).to(torch.int32)
    return replace(step, k_cache=pages[0], v_cache=pages[1], block_table=block_table)


def add_cached(comparison: Comparison, name: str, peer: Peer, step: Step, expected: Expected) -> None:
    """Checks what the peer returns, and lets it take part."""
    supported, reason = True, ""
    if name == OURS:
        arguments = serving_arguments(step)
        supported, reason = flash_ext.supports(step.q, step.k_cache, step.v_cache, operation="decode", **arguments)
    elif peer.is_too_large(step.q, step.k_cache):
        supported, reason = False, "its scores would take more than 2 GiB"
    if not supported:
        comparison.leave_out(name, reason)
        return
    prepare = cache(partial(peer.decode, step))  # where it fails, it fails in the comparison
    comparison.add(name, Candidate(lambda: prepare()(), peer.around), expected, required=name == OURS)


def row_of(
    problem: Problem,
    direction: str,
    comparison: Comparison,
    flops: Mapping[str, float],
    explain: Callable[[], Explanation],
    setting: Setting,
) -> Row:
    """``flops``: of the candidates whose problem is another one."""
    timings = comparison.measure(setting)
    own = problem.flops(direction)
    shown = {name: flops.get(name, own) / ms / 1e9 for name, ms in timings.medians().items()}
    figures = {"% of dense": 100 * shown[OURS] / shown[DENSE]} if {OURS, DENSE} <= shown.keys() else {}
    return Row.timed(
        timings,
        table=problem.table(direction),
        label=problem.label,
        problem={**asdict(problem), "direction": direction},
        shown=shown,
        figures=figures,
        missing=comparison.missing,
        kernel=explain().plan.kernel if OURS in comparison.candidates else "",
    )
