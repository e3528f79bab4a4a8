"""Which calls the plan gives to the backward of short sequences."""

from __future__ import annotations

from typing import Any

import pytest

from tests.build.plans import hopper_plan

SHORT: dict[str, Any] = {"operation": "backward", "head_dim": 64, "head_dim_v": 64, "seqlen_q": 197, "seqlen_k": 197}
SHORT |= {"heads_q": 4, "heads_kv": 4}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"deterministic": True},
        {"window_left": 5, "window_right": 0, "top_left": True},
        {"has_sink": True, "varlen": True},  # lengths in use
        {"head_dim": 8, "head_dim_v": 8},
        {"seqlen_q": 1, "seqlen_k": 256},
        {"head_dim": 128, "head_dim_v": 128, "seqlen_q": 128, "seqlen_k": 1},
        {"head_dim": 72, "head_dim_v": 72, "seqlen_q": 40, "seqlen_k": 64},
    ],
)
def test_served(fields: dict[str, Any]) -> None:
    found = hopper_plan(**{**SHORT, **fields})
    assert found.kernel == "sm90/backward_short"
    longest = max({**SHORT, **fields}["seqlen_q"], {**SHORT, **fields}["seqlen_k"])
    assert found.block_m == found.block_n == -(-longest // 64) * 64
    assert any("all queries and keys of a head" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"seqlen_q": 257}, "sm90/backward_persistent"),
        ({"seqlen_k": 257}, "sm90/backward_persistent"),
        ({"total_q": 1000, "total_k": 1000, "varlen": True}, "sm90/backward_persistent"),
        ({"heads_q": 4, "heads_kv": 2}, "sm90/backward_persistent"),
        ({"head_dim": 72, "head_dim_v": 72, "seqlen_k": 129}, "sm90/backward"),
        ({"head_dim": 136, "head_dim_v": 136, "seqlen_q": 9, "seqlen_k": 9}, "sm90/backward_wide"),
        ({"softcap": 3.0}, "sm90/backward_persistent"),
        ({"has_mask": True}, "sm90/backward_options"),
        ({"dropout_p": 0.1}, "sm90/backward_options"),
        ({"has_bias": True}, "sm90/backward_options"),
        ({"softmax_scale": -1.0}, "sm80/backward"),
        ({"broadcast": True}, "sm80/backward"),
        ({"head_dim_v": 8}, "sm90/backward_persistent"),
        ({"seqlen_q": 0}, "sm80/backward"),
        ({"compute_capability": 80}, "sm80/backward"),
        ({"own_kernels": False}, "sm80/backward"),
        ({"dtype": "float32"}, "sm90/backward_f32"),
    ],
)
def test_beside_it(fields: dict[str, Any], kernel: str) -> None:
    assert hopper_plan(**{**SHORT, **fields}).kernel == kernel


def test_the_obstacle_is_that_of_the_closest_kernel() -> None:
    found = hopper_plan(**{**SHORT, "softmax_scale": -1.0, "seqlen_k": 4096})
    assert any("Hopper" in reason and "softmax_scale -1" in reason for reason in found.reasons)
    assert not any("256 queries" in reason for reason in found.reasons)
