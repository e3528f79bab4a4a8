"""The planner: how keys and packed sequences of the forward on Hopper are cut among CTAs."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from flash_ext import _plan
from tests.build.plans import hopper_plan, plan

# --- calls whose keys are not split --------------------------------------------------------------------------------

FULL_WAVES: dict[str, Any] = dict(batch=1, heads_q=132, heads_kv=132, seqlen_q=192, seqlen_k=8192)  # a tile an SM


def tiles_that_are_split(**fields: Any) -> int:
    return int(hopper_plan(**{**FULL_WAVES, **fields}).key_splits.tiles)


def test_full_waves_are_not_split() -> None:
    assert tiles_that_are_split() == 0
    assert tiles_that_are_split(heads_q=264, heads_kv=264) == 0
    assert tiles_that_are_split(heads_q=66, heads_kv=66) == 66


@pytest.mark.parametrize(
    "fields",
    [
        {"softmax_scale": -1.0},
        {"has_mask": True},
        {"dropout_p": 0.1},
        {"seqlen_k": 128},  # a part has four tiles of keys at least
        {"dtype": "float32"},
        {"compute_capability": 80},
    ],
    ids=str,
)
def test_a_tail_wave_that_is_not_split(fields: dict[str, Any]) -> None:
    assert tiles_that_are_split(**{"heads_q": 66, "heads_kv": 66, **fields}) == 0


@pytest.mark.parametrize("heads", [33, 40, 66])
def test_each_split_has_four_tiles_of_keys(heads: int) -> None:
    """Fewer are not worth combining."""
    split = 0
    for seqlen_k in range(320, 4096, 80):
        chosen = hopper_plan(**{**FULL_WAVES, "heads_q": heads, "heads_kv": heads, "seqlen_k": seqlen_k})
        splits, key_tiles = chosen.key_splits, math.ceil(seqlen_k / chosen.block_n)
        if splits.tiles > 0:
            split += 1
            smallest = splits.short_share if splits.short_splits else 1 / splits.long_splits
            assert smallest * key_tiles >= 3.99, (seqlen_k, splits.long_splits, splits.short_splits)
    assert split > 5


# --- packed sequences ----------------------------------------------------------------------------------------------

PACKED: dict[str, Any] = dict(
    device="cuda", compute_capability=90, num_workers=132, dtype="bfloat16", varlen=True,
    batch=4096, total_q=4096 * 256, total_k=4096 * 256, seqlen_q=256, seqlen_k=256, heads_q=8, heads_kv=8,
)  # fmt: skip


@pytest.mark.parametrize("operation", ["forward", "backward", "decode", "weights", "weights_backward"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("window_right", [-1, 0])
def test_a_bound_on_packed_sequences_decides_nothing(operation: str, head_dim: int, window_right: int) -> None:
    fields = PACKED | dict(operation=operation, head_dim=head_dim, head_dim_v=head_dim, window_right=window_right)
    keys = 256 if operation == "decode" else None  # there it is what the cache holds, and no bound
    exact = plan(**fields)
    for bound in (300, 4096, 2**20, 2**28):
        loose = plan(**fields | dict(seqlen_q=bound, seqlen_k=keys or bound))
        for name in ("kernel", "mask_class", "block_m", "block_n", "head_group", "num_splits", "split_size"):
            assert getattr(loose, name) == getattr(exact, name), name


@pytest.mark.parametrize(("sequences", "length", "heads_q"), [(8, 128, 16), (4, 192, 16), (16, 512, 16), (2, 4096, 8)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bound_on_packed_sequences_splits_nothing(sequences: int, length: int, heads_q: int, dtype: str) -> None:
    fields = PACKED | dict(operation="backward", dtype=dtype, batch=sequences, heads_q=heads_q, heads_kv=heads_q // 4)
    fields |= dict(head_dim=128, head_dim_v=128, total_q=sequences * length, total_k=sequences * length)

    def schedule(bound: int) -> tuple[int, ...]:
        found = plan(**fields | dict(seqlen_q=bound, seqlen_k=bound)).schedule
        return found.section_heads, found.head_splits, found.query_splits, found.unsplit_tiles

    exact = schedule(length)
    assert exact[3] == 0, "which tiles come first depends on whether they are listed"
    for bound in (length + 1, 2 * length, sequences * length, 2**28):
        assert schedule(bound) == exact


def test_splits_are_a_reason_to_list_tiles() -> None:
    fields = PACKED | dict(operation="backward", batch=2, heads_q=4, heads_kv=1, head_dim=128, head_dim_v=128)
    found = plan(**fields | dict(total_q=2048, total_k=2048, seqlen_q=1124, seqlen_k=1124))
    assert found.schedule.head_splits * found.schedule.query_splits > 1
    assert any("listed on the device" in reason and "as they are split" in reason for reason in found.reasons)


def test_the_mean_length_of_packed_sequences_decides() -> None:
    short = plan(**PACKED, head_dim=128, head_dim_v=128)
    long = plan(**PACKED | dict(batch=64, seqlen_q=2**14, seqlen_k=2**14), head_dim=128, head_dim_v=128)
    assert short.block_n < long.block_n


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_the_plan_says_whether_tiles_are_listed(operation: str) -> None:
    tight = plan(**PACKED, operation=operation).reasons
    loose = plan(**PACKED | dict(seqlen_q=2**20, seqlen_k=2**20), operation=operation).reasons
    grid = r"packed: a grid of \d+ tiles of \d+ (queries|keys) a head"
    listed = r"packed: tiles of \d+ (queries|keys) are listed on the device, longest first; \d+ a head"
    assert any(re.match(grid, reason) for reason in tight)
    assert any(re.match(listed, reason) for reason in loose)
    assert not any(reason.startswith("packed") for reason in plan(device="cuda", compute_capability=90).reasons)


# --- split keys of the forward on Hopper ---------------------------------------------------------------------------


def plan_of_forward(
    batch: int, queries: int, keys: int, heads: int, heads_kv: int, head_dim: int, causal: bool = True, **fields: Any
) -> _plan.Plan:
    sizes = {"batch": batch, "seqlen_q": queries, "seqlen_k": keys, "heads_q": heads, "heads_kv": heads_kv}
    scale, right = head_dim**-0.5, 0 if causal else -1
    numbers = {"head_dim": head_dim, "head_dim_v": head_dim, "softmax_scale": scale, "window_right": right}
    device = {"operation": "forward", "device": "cuda", "compute_capability": 90, "num_workers": 132}
    return plan(**{**device, **sizes, **numbers, "dtype": "bfloat16", **fields})


# batch, queries, keys, heads of q and of k: whole tiles behind those that are split, long parts, short parts.
CHUNKS = {
    (1, 512, 32768, 32, 8): (32, 1, 1),
    (1, 1024, 16384, 32, 8): (0, 2, 1),
    (1, 2048, 65536, 32, 8): (0, 1, 1),
    (2, 512, 16384, 16, 4): (32, 1, 1),
    (1, 256, 8192, 32, 8): (0, 1, 1),
    (1, 384, 8192, 16, 4): (0, 3, 1),
}


@pytest.mark.parametrize(("sizes", "expected"), CHUNKS.items(), ids=str)
def test_chunks_of_prompts_split_their_keys(sizes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    chosen = plan_of_forward(*sizes, 128)
    splits, batch, queries, heads = chosen.key_splits, sizes[0], sizes[1], sizes[3]
    tiles = batch * heads * math.ceil(queries / chosen.block_m)
    assert (splits.unsplit_after, splits.long_splits, splits.short_splits) == expected
    assert splits.first_tile == tiles - tiles % 132 and splits.first_tile + splits.tiles + splits.unsplit_after == tiles
    assert splits.short_splits * splits.short_share < 1
    assert any(reason.startswith(f"split-KV: {tiles} query tiles on 132 CTAs") for reason in chosen.reasons)


def test_splits_that_are_kept_are_those_of_the_call() -> None:
    calls = list(CHUNKS)
    fresh = {call: plan_of_forward(*call, 128).key_splits for call in calls}
    for call in [*calls, *reversed(calls), calls[0], calls[0]]:
        again, expected = plan_of_forward(*call, 128).key_splits, fresh[call]
        for name in ("first_tile", "tiles", "unsplit_after", "long_splits", "short_splits", "short_share"):
            assert getattr(again, name) == getattr(expected, name)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3, 32, 33, 131, 132, 133, 200])
@pytest.mark.parametrize("queries", [1, 64, 200, 512])
@pytest.mark.parametrize("window", [{}, {"window_left": 9000}, {"causal": False}], ids=str)
def test_parts_are_few_and_not_short(head_dim: int, heads: int, queries: int, window: dict[str, Any]) -> None:
    chosen = plan_of_forward(1, queries, 20000, heads, heads, head_dim, **window)
    splits = chosen.key_splits
    if splits.tiles == 0:
        return
    assert splits.long_splits >= 1 and splits.tiles * splits.long_splits <= 132
    assert splits.long_splits <= 16 and splits.short_splits <= 2, "bounds the workspace"
    rest = 1 - splits.short_splits * splits.short_share
    assert rest / splits.long_splits >= 0.99 * splits.short_share
    assert splits.short_splits == 0 or splits.short_share * 20000 >= 4 * chosen.block_n


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096])
def test_full_waves_of_short_sequences_stay_whole(head_dim: int, causal: bool, length: int) -> None:
    heads = 2048 // head_dim
    assert plan_of_forward(16384 // length, length, length, heads, heads, head_dim, causal).key_splits.tiles == 0


@pytest.mark.parametrize("fields", [{"varlen": True}, {"softcap": 30.0}, {"has_alibi": True}, {"has_bias": True}])
def test_what_needs_another_variant_is_not_split(fields: dict[str, Any]) -> None:
    assert plan_of_forward(1, 512, 32768, 32, 8, 128, **fields).key_splits.tiles == 0


@pytest.mark.parametrize(
    ("head_dim", "length", "tile"),
    [
        (64, 197, (256, 64)),
        (64, 256, (256, 64)),
        (64, 384, (64, 64)),
        (64, 512, (256, 64)),
        (128, 197, (256, 32)),
        (128, 256, (256, 32)),
        (128, 512, (192, 64)),
    ],
)
def test_tiles_for_few_queries(head_dim: int, length: int, tile: tuple[int, int]) -> None:
    chosen = plan_of_forward(64, length, length, 16, 16, head_dim, False)
    assert (chosen.block_m, chosen.block_n) == tile
