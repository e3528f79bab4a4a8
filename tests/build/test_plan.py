"""The planner, through ``flash_ext._plan``: problems, what is supported, mask classes and tiles of keys."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from flash_ext import _plan
from tests.build.plans import HOPPER, plan

WINDOWS = [(-1, -1), (-1, 0), (0, -1), (0, 0), (3, 0), (0, 5), (7, 7), (-1, 4), (4, -1), (40, 1), (1000, 1000)]
LENGTHS = [(1, 1), (1, 37), (37, 1), (13, 13), (5, 29), (29, 5), (32, 64), (31, 33), (0, 9), (9, 0)]
HUGE = 2**63 - 1


def refusal(**fields: Any) -> str:
    ok, reason = _plan.supports(_plan.Problem(**fields))
    assert not ok
    with pytest.raises(ValueError) as caught:
        plan(**fields)
    assert str(caught.value) == reason, "what raises must be what supports() says"
    return reason


def visible(i: int, j: int, seqlen_q: int, seqlen_k: int, window: tuple[int, int], top_left: bool) -> bool:
    offset = 0 if top_left else seqlen_k - seqlen_q
    left, right = window
    return (left < 0 or i + offset - left <= j) and (right < 0 or j <= i + offset + right)


# --- problems ------------------------------------------------------------------------------------------------------


def test_a_problem_holds_what_it_is_given() -> None:
    problem = _plan.Problem(operation="decode", dtype="bfloat16", batch=3, window_right=0, batch_invariant=True)
    assert (problem.operation, problem.dtype, problem.device) == ("decode", "bfloat16", "cpu")
    assert (problem.batch, problem.window_left, problem.window_right) == (3, -1, 0)
    assert problem.batch_invariant


@pytest.mark.parametrize(
    ("field", "value"), [("operation", "sideways"), ("device", "abacus"), ("dtype", "int8"), ("dtype", "")]
)
def test_names_that_do_not_exist_raise(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be one of .*, got {value}"):
        _plan.Problem(**{field: value})


def test_fields_that_do_not_exist_raise() -> None:
    with pytest.raises(AttributeError, match="colour"):
        _plan.Problem(colour=1)


def test_a_problem_and_its_text() -> None:
    problem = _plan.Problem(operation="decode", device="cuda", dtype="bfloat16", softmax_scale=1 / 3, window_left=HUGE)
    problem.has_bias, problem.bias_dtype = True, "float64"
    again = _plan.problem_of(str(problem))
    assert str(again) == str(problem)
    assert (again.softmax_scale, again.window_left, again.bias_dtype) == (1 / 3, HUGE, "float64")


@pytest.mark.parametrize(
    ("change", "said"),
    [(("batch 1\n", ""), "without batch"), (("batch 1", "batch"), "not a problem"), (("batch 1", "bat 1"), "batch"),
     (("device cpu", "device abacus"), "device must be one of"), (("batch 1\n", "batch 1\ncolour 1\n"), "no colour")],
)  # fmt: skip
def test_a_text_of_no_problem_raises(change: tuple[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _plan.problem_of(str(_plan.Problem()).replace(*change))


# --- support -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["forward", "backward", "weights", "weights_backward", "decode"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 256])
def test_the_cpu_supports_every_operation(operation: str, dtype: str, head_dim: int) -> None:
    problem = _plan.Problem(operation=operation, dtype=dtype, head_dim=head_dim, head_dim_v=256, heads_q=6, heads_kv=2)
    assert _plan.supports(problem) == (True, "")


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_empty_problems_are_supported(empty: str) -> None:
    assert plan(**{empty: 0}).num_splits == 1


@pytest.mark.parametrize(
    ("fields", "named", "came"),
    [
        ({"head_dim": 0}, "head_dim of q", "0"),
        ({"head_dim": 12}, "head_dim of q", "12"),
        ({"head_dim": 264}, "head_dim of q", "264"),
        ({"head_dim_v": 20}, "head_dim of v", "20"),
        ({"head_dim_v": 512}, "head_dim of v", "512"),
        ({"heads_q": 3, "heads_kv": 2}, "heads", "3 heads in q and 2"),
        ({"heads_q": 2, "heads_kv": 4}, "heads", "2 heads in q and 4"),
        ({"heads_q": 0}, "heads", "0"),
        ({"heads_kv": 0}, "heads", "0"),
        ({"batch": -1}, "batch", "-1"),
        ({"seqlen_q": -1}, "seqlen_q", "-1"),
        ({"seqlen_k": -2}, "seqlen_k", "-2"),
        ({"softmax_scale": math.nan}, "softmax_scale", "nan"),
        ({"softmax_scale": -math.inf}, "softmax_scale", "-inf"),
        ({"softcap": math.nan}, "softcap", "nan"),
        ({"softcap": -0.5}, "softcap", "-0.5"),
        ({"softcap": math.inf}, "softcap", "inf"),
        ({"softcap": 1e-50}, "softcap", "1e-50"),
        ({"softcap": 1e-30, "softmax_scale": 1e9}, "softmax_scale / softcap", "1e-30"),
        ({"softcap": 1e300}, "softcap", "1e+300"),
        ({"softcap": 1e-320, "dtype": "float64"}, "softcap", "e-321"),
        ({"softmax_scale": 1e39}, "softmax_scale", "1e+39"),
        ({"seqlen_q": 2**31}, "seqlen_q", "2147483648"),
        ({"seqlen_k": 2**62}, "seqlen_k", str(2**62)),
        ({"dropout_p": math.nan}, "dropout_p", "nan"),
        ({"dropout_p": 1.25}, "dropout_p", "1.25"),
        ({"dropout_p": -0.25}, "dropout_p", "-0.25"),
        ({"window_left": -2}, "window_left", "-2"),
        ({"window_right": -3}, "window_right", "-3"),
        ({"operation": "decode", "num_splits": -1}, "num_splits", "-1"),
        ({"operation": "decode", "num_splits": 3, "batch_invariant": True}, "num_splits", "3"),
        ({"num_workers": 0}, "num_workers", "0"),
        ({"device": "cuda", "dtype": "float64"}, "float64", "CPU"),
    ],
    ids=str,
)
def test_reasons_name_the_argument_and_what_came(fields: dict[str, Any], named: str, came: str) -> None:
    reason = refusal(**fields)
    assert named in reason and came in reason


@pytest.mark.parametrize(
    ("name", "most", "fields"),
    [
        ("batch", 65535, {}),
        ("seqlen_q", 65535 * 32, {}),
        ("seqlen_q", 2**29, {"total_q": 5, "varlen": True}),
        ("seqlen_k", 2**29, {}),
    ],
    ids=str,
)
def test_the_largest_sizes_on_cuda(name: str, most: int, fields: dict[str, Any]) -> None:
    """What a grid and 32 bits can count to; packed, the grid is as long as the rows that there are."""
    assert _plan.supports(_plan.Problem(**HOPPER, **fields, **{name: most})) == (True, "")
    reason = refusal(**HOPPER, **fields, **{name: most + 1})
    assert reason == f"{name} on CUDA must be at most {most}, got {most + 1}"


# --- mask classes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("top_left", [False, True])
def test_mask_class_agrees_with_the_visibility_rule(window: tuple[int, int], top_left: bool) -> None:
    for lengths in LENGTHS:
        check_mask_class(window, lengths, top_left)


def check_mask_class(window: tuple[int, int], lengths: tuple[int, int], top_left: bool) -> None:
    seqlen_q, seqlen_k = lengths
    fields = dict(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, window_left=window[0], window_right=window[1], top_left=top_left
    )
    pairs = [(i, j) for i in range(seqlen_q) for j in range(seqlen_k)]

    def same_as(rule: tuple[int, int]) -> bool:
        return all(
            visible(i, j, *lengths, window, top_left) == visible(i, j, *lengths, rule, top_left) for i, j in pairs
        )

    mask_class = plan(**fields).mask_class
    if mask_class == "full":
        assert same_as((-1, -1))
    elif mask_class == "causal":
        assert same_as((-1, 0))
    else:
        assert max(window) >= 0


@pytest.mark.parametrize(
    ("fields", "mask_class"),
    [
        ({}, "full"),
        ({"window_right": 0}, "causal"),
        ({"window_right": 0, "varlen": True}, "causal"),
        ({"window_right": 0, "top_left": True}, "causal"),
        ({"window_left": 4, "window_right": 0}, "general"),
        ({"window_left": 4}, "general"),
        ({"window_right": 1}, "general"),
        ({"has_mask": True}, "general"),
        ({"has_block_mask": True}, "general"),
        ({"has_mask": True, "window_right": 0}, "general"),
        ({"has_bias": True, "has_sink": True, "has_alibi": True, "softcap": 3.0, "dropout_p": 0.1}, "full"),
        # At these lengths the limits hide nothing...
        ({"window_left": 16, "window_right": 16}, "full"),
        ({"window_left": 16, "window_right": 0}, "causal"),
        ({"seqlen_q": 1, "window_right": 0}, "full"),
        # ... unless only the device knows the lengths.
        ({"window_left": 16, "window_right": 16, "varlen": True}, "general"),
        ({"window_left": 16, "varlen": True}, "general"),
        ({"seqlen_q": 1, "window_right": 0, "varlen": True}, "causal"),
    ],
    ids=str,
)
def test_mask_class(fields: dict[str, Any], mask_class: str) -> None:
    found = plan(**{"seqlen_q": 16, "seqlen_k": 16, **fields})
    assert found.mask_class == mask_class
    assert found.reasons[0].startswith(f"mask class {mask_class}")


# --- tiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [*WINDOWS, (HUGE, HUGE), (HUGE, 0), (0, HUGE)], ids=str)
@pytest.mark.parametrize("blocks", [(1, 1), (8, 8), (16, 8), (7, 5), (64, 64)], ids=str)
def test_key_tiles(window: tuple[int, int], blocks: tuple[int, int]) -> None:
    for lengths, top_left in itertools.product(LENGTHS, (False, True)):
        check_key_tiles(window, lengths, top_left, *blocks)


def check_key_tiles(
    window: tuple[int, int], lengths: tuple[int, int], top_left: bool, block_m: int, block_n: int
) -> None:
    """Every tile with a visible pair is visited, none beyond the outermost ones, and full tiles are full."""
    seqlen_q, seqlen_k = lengths
    ranges = _plan.key_tiles(seqlen_q, seqlen_k, window, top_left, block_m, block_n)
    assert len(ranges) == math.ceil(seqlen_q / block_m)
    for m, tiles in enumerate(ranges):
        assert 0 <= tiles.begin <= tiles.full_begin <= tiles.full_end <= tiles.end <= math.ceil(seqlen_k / block_n)
        rows = range(m * block_m, min((m + 1) * block_m, seqlen_q))
        touched, complete = [], []
        for n in range(math.ceil(seqlen_k / block_n)):
            inside = range(n * block_n, min((n + 1) * block_n, seqlen_k))
            seen = [visible(i, j, seqlen_q, seqlen_k, window, top_left) for i in rows for j in inside]
            touched += [n] if any(seen) else []
            complete += [n] if all(seen) and len(inside) == block_n else []
        assert (tiles.begin, tiles.end) == ((touched[0], touched[-1] + 1) if touched else (0, 0))
        assert list(range(tiles.full_begin, tiles.full_end)) == complete


@pytest.mark.parametrize(
    "bad", [{"seqlen_q": -1}, {"seqlen_k": -1}, {"block_m": 0}, {"block_n": 0}, {"block_n": -8}], ids=str
)
def test_key_tiles_of_nonsense_raise(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="key_tiles"):
        _plan.key_tiles(**{"seqlen_q": 4, "seqlen_k": 4, **bad})
