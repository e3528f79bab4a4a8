"""Random problems against the oracle. The seed in the header of a run draws the same ones again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from flash_ext import _plan
from flash_ext.planning import problem_of
from tests.contract.test_merge import assert_merge_matches
from tests.contract.test_weights import assert_weights_match
from tests.decode_oracle import assert_decode_matches
from tests.numerics import problems
from tests.oracle import Call, assert_matches_oracle

QUICK_SCORES, SCORES = 2**18, 2**20  # of the largest problem: quickly, and with --run-slow
NUM_LONG = 500
PARTS = pytest.mark.parametrize("part", range(4))  # 2,000 problems, in parts that can run side by side


def run_problems(check: Callable[[st.DataObject], Any], max_examples: int | None = None, **how: Any) -> None:
    """As many random problems as the profile says unless ``max_examples`` does; ``how``: other settings.

    They follow from torch's seed, which conftest sets by FLASH_EXT_TEST_SEED and the test's name.
    """
    limits = how if max_examples is None else {"max_examples": max_examples, **how}

    @seed(torch.initial_seed())
    @settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], **limits)
    @given(data=st.data())
    def problem(data: st.DataObject) -> None:
        check(data)

    problem()


def check_attention(data: st.DataObject, device: str, scores: int) -> None:
    call, wanted = data.draw(problems.attention_calls(device, scores))
    assert_matches_oracle(call, wanted)


def check_gradients_of_groups(data: st.DataObject, device: str, scores: int) -> None:
    call, wanted = data.draw(problems.attention_calls(device, scores, problems.sizes_of_grouped_heads))
    assert_matches_oracle(call, wanted or ("q", "k", "v"))


def check_weights(data: st.DataObject, device: str, scores: int) -> None:
    assert_weights_match(data.draw(problems.weights_calls(device, scores)), signed=data.draw(st.booleans()))


def check_merge(data: st.DataObject, device: str) -> None:
    assert_merge_matches(*data.draw(problems.merge_parts(device)))


def check_decode(data: st.DataObject, device: str, scores: int) -> None:
    assert_decode_matches(data.draw(problems.decode_calls(device, scores)))


def test_attention(device: str) -> None:
    run_problems(lambda data: check_attention(data, device, QUICK_SCORES))


@pytest.mark.op("attention_weights")
def test_weights(device: str) -> None:
    run_problems(lambda data: check_weights(data, device, QUICK_SCORES))


@pytest.mark.op("merge")
def test_merge(device: str) -> None:
    run_problems(lambda data: check_merge(data, device))


@pytest.mark.op("attention_decode_append")
def test_decode(device: str) -> None:
    run_problems(lambda data: check_decode(data, device, QUICK_SCORES))


@pytest.mark.slow
@PARTS
def test_attention_at_length(device: str, part: int) -> None:
    run_problems(lambda data: check_attention(data, device, SCORES), NUM_LONG)


@pytest.mark.slow
@PARTS
def test_gradients_of_groups_at_length(device: str, part: int) -> None:
    """Where tiles of keys are few, several CTAs share one."""
    run_problems(lambda data: check_gradients_of_groups(data, device, SCORES), NUM_LONG)


@pytest.mark.slow
@pytest.mark.op("attention_weights")
def test_weights_at_length(device: str) -> None:
    run_problems(lambda data: check_weights(data, device, SCORES // 4), NUM_LONG)


@pytest.mark.slow
@PARTS
@pytest.mark.op("attention_decode_append")
def test_decode_at_length(device: str, part: int) -> None:
    run_problems(lambda data: check_decode(data, device, SCORES), NUM_LONG)


def test_a_seed_draws_the_same_problems() -> None:
    drawn: list[list[str]] = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn.append([])
        run_problems(lambda data: drawn[-1].append(repr(data.draw(problems.attention_calls("cpu", 2**12))[0])), 5)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 1


WITH_TILES_OF_KEYS = {f"sm90/backward{name}" for name in ("", "_persistent", "_wide", "_options")}


def test_many_problems_have_more_keys_than_a_tile() -> None:
    """A kernel that is right for one tile of keys alone must not pass, nor one that few problems reach."""
    long, tiled = [], []

    def look(data: st.DataObject) -> None:
        call, _wanted = data.draw(problems.attention_calls("cpu", QUICK_SCORES))
        keys = int(call.options["cu_seqlens_k"].diff().max()) if call.varlen else call.k.shape[1]
        plan = plan_on_hopper(call)
        long.append(keys > 128)
        tiled.append(plan is not None and plan.kernel in WITH_TILES_OF_KEYS and keys > plan.block_n)

    torch.manual_seed(7)
    run_problems(look, 300, phases=[Phase.generate], database=None)
    assert len(long) >= 300
    assert sum(long) >= 0.3 * len(long) and sum(tiled) >= 0.1 * len(tiled), (sum(long), sum(tiled))


def test_problems_of_groups_share_tiles_of_keys() -> None:
    shared: list[bool] = []

    def look(data: st.DataObject) -> None:
        call, _wanted = data.draw(problems.attention_calls("cpu", SCORES, problems.sizes_of_grouped_heads))
        plan = plan_on_hopper(call)
        shared.append(plan is not None and plan.schedule.head_splits * plan.schedule.query_splits > 1)

    torch.manual_seed(7)
    run_problems(look, 200, phases=[Phase.generate], database=None)
    assert sum(shared) >= 0.3 * len(shared), sum(shared)


def plan_on_hopper(call: Call) -> _plan.Plan | None:
    """Of the backward, as if the tensors were on such a GPU; None: there are no kernels for their dtype there."""
    problem = problem_of(call.q, call.k, call.v, "backward", **call.options)
    problem.device, problem.compute_capability, problem.num_workers = "cuda", 90, 132
    return _plan.make_plan(problem) if call.dtype != torch.float64 else None
