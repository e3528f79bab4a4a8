"""``forward``, ``backward``, ``training`` (both): TFLOP/s of attention beside its peers.

FLOPs: 4 batch heads seqlen^2 head_dim forward, half of it for causal; backward 2.5 times that, for the five matrix
products of a backward that recomputes the scores, whatever an implementation really does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

import flash_ext
from benchmarks.arguments import DTYPES, dtypes_of, on_cpu, positive, shape
from benchmarks.ceilings import matmul_name, name_of
from benchmarks.checks import Expected, Result
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.peers import OURS, Peer, ours
from benchmarks.report import OF_MATMUL, Row
from benchmarks.timing import Candidate, Timings
from tests.oracle import Call

HEAD_DIMS: Sequence[int] = (64, 128, 256)
SEQLENS: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS: Sequence[int] = (1024, 8192)
TOKENS = 16384  # batch = tokens / seqlen
HIDDEN = 2048  # heads = hidden / head_dim
GQA_GROUP, GQA_HEAD_DIM = 4, 128
GQA_SEQLENS: Sequence[int] = (2048, 8192)
# (batch, seqlen, query heads, key heads, head_dim), and whether causal: fewer tiles of keys than keep all SMs busy.
FEW_KEY_HEADS = (
    ((1, 8192, 8, 1, 128), (False,)),
    ((1, 4096, 16, 4, 128), (True,)),
    ((2, 2048, 32, 4, 128), (True,)),
    ((1, 4096, 64, 8, 64), (True,)),
    ((1, 6007, 20, 4, 128), (False,)),
    ((1, 16384, 28, 4, 128), (True,)),
    ((1, 8192, 32, 8, 128), (True,)),
    ((1, 32768, 8, 1, 128), (False, True)),
    ((8, 1024, 40, 8, 128), (False, True)),
    ((2, 5000, 9, 3, 256), (False, True)),
)
SHORT_SEQLENS: Sequence[int] = (64, 128, 197, 256, 384)
SHORT_TOKENS, SHORT_HEADS, SHORT_HEAD_DIM = 8192, 16, 64
FLOAT32_HEAD_DIMS: Sequence[int] = (64, 128, 256)
FLOAT32_SEQLENS: Sequence[int] = (1024, 4096)
CPU_DTYPES = (torch.float32, torch.bfloat16)
CPU_SHAPES = ((1, 2048, 8, 8, 64), (4, 512, 8, 8, 64), (1, 2048, 8, 8, 128))
BACKWARD_OVER_FORWARD = 2.5
INPUTS = ("q", "k", "v")


@dataclass(frozen=True)
class Problem:
    """Self-attention; ``dtype`` is one of ``arguments.DTYPES``."""

    batch: int
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool
    dtype: str
    zeros: bool = False  # all inputs are

    @property
    def heading(self) -> str:
        grouped = "" if self.heads_q == self.heads_kv else f", {self.heads_q} query heads over {self.heads_kv}"
        zeros = ", zeros" if self.zeros else ""
        return f"{self.dtype}, head_dim {self.head_dim}{grouped}, {'causal' if self.causal else 'full'}{zeros}"

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.seqlen}"

    def flops(self, direction: str) -> float:
        forward = 4.0 * self.batch * self.heads_q * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)
        return forward * (BACKWARD_OVER_FORWARD if direction == "backward" else 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=positive, nargs="+", metavar="N", help="default: 64 128 256")
    parser.add_argument("--seqlen", type=positive, nargs="+", metavar="N", help="default: 512 ... 16384")
    parser.add_argument("--tokens", type=positive, default=TOKENS, help="batch x seqlen (%(default)s)")
    parser.add_argument("--hidden", type=positive, default=HIDDEN, help="heads x head_dim (%(default)s)")
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", dest="masks", action="store_const", const=[True], default=[False, True])
    masks.add_argument("--full", dest="masks", action="store_const", const=[False])
    parser.add_argument("--shapes", type=shape, nargs="+", metavar="BxSxHxD", help="these and not the table; H = Q/KV")
    parser.add_argument("--zeros", action="store_true", help="inputs of zeros, whose products take little power")


def dtypes(chosen: argparse.Namespace) -> Sequence[torch.dtype]:
    """The default table has rows of more than one."""
    return [DTYPES[name] for name in dict.fromkeys(problem.dtype for problem in problems(chosen))]


def work(directions: Sequence[str], chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    asked = [replace(problem, zeros=chosen.zeros) for problem in problems(chosen)]
    return [partial(measure, problem, directions, setting) for problem in asked]


def problems(chosen: argparse.Namespace) -> list[Problem]:
    """What was asked for; else the training table with grouped heads and some float32, or the CPU's.

    The backward's has rows with few key heads, and with short sequences, besides.
    """
    asked = chosen.head_dim is not None or chosen.seqlen is not None
    if chosen.shapes is not None:
        return shape_table(chosen.shapes, chosen.masks, dtypes_of(chosen))
    if on_cpu(chosen) and not asked:
        return shape_table(CPU_SHAPES, chosen.masks, dtypes_of(chosen) if chosen.dtype else CPU_DTYPES)
    head_dims, seqlens = chosen.head_dim or HEAD_DIMS, chosen.seqlen or (QUICK_SEQLENS if chosen.quick else SEQLENS)
    sizes = {"masks": chosen.masks, "tokens": chosen.tokens, "hidden": chosen.hidden}
    found = [row for dtype in dtypes_of(chosen) for row in training_table(head_dims, seqlens, dtype=dtype, **sizes)]
    if asked:
        return found
    kept = slice(int(chosen.quick), None)
    for dtype in dtypes_of(chosen):
        found += training_table([GQA_HEAD_DIM], GQA_SEQLENS[kept], dtype=dtype, group=GQA_GROUP, **sizes)
    if chosen.benchmark == "backward" and not chosen.quick:
        found += [row for dtype in dtypes_of(chosen) for row in few_and_short(chosen.masks, dtype)]
    if chosen.dtype is None:
        found += training_table(FLOAT32_HEAD_DIMS[kept], FLOAT32_SEQLENS[kept], dtype=torch.float32, **sizes)
    return found


def training_table(
    head_dims: Sequence[int],
    seqlens: Sequence[int],
    *,
    masks: Sequence[bool],
    dtype: torch.dtype,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    group: int = 1,
) -> list[Problem]:
    """The same tokens and the same width, cut differently; ``group`` query heads share a key head."""
    return [
        Problem(tokens // seqlen, seqlen, heads, heads // group, head_dim, causal, name_of(dtype))
        for head_dim, heads in ((head_dim, hidden // head_dim) for head_dim in head_dims)
        for causal in masks
        for seqlen in seqlens
        if seqlen <= tokens and heads % group == 0 and heads > 0
    ]


def few_and_short(masks: Sequence[bool], dtype: torch.dtype) -> list[Problem]:
    """What the backward, whose CTAs go along the keys, finds hard to spread over a GPU."""

    def rows(shape: tuple[int, int, int, int, int], of_shape: Sequence[bool]) -> list[Problem]:
        return shape_table([shape], [causal for causal in of_shape if causal in masks], [dtype])

    heads = (SHORT_HEADS, SHORT_HEADS, SHORT_HEAD_DIM)
    few = [row for shape, of_shape in FEW_KEY_HEADS for row in rows(shape, of_shape)]
    return few + [row for seqlen in SHORT_SEQLENS for row in rows((SHORT_TOKENS // seqlen, seqlen, *heads), (False,))]


def shape_table(
    shapes: Iterable[tuple[int, int, int, int, int]], masks: Sequence[bool], dtypes: Sequence[torch.dtype]
) -> list[Problem]:
    """``shapes``: (batch, seqlen, heads_q, heads_kv, head_dim)."""
    return [Problem(*shape, causal, name_of(dtype)) for dtype in dtypes for shape in shapes for causal in masks]


def measure(problem: Problem, directions: Sequence[str], setting: Setting) -> list[Row]:
    """A row for each direction."""
    call = make_call(problem, setting.device, with_gradients="backward" in directions)
    expected = Expected(call, INPUTS if "backward" in directions else ())
    comparisons = {direction: Comparison() for direction in directions}
    for name, peer in {OURS: ours(), **setting.peers}.items():
        add(name, peer, call, expected, comparisons)
    return [
        row_of(problem, direction, comparison.measure(setting), comparison.missing)
        for direction, comparison in comparisons.items()
    ]


def make_call(problem: Problem, device: torch.device, with_gradients: bool) -> Call:
    """Random normal numbers, or zeros."""
    kv_shape = (problem.batch, problem.seqlen, problem.heads_kv, problem.head_dim)
    q_shape = (problem.batch, problem.seqlen, problem.heads_q, problem.head_dim)
    dtype, shapes = DTYPES[problem.dtype], (q_shape, kv_shape, kv_shape, q_shape)
    make = torch.zeros if problem.zeros else torch.randn
    q, k, v, grad = (make(shape, device=device, dtype=dtype) for shape in shapes)
    for leaf in (q, k, v):
        leaf.requires_grad_(with_gradients)
    return Call(q, k, v, {"causal": problem.causal}, grad_out=grad if with_gradients else None)


def add(name: str, peer: Peer, call: Call, expected: Expected, comparisons: dict[str, Comparison]) -> None:
    """Checks the peer's output and gradients, and adds it for the directions."""
    if reason := obstacle(name, peer, call, list(comparisons)):
        for comparison in comparisons.values():
            comparison.leave_out(name, reason)
        return
    kept: list[Tensor] = []

    def attend() -> Tensor:
        return peer.attention(call.q, call.k, call.v, bool(call.options["causal"]))

    def attend_without_grad() -> Tensor:
        with torch.no_grad():
            return attend()

    def differentiate() -> tuple[Tensor, ...]:
        return torch.autograd.grad(kept[0], (call.q, call.k, call.v), call.grad_out, retain_graph=True)

    def out_and_gradients() -> Result:
        with peer.around():
            kept[:] = [attend()]
            return {"out": kept[0].detach(), **dict(zip(("dq", "dk", "dv"), differentiate(), strict=True))}

    calls: dict[str, tuple[Callable[[], object], Callable[[], Result] | None]] = {
        "forward": (attend_without_grad, None),
        "backward": (differentiate, out_and_gradients),
    }
    for direction, comparison in comparisons.items():
        function, result = calls[direction]
        comparison.add(name, Candidate(function, peer.around), expected, result, required=name == OURS)


def obstacle(name: str, peer: Peer, call: Call, directions: Iterable[str]) -> str | None:
    """Why the peer is not asked at all."""
    if peer.is_too_large(call.q, call.k):
        return "its scores would take more than 2 GiB"
    if name == OURS:
        for direction in directions:
            supported, reason = flash_ext.supports(call.q, call.k, call.v, operation=direction, **call.options)
            if not supported:
                return reason
    return None


def row_of(problem: Problem, direction: str, ms: Timings, missing: dict[str, str]) -> Row:
    flops = problem.flops(direction)
    return Row.timed(
        ms,
        table=f"{direction}, {problem.heading}",
        label=problem.label,
        problem={**fields_of(problem), "direction": direction},
        shown={name: flops / value / 1e9 for name, value in ms.medians().items()},
        missing=missing,
    )


def fields_of(problem: Problem) -> dict[str, object]:
    """As records have them. Those from before there was ``zeros`` compare with new ones."""
    return {name: value for name, value in asdict(problem).items() if name != "zeros" or value}


def add_ceiling(rows: Iterable[Row], ceilings: dict[str, float]) -> None:
    """How much of the matrix product's rate ours reaches."""
    for row in rows:
        ceiling = ceilings.get(matmul_name(row.problem["dtype"]))
        if OURS in row.shown and ceiling:
            row.figures[OF_MATMUL] = 100 * row.shown[OURS] / ceiling
