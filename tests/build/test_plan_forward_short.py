"""Which calls the plan gives to the forward of short sequences, and to tiles for few query tiles."""

from __future__ import annotations

from typing import Any

import pytest

from tests.build.plans import hopper_plan

SHORT: dict[str, Any] = {"operation": "forward", "head_dim": 64, "head_dim_v": 64, "heads_q": 4, "heads_kv": 2}
SHORT |= {"batch": 500, "seqlen_q": 128, "seqlen_k": 128}


@pytest.mark.parametrize(
    ("fields", "tile"),
    [
        ({}, (64, 128)),
        ({"seqlen_k": 64}, (64, 64)),
        ({"seqlen_q": 1}, (64, 128)),
        ({"window_left": 5, "window_right": 0, "top_left": True, "has_sink": True}, (64, 128)),
        ({"head_dim": 8, "head_dim_v": 40}, (64, 128)),
        ({"head_dim": 64, "head_dim_v": 72}, (128, 64)),
        ({"head_dim": 128, "head_dim_v": 128}, (128, 64)),
        ({"head_dim": 128, "head_dim_v": 128, "seqlen_q": 64}, (64, 64)),
        # All CTAs run at once: four on each of 132 SMs, or two.
        ({"batch": 11, "seqlen_q": 768, "seqlen_k": 768}, (64, 128)),
        ({"head_dim": 128, "head_dim_v": 128, "batch": 8, "seqlen_q": 512, "seqlen_k": 512}, (64, 128)),
        ({"head_dim": 128, "head_dim_v": 128, "batch": 33, "seqlen_q": 256, "seqlen_k": 256}, (128, 64)),
    ],
)
def test_served(fields: dict[str, Any], tile: tuple[int, int]) -> None:
    found = hopper_plan(**{**SHORT, **fields})
    assert (found.kernel, found.block_m, found.block_n) == ("sm90/forward_short", *tile)
    longest = max({**SHORT, **fields}[name] for name in ("seqlen_q", "seqlen_k"))
    (limit,) = (reason for reason in found.reasons if "queries and keys, this kernel is the faster one" in reason)
    assert limit.startswith("all CTAs run at once" if longest > 128 else ("more CTAs", "all CTAs"))


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"seqlen_q": 129}, "sm90/forward"),
        ({"seqlen_k": 129}, "sm90/forward"),
        ({"batch": 12, "seqlen_q": 768, "seqlen_k": 768}, "sm90/forward"),
        ({"batch": 10, "seqlen_q": 768, "seqlen_k": 769}, "sm90/forward"),
        ({"head_dim": 128, "head_dim_v": 128, "batch": 9, "seqlen_q": 512, "seqlen_k": 512}, "sm90/forward"),
        ({"head_dim": 128, "head_dim_v": 128, "batch": 34, "seqlen_q": 256, "seqlen_k": 256}, "sm90/forward"),
        ({"head_dim": 136}, "sm90/forward"),
        ({"varlen": True}, "sm90/forward"),
        ({"varlen": True, "total_q": 1000, "total_k": 1000}, "sm90/forward"),
        ({"wants_max_logit": True}, "sm90/forward"),
        ({"softcap": 3.0}, "sm90/forward"),
        ({"has_alibi": True}, "sm90/forward"),
        ({"has_mask": True}, "sm90/forward"),
        ({"has_bias": True}, "sm90/forward"),
        ({"dropout_p": 0.1}, "sm90/forward"),
        ({"softmax_scale": -1.0}, "sm90/forward"),
        ({"broadcast": True}, "sm80/forward"),
        ({"seqlen_k": 0}, "sm80/forward"),
        ({"compute_capability": 80}, "sm80/forward"),
        ({"own_kernels": False}, "sm80/forward"),
        ({"dtype": "float32"}, "sm90/forward_f32"),
    ],
)
def test_beside_it(fields: dict[str, Any], kernel: str) -> None:
    assert hopper_plan(**{**SHORT, **fields}).kernel == kernel


CHUNK: dict[str, Any] = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128, "window_right": 0}


@pytest.mark.parametrize(
    ("fields", "tile"),
    [
        # Tiles of 128 and of 192 rows, on 132 SMs.
        ({"seqlen_q": 512, "seqlen_k": 4096}, (128, 128)),  # 128 and 96
        ({"seqlen_q": 384, "seqlen_k": 4096}, (192, 80)),  # 96 and 64
        ({"seqlen_q": 768, "seqlen_k": 4096}, (192, 80)),  # 192 and 128
        ({"seqlen_q": 512, "seqlen_k": 16384}, (192, 80)),  # keys do not fit into L2
        ({"seqlen_q": 512, "seqlen_k": 4096, "varlen": True}, (192, 80)),
        ({"seqlen_q": 512, "seqlen_k": 4096, "wants_max_logit": True}, (192, 80)),
        ({"seqlen_q": 512, "seqlen_k": 4096, "head_dim": 96, "head_dim_v": 96}, (192, 80)),
        ({"seqlen_q": 512, "seqlen_k": 4096, "batch": 16}, (192, 80)),
    ],
)
def test_few_query_tiles(fields: dict[str, Any], tile: tuple[int, int]) -> None:
    found = hopper_plan(**{"operation": "forward", "batch": 1, **CHUNK, **fields})
    assert (found.kernel, found.block_m, found.block_n) == ("sm90/forward", *tile)
    assert any("128 queries fill 132 SMs better" in reason for reason in found.reasons) == (tile == (128, 128))


@pytest.mark.parametrize(
    ("capacity", "tile"), [(4096, (128, 128)), (8192, (192, 80))], ids=["in half of L2", "in more of it"]
)
def test_few_query_tiles_over_a_cache(capacity: int, tile: tuple[int, int]) -> None:
    call = {"operation": "decode", "batch": 1, "num_splits": 0, "varlen": True, "seqlen_q": 512, "seqlen_k": capacity}
    found = hopper_plan(**CHUNK, **call)
    assert (found.kernel, found.block_m, found.block_n) == ("sm90/forward", *tile)
