"""The order in which CTAs take the tiles of packed sequences, through ``flash_ext._plan``."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flash_ext import _plan

LENGTHS = {
    "none": [],
    "all_empty": [0, 0, 0],
    "one": [1],
    "equal": [256] * 40,
    "empty_between": [0, 300, 0, 0, 64, 0],
    "one_long": [16] * 500 + [65536] + [16] * 500,
    "rising": list(range(0, 4000, 37)),
    "more_than_a_chunk": [100, 300, 5] * 3000,
}


def tiles_of(rows: list[int], block: int) -> list[tuple[int, int]]:
    return [(sequence, tile) for sequence, length in enumerate(rows) for tile in range(-(-length // block))]


@pytest.mark.parametrize("rows_in_l2", [1, 4096, 2**40])
@pytest.mark.parametrize("last_tile_first", [False, True])
@pytest.mark.parametrize("rows", LENGTHS.values(), ids=LENGTHS.keys())
def test_every_tile_of_every_head_comes_once(rows: list[int], last_tile_first: bool, rows_in_l2: int) -> None:
    options: dict[str, Any] = dict(block=64, last_tile_first=last_tile_first, rows_in_l2=rows_in_l2)
    for heads, head_group in ((1, 1), (6, 2)):
        work_tiles = _plan.work_list(rows, rows, heads=heads, head_group=head_group, **options)
        wanted = [(sequence, head, tile) for sequence, tile in tiles_of(rows, 64) for head in range(heads)]
        assert sorted(work_tiles) == sorted(wanted)


def test_every_tile_comes_once_at_random() -> None:
    rng = random.Random(1)
    for _ in range(200):
        batch, longest = rng.randrange(1, 60), rng.choice([3, 200, 5000])
        rows, other = ([rng.randrange(longest + 1) for _ in range(batch)] for _ in range(2))
        group = rng.choice([1, 2, 4])
        heads = group * rng.randrange(1, 12)
        block, rows_in_l2 = rng.choice([64, 128, 192]), rng.choice([1, 1000, 20000, 10**7])
        work_tiles = _plan.work_list(rows, other, block, heads, group, rng.random() < 0.5, rows_in_l2)
        assert sorted(work_tiles) == sorted((b, h, t) for b, t in tiles_of(rows, block) for h in range(heads))
        assert len(tiles_of(rows, block)) <= _plan.most_tiles(batch, longest, sum(rows), block)


def test_long_sequences_come_first() -> None:
    work_tiles = _plan.work_list([64, 640, 64], [64, 640, 64], 64, rows_in_l2=1)
    assert [sequence for sequence, _, _ in work_tiles] == [1] * 10 + [0, 2]


@pytest.mark.parametrize("last_tile_first", [False, True])
def test_the_tiles_of_a_section_that_cost_the_most_come_first(last_tile_first: bool) -> None:
    rows = [130, 512, 300, 64]
    work_tiles = _plan.work_list(rows, rows, 64, last_tile_first=last_tile_first, rows_in_l2=10**6)
    costs = [tile + 1 if last_tile_first else -(-rows[sequence] // 64) - tile for sequence, _, tile in work_tiles]
    assert costs == sorted(costs, reverse=True)


def test_sections_read_no_more_than_fits() -> None:
    work_tiles = _plan.work_list([128] * 64, [128] * 64, 64, heads=4, rows_in_l2=2 * 4 * 128)
    of_section = 2 * 4 * 2
    for first in range(0, len(work_tiles), of_section):
        assert len({sequence for sequence, _, _ in work_tiles[first : first + of_section]}) == 2


def test_sections_of_several_sequences_may_be_smaller_than_what_fits() -> None:
    work_tiles = _plan.work_list([128] * 64, [128] * 64, 64, heads=4, rows_in_l2=8 * 4 * 128, section_part=4)
    assert work_tiles == _plan.work_list([128] * 64, [128] * 64, 64, heads=4, rows_in_l2=2 * 4 * 128)
    long = dict(rows=[640], other_rows=[640], block=64, heads=8, head_group=2, rows_in_l2=1300)
    assert _plan.work_list(**long, section_part=4) == _plan.work_list(**long)


def test_a_long_sequence_goes_by_heads_that_fit() -> None:
    work_tiles = _plan.work_list([640], [640], 64, heads=8, head_group=2, rows_in_l2=1300)
    assert [head for _, head, _ in work_tiles[:40]] == [0, 1, 2, 3] * 10
    assert [tile for _, _, tile in work_tiles[:40:4]] == list(range(10))


def test_heads_that_share_keys_stay_together() -> None:
    work_tiles = _plan.work_list([640], [640], 64, heads=8, head_group=4, rows_in_l2=1)
    assert {head for _, head, _ in work_tiles[:40]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("batch", "longest", "rows", "block", "most"),
    [(4096, 256, 2**20, 64, 4 * 4096), (4096, 2**20, 2**20, 64, 2**14 + 4032), (1, 640, 640, 64, 10), (5, 9, 0, 64, 4)],
)
def test_tiles_follow_the_rows_and_not_the_bound(batch: int, longest: int, rows: int, block: int, most: int) -> None:
    assert _plan.most_tiles(batch, longest, rows, block) == most


def test_a_tight_grid_needs_no_list() -> None:
    assert not _plan.lists_tiles(4096, 256, 2**20, 128, 16)
    assert _plan.lists_tiles(4096, 2**20, 2**20, 128, 16)
    assert not _plan.lists_tiles(2, 2048, 2048, 128, 8)
