"""How CTAs of the Hopper backward zero sums of dQ for later ones, through ``flash_ext._plan``: each share is zeroed
once, and no CTA waits for ever, however many SMs other kernels hold.

The GPU is simulated. A CTA publishes its share when it begins a tile, and goes on when all shares of the tile's key
head have been published.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from flash_ext import _plan

SMS = 132
NONE = (-1, -1)
Tile = tuple[int, int]  # key head, number of the tile


class Backward:
    """What the positions of a call work on, and what they zero."""

    def __init__(self, heads: int, key_tiles: int, section_heads: int, reserved: int) -> None:
        found = _plan.dq_zeroing(heads, key_tiles, section_heads, SMS, reserved)
        self.tiles: list[Tile] = [(head, tile) for head, tile, _, _ in found]
        self.zeroed: list[Tile] = [(head, tile) for _, _, head, tile in found]
        self.covered = {head for head, _ in self.zeroed} - {-1}
        self.published = Counter({head: key_tiles for head in range(heads) if head not in self.covered})
        self.key_tiles = key_tiles

    def publish(self, position: int) -> None:
        self.published[self.zeroed[position][0]] += 1

    def may_add(self, position: int) -> bool:
        return self.published[self.tiles[position][0]] >= self.key_tiles


def problems(count: int) -> Iterator[tuple[random.Random, tuple[int, int, int]]]:
    """Key heads, tiles of each, and heads of a section."""
    for seed in range(count):
        rng = random.Random(seed)
        heads, key_tiles = rng.randint(1, 300), rng.randint(1, 20)
        yield rng, (heads, key_tiles, rng.choice([1, 8, 35, rng.randint(1, heads)]))


def ends(backward: Backward, sms: int, persistent: bool, rng: random.Random) -> bool:
    """Whether all CTAs end on so many SMs. CTAs start in the order of their numbers. Persistent ones, of which there
    are as many as a whole GPU has SMs, take the next position when they begin a tile."""
    count = len(backward.tiles)
    ctas = min(count, SMS) if persistent else count
    next_position, next_cta, now = ctas, 0, 0.0
    waiting: list[tuple[int, int]] = []  # position, and the position that its CTA has next
    running: list[tuple[float, int, int]] = []  # when they end

    def begin(position: int) -> None:
        nonlocal next_position
        backward.publish(position)
        waiting.append((position, next_position if persistent else count))
        next_position += 1

    while True:
        while next_cta < ctas and len(waiting) + len(running) < sms:
            begin(next_cta)
            next_cta += 1
        for position, following in waiting:
            if backward.may_add(position):
                heapq.heappush(running, (now + rng.choice([0.1, 1.0, rng.uniform(0, 30)]), position, following))
        waiting = [entry for entry in waiting if not backward.may_add(entry[0])]
        if not running:
            return not waiting
        now, _, following = heapq.heappop(running)
        if following < count:
            begin(following)


@pytest.mark.parametrize("reserved", [0, SMS])
def test_each_share_of_the_last_heads_is_zeroed_once(reserved: int) -> None:
    used = 0
    for _, (heads, key_tiles, section_heads) in problems(100):
        backward = Backward(heads, key_tiles, section_heads, reserved)
        first = min(backward.covered, default=heads)
        shares = [(head, tile) for head in range(first, heads) for tile in range(key_tiles)]
        assert sorted(share for share in backward.zeroed if share != NONE) == shares
        assert all(share == NONE for share in backward.zeroed[:reserved])
        used += bool(shares)
    assert used > 30


def test_a_share_is_zeroed_a_wave_before_its_head_begins() -> None:
    for _, sizes in problems(100):
        backward = Backward(*sizes, reserved=0)
        begins = {head: position for position, (head, _) in reversed(list(enumerate(backward.tiles)))}
        for position, (head, _) in enumerate(backward.zeroed):
            assert head < 0 or position + SMS < begins[head]


@pytest.mark.parametrize("persistent", [False, True], ids=["a CTA a tile", "persistent"])
def test_no_cta_waits_for_ever(persistent: bool) -> None:
    for rng, sizes in problems(100):
        backward = Backward(*sizes, reserved=SMS if persistent else 0)
        assert ends(backward, rng.choice([SMS, rng.randint(1, SMS)]), persistent, rng), sizes


def test_persistent_ctas_without_reserved_positions_would() -> None:
    """Position 131 belongs to CTA 131, which has no SM while another kernel holds one."""
    assert not ends(Backward(400, 4, 1, reserved=0), SMS - 1, True, random.Random(0))
    assert ends(Backward(400, 4, 1, reserved=SMS), SMS - 1, True, random.Random(0))


def test_small_calls_zero_all_beforehand() -> None:
    assert not Backward(132, 1, 1, reserved=0).covered
    assert not Backward(66, 4, 66, reserved=SMS).covered


@pytest.mark.parametrize(
    "wrong", [{"heads": 0}, {"key_tiles": 0}, {"section_heads": 0}, {"at_once": 0}, {"reserved": -1}]
)
def test_what_makes_no_sense_raises(wrong: dict[str, int]) -> None:
    sizes = {"heads": 8, "key_tiles": 4, "section_heads": 1, "at_once": SMS, "reserved": 0}
    with pytest.raises(ValueError, match="dq_zeroing: expected"):
        _plan.dq_zeroing(**{**sizes, **wrong})
