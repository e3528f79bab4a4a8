"""``sparse``: how long a call with a block mask takes, beside the dense call, FlexAttention with the same blocks, and
torch's SDPA with the mask as a dense tensor, which it works on in full, up to 8192 tokens.

"efficiency" is density times the dense call's time over the masked call's: 1 says that blocks which are not visited
cost nothing. The dense call takes turns with each row. A band stands there as blocks and as ``window_size``; its
density counts blocks that are visited, and for the window pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

import flash_ext
from benchmarks.arguments import dtypes_of, on_cpu, positive
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.options import PLAIN, Size, Variant, add, expected_of, timed_row, with_options
from benchmarks.peers import OURS, ours
from benchmarks.report import Row
from benchmarks.timing import Timings
from tests.oracle import Call

DIRECTIONS = ("forward", "backward")
ALSO_PEERS = ("flex",)
DENSITIES = (0.05, 0.1, 0.25, 0.5, 1.0)
CPU_DENSITIES = (0.1, 0.5)
HEADS, BLOCK = 16, 128
OTHER_BLOCKS = ((64, 64), (128, 64), (64, 128), (256, 128))  # queries and keys of a block; at one density, one shape
OTHER_DENSITY = 0.25


class Shape(NamedTuple):
    seqlen: int
    head_dim: int
    reach: int  # of the band, on each side


SHAPES = (Shape(8192, 128, 1024), Shape(32768, 128, 1024), Shape(16384, 64, 1024))
CPU_SHAPES = (Shape(512, 64, 128),)
CPU_HEADS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="default: both")
    parser.add_argument("--seqlen", type=positive, nargs="+", metavar="N", help="only these of the shapes")
    parser.add_argument("--heads", type=positive, help=f"default: {HEADS}")
    parser.add_argument("--densities", type=float, nargs="+", metavar="SHARE", help="of blocks")


dtypes = dtypes_of


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    cpu = on_cpu(chosen)
    heads = chosen.heads or (CPU_HEADS if cpu else HEADS)
    densities = chosen.densities or (CPU_DENSITIES if cpu else DENSITIES)
    others = OTHER_BLOCKS if chosen.densities is None else ()
    shapes = [s for s in (CPU_SHAPES if cpu else SHAPES) if chosen.seqlen is None or s.seqlen in chosen.seqlen]
    return [
        partial(measure, shape, heads, dtype, direction, densities, others, setting)
        for dtype in dtypes_of(chosen)
        for shape in shapes
        for direction in chosen.directions
    ]


def measure(
    shape: Shape,
    heads: int,
    dtype: torch.dtype,
    direction: str,
    densities: Sequence[float],
    others: Sequence[tuple[int, int]],
    setting: Setting,
) -> list[Row]:
    """A row for each mask; in each the dense call, the masked one and the peers take turns."""
    size = Size(1, shape.seqlen, heads, shape.head_dim, dtype, setting.device)
    q, k, v, grad = (size.random(1, shape.seqlen, heads, shape.head_dim) for _ in range(4))
    # One head is checked.
    dense = Variant(PLAIN, Call(q, k, v, grad_out=grad), heads_kv=(0,), batch_entries=1)
    blocks = [(density, (BLOCK, BLOCK)) for density in densities]
    if shape in (SHAPES[0], CPU_SHAPES[0]):
        blocks += [(OTHER_DENSITY, sizes) for sizes in others]
    rows = []
    for density, sizes in blocks:
        rows.append(measure_variant(size, direction, dense, random_blocks(dense, shape, density, sizes), setting))
    for variant in bands(dense, shape):
        rows.append(measure_variant(size, direction, dense, variant, setting))
    return rows


def random_blocks(dense: Variant, shape: Shape, density: float, sizes: tuple[int, int]) -> Variant:
    counts = (-(-shape.seqlen // size) for size in sizes)
    blocks = torch.rand(*counts, device=dense.call.q.device) < density
    mask = flash_ext.BlockMask.from_blocks(blocks, shape.seqlen, shape.seqlen, sizes)
    of_size = "" if sizes == (BLOCK, BLOCK) else f" of {sizes[0]} x {sizes[1]}"
    return with_blocks(dense, f"random blocks{of_size}, {100 * density:g} %", mask)


def bands(dense: Variant, shape: Shape) -> list[Variant]:
    """The same band as whole blocks, as a window of pairs, and as blocks of which those at its edges have bitmaps."""
    n, reach = shape.seqlen, shape.reach
    number = torch.arange(-(-n // BLOCK), device=dense.call.q.device)
    blocks = (number[:, None] - number).abs() <= reach // BLOCK
    mask = flash_ext.BlockMask.from_blocks(blocks, n, n, (BLOCK, BLOCK))
    pairs = sum(min(n, i + reach + 1) - max(0, i - reach) for i in range(n)) / n**2
    window = with_options(dense, f"window +-{reach}", window_size=(reach, reach))
    exact = flash_ext.BlockMask.sliding_window(n, n, (reach, reach), block_size=(BLOCK, BLOCK), device=number.device)
    return [
        with_blocks(dense, f"band of blocks, +-{reach}", mask),
        replace(window, pairs=pairs),
        replace(with_blocks(dense, f"window as blocks, +-{reach}", exact), pairs=pairs),
    ]


def with_blocks(dense: Variant, name: str, mask: flash_ext.BlockMask) -> Variant:
    call = replace(dense.call.with_options(block_mask=mask), block_visible=mask.to_dense())
    return replace(dense, name=name, call=call, pairs=mask.density)


def measure_variant(size: Size, direction: str, dense: Variant, variant: Variant, setting: Setting) -> Row:
    comparison = Comparison()
    add(comparison, PLAIN, ours(), dense, direction, expected_of(dense, direction))
    expected = expected_of(variant, direction)
    add(comparison, OURS, ours(), variant, direction, expected)
    for name, peer in setting.peers.items():
        add(comparison, name, peer, variant, direction, expected)
    return row_of(size, direction, variant, comparison.measure(setting), comparison)


def row_of(size: Size, direction: str, variant: Variant, timings: Timings, comparison: Comparison) -> Row:
    ms = timings.medians()
    figures = {"density": variant.pairs}
    if {PLAIN, OURS} <= ms.keys():
        figures |= {"dense ms": ms[PLAIN], "efficiency": variant.pairs * ms[PLAIN] / ms[OURS]}
    return timed_row(size, direction, variant, timings, figures, comparison.missing)
