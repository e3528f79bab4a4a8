"""Plans of problems on GPUs that need not be there."""

from __future__ import annotations

from typing import Any

from flash_ext import _plan

HOPPER: dict[str, Any] = dict(device="cuda", dtype="bfloat16", compute_capability=90, num_workers=132)  # an H200
# What a CTA can have of shared memory, and an SM: of an H200, an A100 and an RTX 4090.
SHARED = {90: (232448, 233472), 80: (166912, 167936), 89: (101376, 102400)}


def plan(**fields: Any) -> _plan.Plan:
    return _plan.make_plan(_plan.Problem(**fields))


def hopper_plan(**fields: Any) -> _plan.Plan:
    sizes = {"seqlen_q": 1000, "seqlen_k": 1000, "heads_q": 8, "heads_kv": 2, "head_dim": 128, "head_dim_v": 128}
    return plan(**{**HOPPER, **sizes, **fields})
