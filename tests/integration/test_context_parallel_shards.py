"""Which shards travel, and which pieces of a call a rank computes: integers, without processes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import flash_ext
from flash_ext.integrations.distributed.gather import _visited_chunks
from flash_ext.integrations.distributed.shards import Problem, needed_chunks, pieces_by_chunk, pieces_of_shard
from tests.integration.rank_pool import LAYOUTS, split_of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_pieces_cover_what_is_visible(world: int, layout: str) -> None:
    """Every visible pair is in one piece, every other one in none, and what is not needed does not travel."""
    sizes = [(8, 8), (4, 12), (12, 4)]
    windows = [(-1, -1), (-1, 0), (0, 0), (3, 0), (9, 0), (2, 5), (-1, 3), (20, -1), (0, 7)]
    for (rows_q, rows_k), (left, right), top_left in itertools.product(sizes, windows, (False, True)):
        problem = Problem(world, layout, rows_q, rows_k, left, right, top_left)  # type: ignore[arg-type]
        i, j = torch.arange(world * rows_q)[:, None], torch.arange(world * rows_k)
        distance = j - i - problem.offset
        visible = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
        queries, keys = split_of(i[:, 0], world, layout), split_of(j, world, layout)
        for ways in (pieces_of_shard, lambda *x: [piece for piece, _ in pieces_by_chunk(*x)]):
            count = torch.zeros(visible.shape, dtype=torch.long)
            for rank, owner in itertools.product(range(world), repeat=2):
                chunks = keys[owner].chunk(problem.chunks_per_rank)
                here = [chunks[n] for n in needed_chunks(problem, rank, owner)]
                for piece in ways(problem, rank, owner):
                    rows, columns = queries[rank][piece.rows], torch.cat(here)[piece.keys]
                    a, b = torch.arange(len(rows))[:, None], torch.arange(len(columns))
                    inside = b - a - (0 if piece.top_left else len(columns) - len(rows))
                    lower, upper = piece.window
                    assert lower >= -1 and upper >= -1
                    shown = ((inside >= -lower) | (lower < 0)) & ((inside <= upper) | (upper < 0))
                    count[rows[:, None], columns] += shown
            assert torch.equal(count, visible.long()), (problem, ways)


def test_only_what_is_needed_travels() -> None:
    causal = Problem(4, "contiguous", 8, 8, -1, 0, False)
    assert [[needed_chunks(causal, r, o) for o in range(4)] for r in (0, 2)] == [
        [(0,), (), (), ()],
        [(0,), (0,), (0,), ()],
    ]
    window = Problem(4, "contiguous", 8, 8, 3, 0, False)
    assert [needed_chunks(window, 2, o) for o in range(4)] == [(), (0,), (0,), ()]
    zigzag = Problem(2, "zigzag", 8, 8, -1, 0, False)
    # Rank 0 has chunks 0 and 3, rank 1 has 1 and 2: rank 1 needs of rank 0 the first half alone.
    assert needed_chunks(zigzag, 1, 0) == (0,) and needed_chunks(zigzag, 0, 1) == (0, 1)
    assert len(pieces_of_shard(zigzag, 0, 1)) == len(pieces_of_shard(zigzag, 1, 0)) == 1


@pytest.mark.parametrize("top_left", [False, True])
def test_only_what_is_needed_of_packed_sequences_travels(top_left: bool) -> None:
    """Where sequences begin the host does not know; a window reaches as far in each of them."""
    window = Problem(4, "contiguous", 8, 8, 5, 0, top_left, packed=True)
    assert [needed_chunks(window, 2, o) for o in range(4)] == [(), (0,), (0,), ()]
    wider = replace(window, left=9)
    assert [needed_chunks(wider, 2, o) for o in range(4)] == [(0,), (0,), (0,), ()]
    assert [needed_chunks(replace(window, left=-1), 2, o) for o in range(4)] == [(0,), (0,), (0,), ()]
    assert [needed_chunks(replace(window, left=-1, right=-1), 0, o) for o in range(4)] == [(0,)] * 4
    zigzag = replace(window, size=2, layout="zigzag", left=4)
    assert needed_chunks(zigzag, 0, 1) == (1,) and needed_chunks(zigzag, 1, 0) == (0,)
    # Where a sequence of queries has its keys the host does not know.
    other = replace(window, same_sequences=False, top_left=False)
    assert [needed_chunks(other, 0, o) for o in range(4)] == [(0,)] * 4


def test_visited_chunks_of_a_block_mask() -> None:
    visible = torch.rand(2, 3, 256, 256) < 0.01
    visible &= (torch.rand(2, 3, 8, 8) < 0.2).repeat_interleave(32, 2).repeat_interleave(32, 3)
    mask = flash_ext.BlockMask.from_dense(visible, (32, 96))
    problem = Problem(4, "contiguous", 64, 64, -1, -1, False)
    blocks = torch.nn.functional.pad(visible, (0, 32)).view(2, 3, 8, 32, 3, 96).any(5).any(3)  # as the kernel visits
    keys = blocks.repeat_interleave(96, 3)[..., :256].view(2, 3, 4, 2, 4, 64)
    assert _visited_chunks(mask, problem) == keys.any(5).any(3).any(1).any(0).tolist()
