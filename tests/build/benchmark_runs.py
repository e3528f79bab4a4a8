"""Benchmarks with sizes that take no time, and records that nobody measured."""

from __future__ import annotations

import argparse

import torch

from benchmarks.__main__ import main, make_parser
from benchmarks.report import Record, Row
from benchmarks.timing import Sample, Timings

QUICK = ["--device", "cpu", "--rounds", "2", "--trial"]
COMMANDS = {
    "forward": ["--shapes", "2x40x4/2x16", "--dtype", "float32", "bfloat16"],
    "backward": ["--head-dim", "16", "--seqlen", "16", "32", "--tokens", "64", "--hidden", "32", "--causal"],
    "training": ["--shapes", "1x33x2x16", "--full"],
    "shapes": [],  # those of a CPU are small
    "decode": ["--heads", "4/2", "--contexts", "2x48", "--head-dim", "16"],
    "options": ["--seqlen", "32", "--tokens", "64", "--hidden", "32", "--head-dim", "16"],
    "sparse": ["--heads", "1", "--densities", "0.3", "1"],
    "masks": ["--seqlen", "300", "--calls", "1"],
    "module": ["--sizes", "2x24x32/4"],
    "encoder": ["--shapes", "2x8x16/2", "2x8x16/2p", "--layers", "1"],
    "models": ["--models", "DiT"],
    "memory": ["--seqlen", "64", "--heads", "1", "--head-dim", "16"],
    "host": ["--calls", "2"],
}


def run(benchmark: str, *more: str) -> int:
    return main([benchmark, *QUICK, *COMMANDS[benchmark], *more])


def chosen(*arguments: str, device: str = "cuda") -> argparse.Namespace:
    namespace = make_parser().parse_args(arguments)
    namespace.device = torch.device(device)
    return namespace


def row(label: str = "1", table: str = "t", **measured: float) -> Row:
    return Row(table, label, {"seqlen": 1}, measured)


def timings(**values: list[float]) -> Timings:
    return Timings({name: Sample(tuple(taken)) for name, taken in values.items()})


def record(*rows: Row, benchmark: str = "forward") -> Record:
    origin = {
        "device": "cpu",
        "cpu": "c",
        "threads": 1,
        "isa": "i",
        "torch": "2",
        "commit": None,
        "date": "d",
        "peers": {},
    }
    return Record(benchmark, "ms", "ms", "seqlen", {**origin, "command": "python"}, {}, list(rows))
