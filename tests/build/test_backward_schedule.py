"""How CTAs of the backward on CUDA take tiles of keys, through ``flash_ext._plan``, with no GPU in sight."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest

from flash_ext import _plan

SMS = 132
# batch, seqlen, query heads, key heads, head_dim, causal
GROUPED = [
    (1, 8192, 8, 1, 128, False),
    (1, 4096, 16, 4, 128, True),
    (2, 2048, 32, 4, 128, True),
    (1, 4096, 64, 8, 64, True),
    (1, 6007, 20, 4, 128, False),
    (1, 16384, 28, 4, 128, True),
    (1, 8192, 32, 8, 128, True),
    (1, 32768, 8, 1, 128, False),
    (1, 32768, 8, 1, 128, True),
    (8, 1024, 40, 8, 128, False),
    (8, 1024, 40, 8, 128, True),
    (2, 5000, 9, 3, 256, False),
    (2, 5000, 9, 3, 256, True),
]
TRAINING = [
    (16384 // seqlen, seqlen, 2048 // head_dim, 2048 // head_dim, head_dim, causal)
    for head_dim in (64, 128, 256)
    for causal in (False, True)
    for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
]
SHORT = [
    (8192 // seqlen, seqlen, 16, 16, head_dim, causal)
    for head_dim in (64, 128)
    for causal in (False, True)
    for seqlen in (64, 128, 197, 256, 384)
]


def problem(
    batch: int, seqlen: int, heads_q: int, heads_kv: int, head_dim: int, causal: bool, **fields: Any
) -> _plan.Problem:
    sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": head_dim, "head_dim_v": head_dim}
    heads = {"heads_q": heads_q, "heads_kv": heads_kv}
    h200 = {"device": "cuda", "compute_capability": 90, "num_workers": SMS, "dtype": "bfloat16"}
    window = {"window_right": 0} if causal else {}
    return _plan.Problem(operation="backward", batch=batch, **{**h200, **sizes, **heads, **window, **fields})


def slots_of(p: _plan.Problem) -> int:
    """CTAs that run at once, or clusters of two."""
    return SMS // 2 if p.head_dim > 128 and _plan.make_plan(p).kernel != "sm80/backward" else SMS


def simulate(cycles: list[float], slots: int) -> float:
    """When the last CTA ends, if each SM takes the next one when it is free."""
    free = [0.0] * slots
    for cta in cycles:
        heapq.heapreplace(free, free[0] + cta)
    return max(free)


def idle(p: _plan.Problem) -> float:
    cycles, slots = [cta[-1] for cta in _plan.backward_ctas(p)], slots_of(p)
    return 1 - sum(cycles) / slots / simulate(cycles, slots)


def splits_of(p: _plan.Problem) -> int:
    schedule = _plan.make_plan(p).schedule
    return int(schedule.head_splits * schedule.query_splits)


@pytest.mark.parametrize("shape", GROUPED, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("compute_capability", [80, 90])
def test_no_sm_is_idle_for_long(
    shape: tuple[int, int, int, int, int, bool], compute_capability: int, dtype: str
) -> None:
    assert idle(problem(*shape, dtype=dtype, compute_capability=compute_capability)) < 0.10


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("compute_capability", [80, 90])
def test_no_sm_is_idle_for_long_in_training(compute_capability: int, dtype: str) -> None:
    """Nor with short sequences, but for those of a kernel whose CTAs have a whole head each."""
    of_heads = 0
    for shape in TRAINING + SHORT:
        p = problem(*shape, dtype=dtype, compute_capability=compute_capability)
        if _plan.make_plan(p).kernel == "sm90/backward_short":
            of_heads += 1
            continue
        assert idle(p) < 0.10, shape
    assert of_heads == (12 if (compute_capability, dtype) == (90, "bfloat16") else 0)


def test_a_kernel_without_tiles_of_keys_has_no_ctas_of_them() -> None:
    with pytest.raises(ValueError, match="backward_ctas: sm90/backward_short has no tiles of keys"):
        _plan.backward_ctas(problem(64, 128, 16, 16, 64, False))


def test_heads_of_a_group_are_shared_where_tiles_of_keys_are_few() -> None:
    few = problem(1, 8192, 8, 1, 128, False)
    found = _plan.make_plan(few)
    assert (found.schedule.head_splits, found.schedule.query_splits, found.schedule.unsplit_tiles) == (2, 1, 0)
    assert any("64 tiles of keys on 132 SMs" in reason and "by 2 along the heads" in reason for reason in found.reasons)
    assert len(_plan.backward_ctas(few)) == 128


def test_tiles_of_full_waves_stay_whole() -> None:
    found = _plan.make_plan(problem(1, 6007, 20, 4, 128, False)).schedule
    assert found.unsplit_tiles == SMS and found.query_splits > 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
def test_many_tiles_are_not_split(seqlen: int, causal: bool, head_dim: int) -> None:
    heads = 2048 // head_dim
    found = _plan.make_plan(problem(16384 // seqlen, seqlen, heads, heads, head_dim, causal))
    assert found.schedule.head_splits == found.schedule.query_splits == 1
    assert any("none is split" in reason for reason in found.reasons)


def test_lengths_that_the_host_does_not_know() -> None:
    """Tiles are counted by rows in memory; a loose bound on the lengths makes none."""
    sizes = {"varlen": True, "total_q": 4096, "total_k": 4096}
    for bound in (1024, 4096):
        assert splits_of(problem(4, bound, 8, 1, 128, False, **sizes)) > 1
    assert splits_of(problem(4, 4096, 8, 1, 128, False)) == 1


def random_problem(rng: random.Random, **fields: Any) -> _plan.Problem:
    group, heads_kv = rng.choice([1, 2, 3, 4, 5, 7, 8, 16]), rng.choice([1, 2, 4, 8])
    window = {"window_left": rng.choice([-1, 0, 100, 700]), "window_right": rng.choice([-1, 0, 0, 90])}
    return problem(
        rng.choice([1, 1, 2, 3]), rng.choice([1, 64, 300, 512, 1000, 2048, 3001]), group * heads_kv, heads_kv,
        rng.choice([64, 128, 192, 256]), False, **{"dtype": rng.choice(["bfloat16", "float32"]), **window,
        "seqlen_k": rng.choice([1, 65, 300, 512, 1000, 2048, 3001]), "top_left": rng.random() < 0.3,
        "deterministic": rng.random() < 0.3, "compute_capability": rng.choice([80, 90]), **fields},
    )  # fmt: skip


def tiles_of(p: _plan.Problem) -> tuple[int, int]:
    """Queries and keys of a tile, as the kernel's shape says; the plan leaves those of sm80/backward to the kernel."""
    found = _plan.make_plan(p)
    if found.block_n:
        return found.block_m, found.block_n
    head_dim, is_float = (64 if p.head_dim <= 64 else 128 if p.head_dim <= 128 else 256), p.dtype == "float32"
    block_n = 32 if is_float and head_dim == 256 else 64 if head_dim == 256 else 128
    block_m = (64 if head_dim == 64 else 32) if is_float else 128 if head_dim == 64 else 64
    return block_m, block_n


def test_every_tile_of_scores_is_some_ctas() -> None:
    """Of one, exactly."""
    rng = random.Random(7)
    for _ in range(150):
        p = random_problem(rng)
        block_m, block_n = tiles_of(p)
        found: list[tuple[int, int, int, int]] = []
        for batch, first_head, heads, key_tile, begin, end, _ in _plan.backward_ctas(p):
            assert heads > 0
            found += [(batch, first_head + h, m, key_tile) for h in range(heads) for m in range(begin, end)]
        rows = _plan.key_tiles(
            p.seqlen_q, p.seqlen_k, (p.window_left, p.window_right), p.top_left, block_m=block_m, block_n=block_n
        )
        visible = [(m, n) for m, row in enumerate(rows) for n in range(row.begin, row.end)]
        heads = [(batch, head) for batch in range(p.batch) for head in range(p.heads_q)]
        assert sorted(found) == sorted((batch, head, m, n) for batch, head in heads for m, n in visible)


def test_every_tile_of_keys_has_a_cta() -> None:
    """Also one that no query sees: its dK and dV are zeros that somebody writes."""
    rng = random.Random(8)
    for _ in range(150):
        p = random_problem(rng)
        tiles = -(-p.seqlen_k // tiles_of(p)[1])
        found = {(cta[0], cta[1] * p.heads_kv // p.heads_q, cta[3]) for cta in _plan.backward_ctas(p)}
        wanted = {(b, h, n) for b in range(p.batch) for h in range(p.heads_kv) for n in range(tiles)}
        assert found == wanted


@pytest.mark.parametrize(("seqlen", "heads"), [(8192, 9), (8192, 13), (16384, 5), (16384, 7)])
def test_the_last_section_may_have_fewer_heads(seqlen: int, heads: int) -> None:
    p = problem(1, seqlen, heads, heads, 128, True)
    assert 1 < _plan.make_plan(p).schedule.section_heads < heads
    found = sorted((cta[1], cta[3]) for cta in _plan.backward_ctas(p))
    assert found == [(head, tile) for head in range(heads) for tile in range(-(-seqlen // tiles_of(p)[1]))]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_last_keys_come_first_where_all_heads_take_turns(deterministic: bool) -> None:
    """Of the kernel for all GPUs: a CTA waits for those that have later keys of its head."""
    p = problem(2, 2048, 8, 4, 64, False, deterministic=deterministic, compute_capability=80)
    tiles: dict[tuple[int, int], list[int]] = {}
    for cta in _plan.backward_ctas(p):
        tiles.setdefault((cta[0], cta[1]), []).append(cta[3])
    assert tiles and all(of_head == sorted(of_head, reverse=deterministic) for of_head in tiles.values())


def test_splits_shorten_the_makespan() -> None:
    rng = random.Random(9)
    for _ in range(100):
        p = random_problem(rng)
        ctas = _plan.backward_ctas(p)
        whole: dict[tuple[int, int, int], float] = {}
        for cta in ctas:
            tile = cta[0], cta[1] * p.heads_kv // p.heads_q, cta[3]
            whole[tile] = whole.get(tile, 0.0) + cta[-1]
        if splits_of(p) > 1:
            slots = slots_of(p)
            assert simulate([cta[-1] for cta in ctas], slots) < 1.05 * simulate(list(whole.values()), slots)


# ---- Ordered additions to dQ ----------------------------------------------------------------------------------------


def tiles_in_order(p: _plan.Problem, cta: tuple[int, int, int, int, int, int, float]) -> list[tuple[int, int, int]]:
    """(batch, head, tile of queries) in the order in which a CTA adds to them: all heads of the last tile first."""
    batch, first_head, heads, _, begin, end, _ = cta
    return [(batch, first_head + h, m) for m in range(end - 1, begin - 1, -1) for h in range(heads)]


def simulate_ordered(p: _plan.Problem, lag: float) -> float:
    """As simulate(), where a CTA adds to a tile `lag` steps after the one before has, and two steps may wait.

    Above head_dim 128 every other addition shows a step later, together with the next one.
    """
    postpones = _plan.make_plan(p).kernel == "sm90/backward_wide"
    beside = CYCLES_BESIDE_STEPS[_plan.make_plan(p).kernel]
    free, ready, last = [0.0] * slots_of(p), dict[tuple[int, int, int], float](), 0.0
    for cta in _plan.backward_ctas(p):
        tiles = tiles_in_order(p, cta)
        step = (cta[-1] - beside) / max(len(tiles), 1)
        computed = heapq.heappop(free) + beside
        added = [0.0, 0.0]
        for number, tile in enumerate(tiles):
            computed = max(computed + step, added[0])
            added = [added[1], max(computed, ready.get(tile, 0.0))]
            is_postponed = postpones and number % 2 == 0 and number + 1 < len(tiles)
            ready[tile] = added[1] + (lag + is_postponed) * step
        heapq.heappush(free, max(computed, added[1]))
        last = max(last, free[0], computed, added[1])
    return last


CYCLES_BESIDE_STEPS = {"sm90/backward_persistent": 2600, "sm90/backward": 8000, "sm90/backward_wide": 8000}
DETERMINISTIC = [
    (2, 4096, heads, heads_kv, head_dim, causal)
    for head_dim, heads, heads_kv in [(64, 32, 32), (64, 32, 8), (128, 16, 16), (128, 32, 8), (256, 8, 8), (256, 16, 4)]
    for causal in (False, True)
]


@pytest.mark.parametrize("shape", DETERMINISTIC, ids=str)
def test_ordered_additions_cost_little(shape: tuple[int, int, int, int, int, bool]) -> None:
    """Over the same CTAs that wait for nobody, and over the default's."""
    p = problem(*shape, deterministic=True)
    for of_default in [{"deterministic": True}, {}]:
        default = simulate([cta[-1] for cta in _plan.backward_ctas(problem(*shape, **of_default))], slots_of(p))
        assert simulate_ordered(p, 1.25) < 1.08 * default


OPTIONS_IN_TURNS: list[dict[str, Any]] = [
    {},
    {"softcap": 3.0},
    {"has_alibi": True},
    {"dropout_p": 0.1},
    {"has_bias": True, "bias_dtype": "bfloat16"},
    {"has_mask": True, "mask_per_key": True},
]


def keys_before(p: _plan.Problem, query: int) -> int:
    """Those that a left window hides from it."""
    if p.window_left < 0:
        return 0
    return max(query + (0 if p.top_left else p.seqlen_k - p.seqlen_q) - p.window_left, 0)


@pytest.mark.parametrize("options", OPTIONS_IN_TURNS, ids=str)
def test_additions_are_ordered_as_ctas_start(options: dict[str, Any]) -> None:
    """Else a CTA might wait for one that has no SM. Its turn is the number of additions before its own."""
    rng = random.Random(10)
    for _ in range(100):
        p = random_problem(rng, deterministic=True, dtype="bfloat16", compute_capability=90, **options)
        if options:
            p.head_dim = p.head_dim_v = 128
        kernel = _plan.make_plan(p).kernel
        if kernel == "sm90/backward_short":
            continue
        assert kernel in ("sm90/backward", "sm90/backward_persistent", "sm90/backward_wide")
        assert kernel == "sm90/backward" or not options
        block_m, block_n = tiles_of(p)
        seen: dict[tuple[int, int, int], int] = {}
        additions: dict[tuple[int, int, int], int] = {}
        for cta in _plan.backward_ctas(p):
            for tile in tiles_in_order(p, cta):
                assert seen.get(tile, -1) < cta[3]
                seen[tile] = cta[3]
                assert additions.get(tile, 0) == cta[3] - keys_before(p, tile[2] * block_m) // block_n
                additions[tile] = additions.get(tile, 0) + 1
