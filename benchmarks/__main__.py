"""How fast, beside whom, at what cost. Every output is checked before it is timed.

python -m benchmarks forward                       the training table on a GPU, or a small one on a CPU
python -m benchmarks backward --head-dim 128 --causal --json run.json --plot run.png
python -m benchmarks training                      both, on the same tensors
python -m benchmarks shapes | decode | options | sparse | masks | module | encoder | models | memory | host
python -m benchmarks compare before.json after.json
python -m benchmarks.builds before/ after/ backward      two builds in turns
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import (
    decode,
    encoder,
    forward_backward,
    host,
    masks,
    memory,
    models,
    module,
    options,
    report,
    shapes,
    sparse,
)
from benchmarks.arguments import common_arguments, effort_of, settle
from benchmarks.ceilings import higher, measure_ceilings
from benchmarks.comparison import Setting, Work
from benchmarks.gpu_state import GpuState
from benchmarks.provenance import load_average, provenance
from benchmarks.timing import Clock, Effort, Progress, make_clock


class Benchmark(NamedTuple):
    """What can be asked: ``work`` turns arguments into pieces of work, each of which returns rows."""

    help: str
    unit: str  # of what is measured
    shown_unit: str
    label_title: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    work: Callable[[argparse.Namespace, Setting], list[Work]]
    ceiling_dtypes: Callable[[argparse.Namespace], Iterable[torch.dtype]] | None = None
    also_peers: Sequence[str] = ()  # that it asks besides the usual ones
    default_peers: Sequence[str] | None = None  # that it asks instead of the usual ones
    own_peers: Mapping[str, str] = {}  # titles of those that it brings itself, whatever --peers says
    packages: Sequence[str] = ()  # that it uses, beside those of the peers
    asks_peers: bool = True
    loops: bool = True  # takes --sustained


def _training(help: str, *directions: str) -> Benchmark:
    work = partial(forward_backward.work, directions)
    columns = ("ms", "TFLOP/s", "batch x seqlen")
    return Benchmark(help, *columns, forward_backward.add_arguments, work, forward_backward.dtypes)


BENCHMARKS = {
    "forward": _training("TFLOP/s of the forward", "forward"),
    "backward": _training("TFLOP/s of the backward", "backward"),
    "training": _training("both, on the same tensors", "forward", "backward"),
    "shapes": Benchmark(
        "TFLOP/s of short, chunked, cached, packed and wide calls", "ms", "TFLOP/s", "shape", shapes.add_arguments,
        shapes.work, shapes.dtypes,
    ),
    "decode": Benchmark(
        "time of one token over a KV cache", "us", "us", "batch x context", decode.add_arguments, decode.work,
        decode.dtypes, also_peers=decode.ALSO_PEERS,
    ),
    "options": Benchmark(
        "what bias, masks, dropout ... cost", "ms", "ms", "option", options.add_arguments, options.work, options.dtypes,
        also_peers=options.ALSO_PEERS,
    ),
    "sparse": Benchmark(
        "block masks, by their density", "ms", "ms", "mask", sparse.add_arguments, sparse.work, sparse.dtypes,
        also_peers=sparse.ALSO_PEERS,
    ),
    "masks": Benchmark(
        "CPU and device time of building block masks", "us", "us", "mask", masks.add_arguments, masks.work,
        asks_peers=False, loops=False,
    ),
    "module": Benchmark(
        "nn.MultiheadAttention as people call it", "ms", "ms", "call", module.add_arguments, module.work,
        own_peers=module.PEERS, asks_peers=False,
    ),
    "encoder": Benchmark(
        "an evaluated nn.TransformerEncoder", "ms", "ms", "batch x seqlen, embed_dim / heads", encoder.add_arguments,
        encoder.work, own_peers=encoder.PEERS, asks_peers=False,
    ),
    "models": Benchmark(
        "a training step of whole models that call SDPA", "ms", "ms", "model", models.add_arguments, models.work,
        default_peers=models.PACKAGES_IN_PLACE, own_peers=models.PEERS, packages=models.PACKAGES, asks_peers=False,
    ),
    "memory": Benchmark(
        "peak memory over the sequence length", "MiB", "MiB", "seqlen", memory.add_arguments, memory.work,
        own_peers={memory.UNFUSED_NAME: memory.UNFUSED.title}, loops=False,
    ),
    "host": Benchmark(
        "CPU time of one call", "us", "us", "call", host.add_arguments, host.work, own_peers=host.PEERS, loops=False
    ),
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subparsers = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        common = common_arguments(benchmark.asks_peers, benchmark.loops)
        benchmark.add_arguments(subparsers.add_parser(name, parents=[common], help=benchmark.help))
    sub = subparsers.add_parser("compare", help="two records of the same benchmark")
    sub.add_argument("before", type=Path)
    sub.add_argument("after", type=Path)
    sub.add_argument("--at-least", type=float, metavar="RATIO", help="exit with 1 if a row is below, e.g. 0.97")
    return parser


@dataclass(frozen=True)
class Pace:
    """How a run goes on: here, as fast as it can."""

    title: str = ""  # before the benchmark's in lines of progress
    effort: Effort | None = None  # None: as the arguments say

    def clock_of(self, clock: Clock) -> Clock:
        return clock


def run(chosen: argparse.Namespace, command: Sequence[str], pace: Pace = Pace()) -> report.Record:
    """Measures what was asked for, and the ceilings before and after."""
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")  # autograd's thread, once, harmless
    torch.manual_seed(chosen.seed)
    benchmark = BENCHMARKS[chosen.benchmark]
    clock = pace.clock_of(make_clock(chosen.device))
    dtypes = None if benchmark.ceiling_dtypes is None else list(benchmark.ceiling_dtypes(chosen))
    effort, sustained_s = pace.effort or effort_of(chosen), chosen.sustained if benchmark.loops else None
    rows: list[report.Row] = []
    found: dict[str, float] = {}
    load = load_average()
    with closing(Progress(pace.title + chosen.benchmark)) as progress, GpuState(chosen.device) as state:
        if dtypes is not None:
            progress.say("ceilings of the machine")
            found = measure_ceilings(clock, chosen.device, dtypes)
        setting = Setting(chosen.device, clock, effort, chosen.peers, found, sustained_s)
        work = benchmark.work(chosen, setting)
        progress.expect(len(work))
        for piece in work:
            rows += piece()
            progress.update()
        if dtypes is not None:
            progress.say("ceilings again")
            found = higher(found, measure_ceilings(clock, chosen.device, dtypes))
    if found:
        forward_backward.add_ceiling(rows, found)
    origin = provenance(
        command, chosen.device, chosen.peers, benchmark.own_peers, effort, chosen.trial, benchmark.packages
    )
    origin |= {"sustained_s": sustained_s, "gpu_state": state.summary(), "load_average": load}
    return report.Record(
        chosen.benchmark, benchmark.unit, benchmark.shown_unit, benchmark.label_title, origin, found, rows
    )


def main(arguments: Sequence[str] | None = None, preset: Sequence[str] = (), module: str = "benchmarks") -> int:
    """``preset``: arguments that ``module`` stands for."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    chosen = parser.parse_args([*preset, *arguments])
    if chosen.benchmark == "compare":
        return compare(parser, chosen)
    settle(parser, chosen, BENCHMARKS[chosen.benchmark].also_peers, BENCHMARKS[chosen.benchmark].default_peers)
    record = run(chosen, [module, *arguments])
    print(report.markdown(record))
    refused = None if chosen.json is None or chosen.trial else report.why_no_record(record)
    if chosen.json is not None:
        record.provenance["trial"] |= refused is not None
        record.write(chosen.json)
    if chosen.plot is not None:
        report.plot(record, chosen.plot)
    if refused is not None:
        print(f"{chosen.json} is kept as a trial: {refused}", file=sys.stderr)
    return int(refused is not None)


def compare(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    try:
        text, smallest = report.compare(report.read(chosen.before), report.read(chosen.after))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(text)
    return int(chosen.at_least is not None and (smallest is None or smallest < chosen.at_least))


if __name__ == "__main__":
    sys.exit(main())
