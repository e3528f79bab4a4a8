"""``masks``: microseconds that a ``BlockMask`` takes to build, to transpose and to combine.

The figure is the time of the host, GPU work left unfinished: "operators" says how many are dispatched, one or some
tens. "device us" is what these take on a GPU, replayed as a CUDA graph; on a CPU both are the same work. Each mask is
checked, of a short sequence, before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import host
from benchmarks.arguments import on_cpu, positive
from benchmarks.checks import WrongOutput
from benchmarks.comparison import Setting, Work
from benchmarks.peers import OURS
from benchmarks.report import Row
from benchmarks.timing import Candidate, Timings, take_turns
from flash_ext import BlockMask

SEQLEN, CPU_SEQLEN, CHECKED_SEQLEN = 65536, 2048, 500
BLOCK = (128, 128)
REACH, SINKS, DENSITY = 1024, 4, 0.25
CALLS = 20

Rule = Callable[[Tensor, Tensor], Tensor]  # visibility of queries (n, 1) and keys (n)


@dataclass(frozen=True)
class Builder:
    """What is timed; ``prepare`` makes its inputs, for a length and a device."""

    name: str
    prepare: Callable[[int, torch.device], Callable[[], BlockMask]]
    rule: Callable[[int], Rule]  # of a length: what the mask shows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=positive, nargs="+", metavar="N", help=f"default: {SEQLEN}")
    parser.add_argument("--calls", type=positive, default=CALLS, help="in a row (%(default)s)")


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    lengths = chosen.seqlen or [CPU_SEQLEN if on_cpu(chosen) else SEQLEN]
    return [partial(measure, builder, n, chosen.calls, setting) for n in lengths for builder in BUILDERS]


def measure(builder: Builder, seqlen: int, calls: int, setting: Setting) -> list[Row]:
    check(builder, setting.device)
    build = builder.prepare(seqlen, setting.device)
    candidate = Candidate(build)
    repeated = {OURS: setting.clock.repeatable(candidate)}
    on_device = Timings(take_turns(setting.clock, repeated, setting.effort)).scaled(1e3)
    mask = build()
    row = Row.timed(
        Timings(host.take_turns({OURS: candidate}, calls, setting.device)),
        table=f"{seqlen} tokens, blocks of {BLOCK[0]} x {BLOCK[1]}",
        label=builder.name,
        problem={"seqlen": seqlen, "block": list(BLOCK), "builder": builder.name, "calls": calls},
        figures={"device us": on_device.medians()[OURS], "operators": dispatched(build), "blocks": mask.num_blocks},
    )
    return [row]


def check(builder: Builder, device: torch.device) -> None:
    shown = builder.prepare(CHECKED_SEQLEN, device)().to_dense()[0, 0]
    token = torch.arange(CHECKED_SEQLEN, device=device)
    if not torch.equal(shown, builder.rule(CHECKED_SEQLEN)(token[:, None], token).expand_as(shown)):
        raise WrongOutput(f"{builder.name} shows other pairs than it has to")


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operator(*args, **(kwargs or {}))


def dispatched(build: Callable[[], object]) -> int:
    """How many operators a call dispatches, views among them."""
    with _Counter() as counter:
        build()
    return counter.count


# What is built


def _causal(n: int, device: torch.device) -> Callable[[], BlockMask]:
    return lambda: BlockMask.causal(n, n, BLOCK, device=device)


def _window(n: int, device: torch.device) -> Callable[[], BlockMask]:
    return lambda: BlockMask.sliding_window(n, n, (REACH, 0), block_size=BLOCK, device=device)


def _window_and_sinks(n: int, device: torch.device) -> Callable[[], BlockMask]:
    return lambda: BlockMask.sliding_window(n, n, (REACH, 0), SINKS, BLOCK, device=device)


def _bounds(n: int) -> list[int]:
    return [0, n // 5, n // 4, 3 * n // 4, n]


def _documents(n: int, device: torch.device, causal: bool) -> Callable[[], BlockMask]:
    cu_seqlens = torch.tensor(_bounds(n), dtype=torch.int32, device=device)
    return lambda: BlockMask.documents(cu_seqlens, n, BLOCK, causal=causal)


def _same_document(n: int) -> Rule:
    def visible(i: Tensor, j: Tensor) -> Tensor:
        bounds = torch.tensor(_bounds(n)[1:], device=i.device)
        return torch.searchsorted(bounds, i.contiguous(), right=True) == torch.searchsorted(bounds, j, right=True)

    return visible


def _and_causal(rule: Rule) -> Rule:
    return lambda i, j: rule(i, j) & (j <= i)


def _prefix(n: int, device: torch.device) -> Callable[[], BlockMask]:
    prefix = torch.tensor([n // 3], dtype=torch.int32, device=device)
    return lambda: BlockMask.prefix_lm(prefix, n, n, BLOCK)


def _spans(n: int, device: torch.device) -> Callable[[], BlockMask]:
    spans = torch.tensor([[n // 5, n // 4], [n // 2, 3 * n // 4]], dtype=torch.int32, device=device)
    return lambda: BlockMask.bidirectional_spans(spans, n, BLOCK)


def _in_spans(n: int) -> Rule:
    def visible(i: Tensor, j: Tensor) -> Tensor:
        spans = ((n // 5, n // 4), (n // 2, 3 * n // 4))
        together = [(i >= begin) & (i < end) & (j >= begin) & (j < end) for begin, end in spans]
        return (j <= i) | together[0] | together[1]

    return visible


def _some_blocks(n: int, device: torch.device) -> Tensor:
    """Every fourth, as it were at random."""
    number = torch.arange(-(-n // BLOCK[0]), device=device)
    return (5 * number[:, None] + 3 * number) % 7 < 7 * DENSITY


def _from_blocks(n: int, device: torch.device) -> Callable[[], BlockMask]:
    blocks = _some_blocks(n, device)
    return lambda: BlockMask.from_blocks(blocks, n, n, BLOCK)


def _in_blocks(n: int) -> Rule:
    return lambda i, j: _some_blocks(n, i.device)[i // BLOCK[0], j // BLOCK[1]]


def _transpose(of: Builder) -> Builder:
    rule: Callable[[int], Rule] = lambda n: lambda i, j: of.rule(n)(j[:, None], i[:, 0]).T  # noqa: E731
    return Builder(f"{of.name}, transposed", lambda n, device: of.prepare(n, device)().transpose, rule)


def _both(first: Builder, second: Builder) -> Builder:
    def prepare(n: int, device: torch.device) -> Callable[[], BlockMask]:
        masks = first.prepare(n, device)(), second.prepare(n, device)()
        return lambda: masks[0] & masks[1]

    rule: Callable[[int], Rule] = lambda n: lambda i, j: first.rule(n)(i, j) & second.rule(n)(i, j)  # noqa: E731
    return Builder(f"{first.name} & {second.name}", prepare, rule)


CAUSAL = Builder("causal", _causal, lambda n: lambda i, j: j <= i)
BLOCKS = Builder("from_blocks", _from_blocks, _in_blocks)
WINDOW = Builder("window", _window, lambda n: lambda i, j: (j <= i) & (j >= i - REACH))
DOCUMENTS = Builder("documents", partial(_documents, causal=False), _same_document)
BUILDERS = [
    CAUSAL,
    WINDOW,
    Builder("window and sinks", _window_and_sinks, lambda n: lambda i, j: (j <= i) & ((j >= i - REACH) | (j < SINKS))),
    DOCUMENTS,
    Builder("causal documents", partial(_documents, causal=True), lambda n: _and_causal(_same_document(n))),
    Builder("prefix_lm", _prefix, lambda n: lambda i, j: (j <= i) | (j < n // 3)),
    Builder("bidirectional_spans", _spans, _in_spans),
    BLOCKS,
    _transpose(BLOCKS),
    _transpose(CAUSAL),
    _both(CAUSAL, BLOCKS),
    _both(WINDOW, DOCUMENTS),
]  # fmt: skip
