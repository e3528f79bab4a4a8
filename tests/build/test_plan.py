"""The planner, through ``flash_ext._plan``: which kernel, tiles and splits a problem gets, with no tensor in sight."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from flash_ext import _plan

WINDOWS = [(-1, -1), (-1, 0), (0, -1), (0, 0), (3, 0), (0, 5), (7, 7), (-1, 4), (4, -1), (40, 1), (1000, 1000)]
LENGTHS = [(1, 1), (1, 37), (37, 1), (13, 13), (5, 29), (29, 5), (32, 64), (31, 33), (0, 9), (9, 0)]
HUGE = 2**63 - 1


def plan(**fields: Any) -> _plan.Plan:
    return _plan.make_plan(_plan.Problem(**fields))


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


HOPPER: dict[str, Any] = dict(device="cuda", dtype="bfloat16", compute_capability=90, num_workers=132)


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


# --- kernels for Hopper ---------------------------------------------------------------------------------------------


def hopper_plan(**fields: Any) -> _plan.Plan:
    h200 = {"device": "cuda", "compute_capability": 90, "num_workers": 132, "dtype": "bfloat16"}
    sizes = {"seqlen_q": 1000, "seqlen_k": 1000, "heads_q": 8, "heads_kv": 2, "head_dim": 128, "head_dim_v": 128}
    return plan(**{**h200, **sizes, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window_right": 0},
        {"window_left": 9},
        {"varlen": True},
        {"has_sink": True},
        {"has_alibi": True},
        {"softcap": 3.0},
    ],
)
def test_the_kernel_for_hopper_serves_options_that_need_no_memory(fields: dict[str, Any]) -> None:
    found = hopper_plan(**fields)
    assert found.kernel == "sm90/forward"
    assert found.block_m % 64 == 0 and found.block_n % 16 == 0
    assert not any("variant of the kernel" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"has_bias": True}, "bias"),
        ({"has_mask": True}, "mask"),
        ({"has_block_mask": True}, "block mask"),
        ({"dropout_p": 0.1}, "dropout"),
    ],
)
@pytest.mark.parametrize(("head_dim", "served"), [(8, 64), (72, 128), (128, 128), (136, 256), (192, 256)])
def test_the_variant_with_options_of_the_kernel_for_hopper(
    fields: dict[str, Any], option: str, head_dim: int, served: int
) -> None:
    found = hopper_plan(head_dim=head_dim, head_dim_v=8, **fields)
    assert found.kernel == "sm90/forward" and found.block_n % 64 == 0
    assert any("variant of the kernel" in reason and option in reason for reason in found.reasons)
    assert any(reason.endswith(f"head dims up to {served}") for reason in found.reasons)


@pytest.mark.parametrize(
    ("fields", "tile"),
    [
        ({"has_bias": True}, (256, 64)),
        ({"has_mask": True, "window_right": 0}, (256, 64)),
        ({"has_block_mask": True, "block_m": 64, "block_n": 64, "has_sink": True}, (256, 64)),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128, "has_sink": True}, (128, 64)),
        ({"has_bias": True, "bias_dtype": "float16"}, (192, 64)),  # q is bfloat16
        ({"has_bias": True, "has_mask": True}, (192, 64)),
        ({"has_bias": True, "softcap": 3.0}, (192, 64)),
        ({"has_mask": True, "has_alibi": True}, (192, 64)),
        ({"has_bias": True, "softmax_scale": -1.0}, (192, 64)),
        ({"has_mask": True, "dropout_p": 0.1}, (256, 64)),
    ],
    ids=str,
)
def test_an_option_alone_has_a_kernel_of_its_own(fields: dict[str, Any], tile: tuple[int, int]) -> None:
    found = hopper_plan(head_dim=64, head_dim_v=64, **{"bias_dtype": "bfloat16", **fields})
    assert (found.kernel, found.block_m, found.block_n) == ("sm90/forward", *tile)


@pytest.mark.parametrize(
    ("bias_dtype", "served"), [("float16", True), ("bfloat16", True), ("float32", False), ("float64", False)]
)
def test_the_forward_for_hopper_serves_a_bias_of_16_bits(bias_dtype: str, served: bool) -> None:
    found = hopper_plan(has_bias=True, bias_dtype=bias_dtype)
    assert found.kernel == ("sm90/forward" if served else "sm80/forward")
    assert any("bias of 32 bits or more" in reason for reason in found.reasons) != served
    assert hopper_plan(bias_dtype=bias_dtype).kernel == "sm90/forward"  # there is none


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "served"),
    [
        (8, 64, "64"),
        (72, 8, "96"),
        (96, 104, "128"),
        (128, 128, "128"),
        (136, 128, "192, of v up to 128"),
        (136, 136, "192"),
        (200, 8, "256"),
        (8, 200, "256"),
    ],
)
def test_the_kernel_for_hopper_is_that_of_the_next_head_dims(head_dim: int, head_dim_v: int, served: str) -> None:
    reasons = hopper_plan(head_dim=head_dim, head_dim_v=head_dim_v).reasons
    assert any(reason.endswith(f"head dims up to {served}") for reason in reasons)


@pytest.mark.parametrize(
    ("fields", "block_n"),
    [
        ({"seqlen_q": 512, "seqlen_k": 512}, 64),
        ({"seqlen_q": 512, "seqlen_k": 512, "window_right": 0}, 64),
        ({"seqlen_q": 2048, "seqlen_k": 2048}, 80),
        ({"seqlen_q": 2048, "seqlen_k": 2048, "window_right": 0}, 64),
        ({"seqlen_q": 8192, "seqlen_k": 8192, "window_right": 0}, 80),
        ({"seqlen_q": 8192, "seqlen_k": 8192, "window_left": 256, "window_right": 0}, 64),
        ({"seqlen_q": 512, "seqlen_k": 400}, 80),  # which are five whole tiles
        ({"seqlen_q": 512, "seqlen_k": 512, "softcap": 3.0}, 80),  # kernels for options have one shape
        ({"seqlen_q": 512, "seqlen_k": 512, "softmax_scale": -1.0}, 80),
        ({"seqlen_q": 512, "seqlen_k": 512, "head_dim": 64, "head_dim_v": 64}, 64),
        ({"seqlen_q": 8192, "seqlen_k": 8192, "head_dim": 64, "head_dim_v": 64}, 64),
        ({"seqlen_q": 512, "seqlen_k": 512, "head_dim": 256, "head_dim_v": 256}, 64),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 256, "head_dim_v": 256}, 80),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 256, "head_dim_v": 256, "window_right": 0}, 64),
        ({"seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 256, "head_dim_v": 256, "window_right": 0}, 80),
    ],
)
def test_the_keys_of_a_tile_on_hopper(fields: dict[str, Any], block_n: int) -> None:
    found = hopper_plan(**fields)
    assert found.block_n == block_n
    assert any(f"x {block_n}:" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    "fields",
    [{"broadcast": True}, {"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"dtype": "float32", "seqlen_k": 0}],
)
def test_what_the_kernel_for_hopper_cannot_do_is_said(fields: dict[str, Any]) -> None:
    word = "stride of 0" if "broadcast" in fields else "empty"
    found = hopper_plan(**fields)
    assert found.kernel == "sm80/forward"
    assert any("Hopper" in reason and word in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({}, ""),
        ({"head_dim": 8, "head_dim_v": 40}, ""),
        ({"broadcast": True, "varlen": True, "has_sink": True, "window_left": 5}, ""),
        ({"allow_tf32": True}, "TF32"),
        ({"softcap": 3.0, "has_alibi": True, "softmax_scale": -1.0}, ""),
        ({"has_bias": True}, "bias"),
        ({"has_mask": True, "dropout_p": 0.1}, "mask, dropout"),
        ({"has_block_mask": True}, "block mask"),
        ({"own_kernels": False}, "not in this build"),
    ],
)
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_the_kernels_of_float32_on_hopper(operation: str, fields: dict[str, Any], obstacle: str) -> None:
    found = hopper_plan(operation=operation, dtype="float32", **fields)
    assert found.kernel == (f"sm80/{operation}" if obstacle else f"sm90/{operation}_f32")
    assert any("Hopper" in reason and obstacle in reason for reason in found.reasons) == bool(obstacle)
    if not obstacle:
        larger = max(fields.get("head_dim", 128), fields.get("head_dim_v", 128))
        forward_tile = (192 if larger <= 64 else 128, 64 if larger <= 128 else 32)
        assert (found.block_m, found.block_n) == ((64, 64) if operation == "backward" else forward_tile)
        assert any("six in bfloat16" in reason for reason in found.reasons)
    ampere = hopper_plan(operation=operation, dtype="float32", compute_capability=80, **fields)
    assert ampere.kernel == f"sm80/{operation}"


@pytest.mark.parametrize("fields", [{"head_dim": 136}, {"head_dim_v": 256}])
def test_wide_heads_of_float32_on_hopper(fields: dict[str, Any]) -> None:
    forward, backward = (hopper_plan(operation=op, dtype="float32", **fields) for op in ("forward", "backward"))
    assert (forward.kernel, backward.kernel) == ("sm90/forward_f32", "sm90/backward_f32")
    assert (forward.block_m, forward.block_n) == (128, 32)
    assert (backward.block_m, backward.block_n) == (64, 64)
    assert any("two CTAs of a cluster" in reason for reason in backward.reasons)


def test_the_backward_of_float32_in_one_order() -> None:
    found = hopper_plan(operation="backward", dtype="float32", deterministic=True)
    assert found.kernel == "sm80/backward"
    assert any("Hopper" in reason and "deterministic" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({}, ""),
        ({"window_right": 0, "varlen": True, "has_sink": True}, ""),
        ({"head_dim": 8, "head_dim_v": 8}, ""),
        ({"has_bias": True, "has_alibi": True, "softcap": 3.0}, ""),
        ({"has_mask": True, "has_block_mask": True, "dropout_p": 0.1}, ""),
        ({"has_bias": True, "bias_dtype": "float32"}, ""),
        ({"head_dim": 136, "head_dim_v": 136, "has_bias": True}, "bias beyond head_dim 128"),
        ({"head_dim": 136, "head_dim_v": 136, "softcap": 3.0}, "softcap beyond head_dim 128"),
        ({"head_dim": 136, "head_dim_v": 136, "has_alibi": True}, "ALiBi beyond head_dim 128"),
        ({"head_dim": 136, "head_dim_v": 136, "has_mask": True}, "mask beyond head_dim 128"),
        ({"head_dim": 136, "head_dim_v": 136, "has_block_mask": True}, "block mask beyond head_dim 128"),
        ({"head_dim": 136, "head_dim_v": 136, "dropout_p": 0.1}, "dropout beyond head_dim 128"),
        ({"deterministic": True}, ""),
        ({"deterministic": True, "window_right": 0, "varlen": True, "heads_kv": 1}, ""),
        ({"deterministic": True, "softcap": 3.0}, "deterministic beside options"),
        ({"deterministic": True, "has_alibi": True}, "deterministic beside options"),
        ({"deterministic": True, "has_bias": True}, "deterministic beside options"),
        ({"deterministic": True, "dropout_p": 0.1}, "deterministic beside options"),
        ({"deterministic": True, "head_dim": 256, "head_dim_v": 256}, ""),
        ({"deterministic": True, "has_mask": True}, "deterministic beside options"),
        ({"deterministic": True, "has_block_mask": True}, "deterministic beside options"),
        ({"softmax_scale": -1.0}, "softmax_scale -1"),
        ({"softmax_scale": 0.0}, "softmax_scale 0"),
        ({"head_dim_v": 64}, "head_dim 64 of v beside 128"),
        ({"head_dim": 136, "head_dim_v": 136}, ""),
        ({"head_dim": 256, "head_dim_v": 256}, ""),
        ({"broadcast": True}, "stride of 0"),
        ({"seqlen_q": 0}, "empty"),
        ({"own_kernels": False}, "not in this build"),
    ],
)
def test_the_kernel_of_the_backward(fields: dict[str, Any], obstacle: str) -> None:
    found = hopper_plan(operation="backward", **fields)
    assert found.kernel == ("sm80/backward" if obstacle else "sm90/backward")
    assert any("Hopper" in reason and obstacle in reason for reason in found.reasons) == bool(obstacle)
    assert (found.block_m, found.block_n > 0) == ((0, False) if obstacle else (64, True))
    assert hopper_plan(operation="backward", compute_capability=80, **fields).kernel == "sm80/backward"


@pytest.mark.parametrize("fields", [{"has_mask": True}, {"has_block_mask": True}, {"dropout_p": 0.1}])
@pytest.mark.parametrize(
    ("bias_dtype", "head_dim", "served"),
    [("bfloat16", 128, True), ("float32", 64, True), ("float32", 72, False), ("float64", 128, False)],
)
def test_the_backward_with_a_bias_beside_masks(
    fields: dict[str, Any], bias_dtype: str, head_dim: int, served: bool
) -> None:
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim}
    found = hopper_plan(operation="backward", has_bias=True, bias_dtype=bias_dtype, **sizes, **fields)
    assert found.kernel == ("sm90/backward" if served else "sm80/backward")
    assert any("bias of 32 bits or more beside masks" in reason for reason in found.reasons) != served


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({}, ""),
        ({"window_left": 9, "softcap": 3.0, "has_alibi": True, "varlen": True}, ""),
        ({"dtype": "float32"}, "float32"),
        ({"has_mask": True}, "mask"),
        ({"has_block_mask": True}, "block mask"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"head_dim": 136}, "head_dim"),
        ({"bias_in_pieces": False}, "a bias whose rows are not made of pieces of 16 bytes"),
        ({"bias_dtype": "float64"}, "a bias whose rows are not made of pieces of 16 bytes"),
        ({"deterministic": True, "head_dim_v": 64}, ""),
        ({"head_dim_v": 136}, "head_dim"),
    ],
)
def test_the_kernel_of_the_gradient_of_bias(fields: dict[str, Any], obstacle: str) -> None:
    found = hopper_plan(operation="backward", has_bias=True, **fields)
    assert found.bias_kernel == ("sm80/bias_gradient" if obstacle else "sm90/bias_gradient")
    said = f"does not serve {obstacle}" if obstacle else "wgmma"
    assert any(
        reason.startswith(f"gradient of bias: {found.bias_kernel}") and said in reason for reason in found.reasons
    )
    assert hopper_plan(operation="backward").bias_kernel == ""
    ampere = hopper_plan(operation="backward", has_bias=True, compute_capability=80)
    assert ampere.bias_kernel == "sm80/bias_gradient"


@pytest.mark.parametrize("fields", [{"compute_capability": 80}, {"compute_capability": 120}, {"own_kernels": False}])
def test_other_gpus_run_the_kernel_for_all(fields: dict[str, Any]) -> None:
    found = hopper_plan(**fields)
    assert found.kernel == "sm80/forward"
    assert any("FLASH_EXT_HOPPER" in reason for reason in found.reasons) == ("own_kernels" in fields)


# --- the table -----------------------------------------------------------------------------------------------------


def test_every_kernel_has_a_room_and_a_problem() -> None:
    assert len(set(_plan.KERNELS)) == len(_plan.KERNELS)
    folder = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
    rooms = {name for name in _plan.KERNELS if not name.startswith("cpu/")}
    assert all(list((folder / room / "inst").glob("*.cu")) for room in rooms)
    found = set()
    for operation, device, capability, dtype, seqlen_q in itertools.product(
        ["forward", "backward", "weights", "weights_backward", "decode"], ["cpu", "cuda"], [80, 90],
        ["bfloat16", "float32"], [1, 4096],
    ):  # fmt: skip
        fields = {"compute_capability": capability, "dtype": dtype, "seqlen_q": seqlen_q, "has_bias": True}
        for has_bias in (False, operation == "backward"):
            chosen = plan(operation=operation, device=device, **{**fields, "has_bias": has_bias})
            found |= {chosen.kernel, chosen.bias_kernel}
    assert found - {""} == set(_plan.KERNELS)


def test_the_tiles_of_a_bias_for_all() -> None:
    def reason(capability: int, **fields: Any) -> str:
        per_cta, per_sm = SHARED[capability]
        sizes = {"compute_capability": capability, "own_kernels": False, "has_bias": True}
        shared = {"shared_bytes_per_cta": per_cta, "shared_bytes_per_sm": per_sm}
        return next(r for r in hopper_plan(**{**sizes, **shared, **fields}).reasons if r.startswith("bias: "))

    assert "ahead of time" in reason(80, bias_dtype="bfloat16")
    assert "ahead of time" in reason(89, bias_dtype="float32", has_mask=True)
    assert "pieces of 16 bytes" in reason(80, bias_dtype="bfloat16", bias_in_pieces=False)
    assert "pieces of 16 bytes" in reason(80, bias_dtype="float64")
    wide = {"head_dim": 256, "head_dim_v": 256, "dtype": "float32", "bias_dtype": "float32"}
    assert "shared memory" in reason(89, **wide, has_block_mask=True)


# --- variants ------------------------------------------------------------------------------------------------------

# What a CTA can have of shared memory, and an SM: of an H200, an A100 and an RTX 4090.
SHARED = {90: (232448, 233472), 80: (166912, 167936), 89: (101376, 102400)}


def variant(operation: str, capability: int, **fields: Any) -> str:
    return hopper_plan(operation=operation, compute_capability=capability, **fields).variant


def test_a_large_softcap_goes_to_the_kernel_of_any_options() -> None:
    """Which bounds weights that are recomputed from a large lse."""
    assert variant("backward", 90, softcap=4e4) == "softcap alone"
    assert variant("backward", 90, softcap=5e4) == "all options"


@pytest.mark.parametrize(
    ("fields", "forward", "backward"),
    [
        ({}, "scaled products", "scaled products"),
        ({"softcap": 3.0}, "softcap, ALiBi and any scale", "softcap alone"),
        ({"has_alibi": True}, "softcap, ALiBi and any scale", "ALiBi alone"),
        ({"has_alibi": True, "softcap": 3.0}, "softcap, ALiBi and any scale", "all options"),
        ({"has_bias": True}, "bias alone", "bias alone"),
        ({"has_bias": True, "bias_in_pieces": False}, "bias alone", "all options"),
        ({"has_bias": True, "bias_dtype": "float16"}, "all options but dropout", "all options"),
        ({"has_bias": True, "bias_per_key": True}, "bias alone", "per-key bias or key-padding mask alone"),
        ({"has_mask": True}, "masks alone", "masks alone"),
        ({"has_block_mask": True, "block_m": 32, "block_n": 64}, "masks alone", "masks alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128}, "block mask alone", "block mask alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 64}, "block mask alone", "masks alone"),
        ({"has_block_mask": True, "block_m": 64, "block_n": 256}, "masks alone", "block mask alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128, "has_sink": True}, "block mask alone",
         "block mask alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128, "window_right": 0}, "masks alone", "masks alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128, "varlen": True}, "masks alone", "masks alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128, "has_mask": True}, "masks alone", "masks alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128, "has_bias": True}, "all options but dropout",
         "all options"),
        ({"has_mask": True, "mask_per_key": True}, "masks alone", "per-key bias or key-padding mask alone"),
        ({"has_mask": True, "mask_per_key": True, "has_block_mask": True}, "masks alone", "masks alone"),
        ({"has_mask": True, "has_bias": True}, "all options but dropout", "all options"),
        ({"has_mask": True, "mask_per_key": True, "has_bias": True}, "all options but dropout",
         "bias and key-padding mask alone"),
        ({"dropout_p": 0.1}, "all options", "dropout alone"),
        ({"dropout_p": 0.1, "has_mask": True, "mask_per_key": True}, "all options",
         "dropout and key-padding mask alone"),
        ({"dropout_p": 2.0**-20}, "all options", "dropout alone"),  # not rounded to 0
        ({"head_dim": 256, "head_dim_v": 256}, "scaled products", "wide heads"),
    ],
    ids=str,
)  # fmt: skip
def test_variants_of_the_kernels_for_hopper(fields: dict[str, Any], forward: str, backward: str) -> None:
    fields = {"bias_dtype": "bfloat16", **fields}
    assert variant("forward", 90, **fields) == forward
    assert variant("backward", 90, **fields) == backward
    reasons = hopper_plan(**fields).reasons
    assert any("copied first" in reason for reason in reasons) != fields.get("bias_in_pieces", True)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "scaled products"),
        ({"has_bias": True, "bias_dtype": "bfloat16"}, "bias alone"),
        ({"has_bias": True, "bias_dtype": "bfloat16", "bias_in_pieces": False}, "all options and pages"),
        ({"has_bias": True, "bias_dtype": "bfloat16", "softmax_scale": 1e-30}, "all options and pages"),
        ({"has_bias": True, "bias_dtype": "float32"}, "all options and pages"),
        ({"has_bias": True, "bias_dtype": "float32", "head_dim": 64, "head_dim_v": 64}, "float32 bias alone"),
        ({"has_bias": True, "bias_dtype": "float64", "head_dim": 64, "head_dim_v": 64}, "all options and pages"),
        ({"has_bias": True, "bias_dtype": "bfloat16", "has_mask": True}, "all options and pages"),
        ({"has_mask": True}, "mask alone"),
        ({"has_mask": True, "head_dim": 256}, "all options and pages"),
        ({"has_mask": True, "dropout_p": 0.1}, "all options and pages"),
        ({"has_block_mask": True}, "all options and pages"),
        ({"dropout_p": 0.1}, "dropout alone"),
        ({"dropout_p": 0.1, "head_dim": 256}, "softcap, ALiBi, dropout and any scale"),
        ({"softcap": 3.0}, "softcap, ALiBi, dropout and any scale"),
        ({"softcap": 3.0, "dropout_p": 0.1}, "all options and pages"),
        ({"softmax_scale": 0.0}, "softcap, ALiBi, dropout and any scale"),
        ({"softcap": 3.0, "dtype": "float32"}, "all options and pages"),
        ({"operation": "decode", "seqlen_q": 4096}, "scaled products"),
        ({"operation": "decode", "seqlen_q": 4096, "paged": True}, "all options and pages"),
    ],
    ids=str,
)
def test_variants_of_the_forward_for_all(fields: dict[str, Any], found: str) -> None:
    assert variant(**{"operation": "forward", **fields}, capability=80) == found


def sm80_tile(operation: str, capability: int, **fields: Any) -> tuple[str, int, int]:
    per_cta, per_sm = SHARED[capability]
    sizes = {"head_dim_v": fields.get("head_dim", 128), "own_kernels": False, "compute_capability": capability}
    shared = {"shared_bytes_per_cta": per_cta, "shared_bytes_per_sm": per_sm}
    found = hopper_plan(operation=operation, **{**sizes, **shared, **fields})
    assert found.kernel == f"sm80/{operation}"
    assert any(reason.startswith(f"tile {found.block_m} x {found.block_n}: ") for reason in found.reasons)
    return found.variant, found.block_m, found.block_n


@pytest.mark.parametrize(
    ("capability", "fields", "found"),
    [
        (80, {"head_dim": 64}, ("scaled products", 128, 128)),
        (89, {"head_dim": 64}, ("all options in little shared memory", 64, 64)),
        (80, {}, ("scaled products", 64, 128)),
        (90, {}, ("scaled products", 64, 128)),
        (89, {}, ("all options in little shared memory", 32, 64)),
        (80, {"has_mask": True}, ("all options", 64, 128)),
        (80, {"has_bias": True}, ("all options in little shared memory", 32, 64)),  # a tile of it is too much
        (90, {"has_bias": True}, ("all options", 64, 128)),
        (90, {"has_bias": True, "head_dim": 256}, ("all options", 64, 64)),
        (80, {"has_bias": True, "head_dim": 256}, ("all options in little shared memory", 32, 32)),
        (90, {"dtype": "float32"}, ("scaled products", 32, 128)),
        (90, {"dtype": "float32", "softcap": 3.0}, ("all options", 32, 64)),
    ],
    ids=str,
)
def test_tiles_of_the_backward_for_all_fit_the_shared_memory(
    capability: int, fields: dict[str, Any], found: tuple[str, int, int]
) -> None:
    assert sm80_tile("backward", capability, **fields) == found


@pytest.mark.parametrize("capability", SHARED)
def test_wide_float32_heads_of_the_backward_for_all(capability: int) -> None:
    per_cta, per_sm = SHARED[capability]
    found = hopper_plan(
        operation="backward", dtype="float32", head_dim=256, own_kernels=False, compute_capability=capability,
        shared_bytes_per_cta=per_cta, shared_bytes_per_sm=per_sm,
    )  # fmt: skip
    assert (found.variant == "all options in slabs of columns") == (per_cta < 173 * 1024)
    assert (found.block_m > 0) == (per_cta >= 173 * 1024)


@pytest.mark.parametrize(("capability", "rows"), [(90, 64), (80, 128), (89, 64)])
def test_tiles_of_the_forward_for_all(capability: int, rows: int) -> None:
    assert sm80_tile("forward", capability) == ("scaled products", 128, 64)
    assert sm80_tile("forward", capability, dtype="float32") == ("scaled products", 128, 32)
    assert sm80_tile("forward", capability, head_dim=256)[1:] == (rows, 64)
