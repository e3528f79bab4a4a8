"""Arguments that benchmarks have in common, and what they mean."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.peers import PEERS, find_peers
from benchmarks.provenance import RECORD_ROUNDS, why_no_record
from benchmarks.timing import Effort

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EFFORT = Effort(most=30, fewest=RECORD_ROUNDS, budget_ms=100)
QUICK_EFFORT = Effort(most=15, fewest=3, budget_ms=60)
SUSTAINED_S = 1.0
PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def positive(argument: str) -> int:
    number = int(argument)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def head_pair(argument: str) -> tuple[int, int]:
    """(heads_q, heads_kv) from Q/KV, or from a number that both have."""
    heads_q, _, heads_kv = argument.partition("/")
    pair = positive(heads_q), positive(heads_kv or heads_q)
    if pair[0] % pair[1] != 0:
        raise argparse.ArgumentTypeError(f"query heads must be a multiple of key heads, got {argument}")
    return pair


def shape(argument: str) -> tuple[int, int, int, int, int]:
    """(batch, seqlen, heads_q, heads_kv, head_dim) from BxSxHxD or BxSxQ/KVxD."""
    try:
        batch, seqlen, heads, head_dim = argument.split("x")
        return positive(batch), positive(seqlen), *head_pair(heads), positive(head_dim)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 1x2048x16/4x128, got {argument}") from None


def batch_and_seqlen(argument: str) -> tuple[int, int]:
    try:
        batch, seqlen = argument.split("x")
        return positive(batch), positive(seqlen)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 8x8192, got {argument}") from None


def module_size(argument: str) -> tuple[int, int, int, int]:
    """(batch, seqlen, embed_dim, heads) from BxSxE/H."""
    try:
        sizes, heads = argument.split("/")
        batch, seqlen, embed_dim = map(positive, sizes.split("x"))
        found = batch, seqlen, embed_dim, positive(heads)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 4x4096x1024/16, got {argument}") from None
    if found[2] % found[3] != 0:
        raise argparse.ArgumentTypeError(f"the embedding must be a multiple of the heads, got {argument}")
    return found


def seconds(argument: str) -> float:
    number = float(argument)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {number}")
    return number


def common_arguments(with_peers: bool, with_loops: bool) -> argparse.ArgumentParser:
    """What every benchmark that measures takes; who else takes part, and how it is timed, is settled in some."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    common.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), help="default: bfloat16; on a CPU float32")
    if with_peers:
        common.add_argument("--peers", nargs="*", choices=tuple(PEERS), help="default: all that can be imported")
    common.add_argument("--quick", action="store_true", help="fewer rows and rounds: for a look, not for a record")
    common.add_argument("--rounds", type=positive, help="timed calls of each candidate, at most")
    if with_loops:
        common.add_argument(
            "--sustained", type=seconds, nargs="?", const=SUSTAINED_S, metavar="S",
            help="also time each candidate in loops of S seconds without pause (%(const)s)",
        )  # fmt: skip
    common.add_argument("--threads", type=positive, help="of torch, on a CPU")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--allow-tf32", action="store_true", help="let float32 matrix products use TF32, all of them")
    common.add_argument("--json", type=Path, metavar="FILE", help="keep the run here, if it can be a record")
    common.add_argument("--trial", action="store_true", help="keep it although it is none: uncommitted, or few rounds")
    common.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    return common


def settle(
    parser: argparse.ArgumentParser,
    chosen: argparse.Namespace,
    also: Sequence[str] = (),
    default: Sequence[str] | None = None,
) -> None:
    """Settles device, peers and torch's settings; ends with an error for what would otherwise fail after the run.

    Args:
        also: peers that the benchmark asks besides the usual ones, where they can be had.
        default: those that it asks instead of the usual ones, likewise.
    """
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU")
    chosen.device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_files(parser, chosen, effort_of(chosen))
    if chosen.plot is not None:
        if chosen.plot.suffix not in PLOT_SUFFIXES:
            parser.error(f"argument --plot: must end in {', '.join(PLOT_SUFFIXES)}, got {chosen.plot}")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("argument --plot: needs matplotlib, which is not installed: pip install matplotlib")
    try:
        chosen.peers = find_peers(getattr(chosen, "peers", ()), chosen.device, also, default)
    except ValueError as error:
        parser.error(f"argument --peers: {error}")
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    torch.set_float32_matmul_precision("high" if chosen.allow_tf32 else "highest")


def check_files(parser: argparse.ArgumentParser, chosen: argparse.Namespace, effort: Effort) -> None:
    """Ends with an error where the run could not be kept where it should be, or would be no record."""
    for option in ("json", "plot"):
        path = getattr(chosen, option, None)
        if path is not None and not path.parent.is_dir():
            parser.error(f"argument --{option}: there is no folder {path.parent}")
    if chosen.json is not None and not chosen.trial and (reason := why_no_record(effort)):
        parser.error(f"argument --json: this would be no record: {reason} (--trial keeps it, marked as a trial)")


def on_cpu(chosen: argparse.Namespace) -> bool:
    return bool(chosen.device.type == "cpu")


def dtypes_of(chosen: argparse.Namespace) -> Sequence[torch.dtype]:
    if chosen.dtype is not None:
        return [DTYPES[name] for name in chosen.dtype]
    return [torch.float32 if on_cpu(chosen) else torch.bfloat16]


def effort_of(chosen: argparse.Namespace) -> Effort:
    effort = QUICK_EFFORT if chosen.quick else EFFORT
    most = chosen.rounds or effort.most
    return Effort(most, min(effort.fewest, most), effort.budget_ms)
