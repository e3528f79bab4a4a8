"""The planner's table: which kernel a problem gets on Hopper and on other GPUs, and the reason that it names."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from flash_ext import _plan
from tests.build.plans import HOPPER, hopper_plan, plan


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
    found = hopper_plan(batch=64, **fields)
    assert (found.kernel, found.block_n) == ("sm90/forward", block_n)
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
        ({"head_dim": 136, "head_dim_v": 136, "softcap": 3.0}, ""),
        ({"head_dim": 136, "head_dim_v": 136, "has_alibi": True}, ""),
        ({"head_dim": 136, "head_dim_v": 136, "has_mask": True}, ""),
        ({"head_dim": 136, "head_dim_v": 136, "has_block_mask": True}, ""),
        ({"head_dim": 136, "head_dim_v": 136, "dropout_p": 0.1}, ""),
        ({"deterministic": True}, ""),
        ({"deterministic": True, "window_right": 0, "varlen": True, "heads_kv": 1}, ""),
        ({"deterministic": True, "softcap": 3.0}, ""),
        ({"deterministic": True, "softcap": 5e4}, "deterministic beside options"),
        ({"deterministic": True, "softcap": 3.0, "has_alibi": True}, "deterministic beside options"),
        ({"deterministic": True, "has_bias": True, "bias_dtype": "float32"}, "deterministic beside options"),
        ({"deterministic": True, "head_dim": 256, "head_dim_v": 256}, ""),
        ({"deterministic": True, "has_mask": True}, "deterministic beside masks of query-key pairs"),
        ({"deterministic": True, "has_mask": True, "mask_per_key": True}, ""),
        ({"deterministic": True, "has_block_mask": True}, "deterministic beside options"),
        (
            {
                "deterministic": True,
                "has_block_mask": True,
                "block_m": 64,
                "block_n": 128,
                "head_dim": 64,
                "head_dim_v": 64,
            },
            "deterministic beside options",
        ),
        (
            {
                "deterministic": True,
                "has_block_mask": True,
                "block_m": 64,
                "block_n": 64,
                "head_dim": 64,
                "head_dim_v": 64,
            },
            "deterministic",
        ),
        ({"deterministic": True, "softcap": 3.0, "head_dim": 64, "head_dim_v": 64}, "deterministic beside options"),
        (
            {"deterministic": True, "softcap": 3.0, "head_dim": 136, "head_dim_v": 136},
            "deterministic beside options beyond head_dim 128",
        ),
        ({"softmax_scale": -1.0}, "softmax_scale -1"),
        ({"softmax_scale": 0.0}, "softmax_scale 0"),
        ({"softmax_scale": 1e-300}, "softmax_scale 1e-300"),
        ({"head_dim_v": 64}, ""),
        ({"head_dim": 192, "head_dim_v": 128}, ""),
        ({"head_dim": 136, "head_dim_v": 64, "softcap": 3.0}, ""),
        ({"head_dim": 64, "head_dim_v": 136, "softcap": 3.0}, ""),
        ({"head_dim": 136, "head_dim_v": 136}, ""),
        ({"head_dim": 256, "head_dim_v": 256}, ""),
        ({"broadcast": True}, "stride of 0"),
        ({"seqlen_q": 0}, "empty"),
        ({"own_kernels": False}, "not in this build"),
    ],
)
def test_the_kernel_of_the_backward(fields: dict[str, Any], obstacle: str) -> None:
    found = hopper_plan(operation="backward", **fields)
    assert found.kernel == "sm80/backward" if obstacle else found.kernel.startswith("sm90/backward")
    assert any("Hopper" in reason and obstacle in reason for reason in found.reasons) == bool(obstacle)
    assert any("beyond" in reason for reason in found.reasons) == ("beyond" in obstacle)
    assert (found.block_m > 0, found.block_n > 0) == (not obstacle, not obstacle)
    assert hopper_plan(operation="backward", compute_capability=80, **fields).kernel == "sm80/backward"


@pytest.mark.parametrize(
    ("fields", "kernel", "tile"),
    [
        ({}, "sm90/backward_persistent", (96, 128)),
        (
            {"head_dim": 40, "head_dim_v": 40, "window_left": 9, "varlen": True, "has_sink": True},
            "sm90/backward_persistent",
            (96, 128),
        ),
        ({"deterministic": True}, "sm90/backward_persistent", (96, 128)),
        ({"deterministic": True, "varlen": True, "heads_kv": 1}, "sm90/backward_persistent", (96, 128)),
        ({"softcap": 3.0}, "sm90/backward_persistent", (96, 128)),
        ({"softcap": 5e4}, "sm90/backward_options", (64, 192)),
        ({"has_alibi": True, "varlen": True}, "sm90/backward_persistent", (96, 128)),
        ({"has_alibi": True, "softcap": 3.0}, "sm90/backward_options", (64, 192)),
        ({"has_mask": True, "mask_per_key": True}, "sm90/backward_persistent", (96, 128)),
        ({"has_mask": True}, "sm90/backward_options", (64, 192)),
        ({"has_bias": True, "bias_dtype": "float32", "bias_per_key": True}, "sm90/backward_persistent", (96, 128)),
        ({"has_bias": True, "bias_dtype": "bfloat16"}, "sm90/backward_options", (64, 192)),
        ({"dropout_p": 0.1}, "sm90/backward_options", (64, 192)),
        ({"dropout_p": 0.1, "has_mask": True, "mask_per_key": True}, "sm90/backward_options", (64, 192)),
        (
            {"has_mask": True, "mask_per_key": True, "has_block_mask": True, "block_m": 64, "block_n": 128},
            "sm90/backward_options",
            (64, 192),
        ),
        ({"has_block_mask": True, "block_m": 64, "block_n": 128}, "sm90/backward_persistent", (96, 128)),
        ({"has_block_mask": True, "block_m": 64, "block_n": 64}, "sm90/backward_persistent", (96, 128)),
        ({"has_block_mask": True, "block_m": 128, "block_n": 192}, "sm90/backward_persistent", (96, 128)),
        ({"has_block_mask": True, "block_m": 64, "block_n": 32}, "sm90/backward_options", (64, 192)),
        ({"has_block_mask": True, "block_m": 32, "block_n": 64}, "sm90/backward_options", (64, 192)),
        (
            {"has_block_mask": True, "block_m": 64, "block_n": 128, "has_sink": True, "heads_kv": 1},
            "sm90/backward_persistent",
            (96, 128),
        ),
        (
            {"has_block_mask": True, "block_m": 64, "block_n": 128, "window_right": 0},
            "sm90/backward_options",
            (64, 192),
        ),
        ({"has_block_mask": True, "block_m": 64, "block_n": 128, "varlen": True}, "sm90/backward_options", (64, 192)),
        ({"has_block_mask": True, "block_m": 64, "block_n": 128, "head_dim_v": 72}, "sm90/backward", (64, 128)),
        ({"head_dim": 72, "head_dim_v": 72}, "sm90/backward", (64, 128)),
        ({"head_dim": 64, "head_dim_v": 8}, "sm90/backward_persistent", (96, 128)),
        ({"head_dim": 8, "head_dim_v": 72}, "sm90/backward", (64, 128)),
    ],
    ids=str,
)
def test_the_backward_is_persistent_where_heads_are_narrow(
    fields: dict[str, Any], kernel: str, tile: tuple[int, int]
) -> None:
    found = hopper_plan(operation="backward", **{"head_dim": 64, "head_dim_v": 64, **fields})
    assert (found.kernel, found.block_m, found.block_n) == (kernel, *tile)
    assert any("persistent, one CTA an SM" in reason for reason in found.reasons) == (tile == (96, 128))


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"deterministic": True}, "sm90/backward"),
        ({"softcap": 3.0}, "sm90/backward"),
        ({"softcap": 5e4}, "sm90/backward_options"),
        ({"has_alibi": True}, "sm90/backward"),
        ({"has_alibi": True, "softcap": 3.0}, "sm90/backward_options"),
        ({"has_mask": True}, "sm90/backward"),
        ({"has_mask": True, "has_alibi": True}, "sm90/backward_options"),
        ({"has_bias": True, "bias_dtype": "bfloat16"}, "sm90/backward"),
        ({"has_bias": True, "bias_dtype": "bfloat16", "bias_in_chunks": False}, "sm90/backward_options"),
        ({"has_bias": True, "bias_dtype": "float16"}, "sm90/backward_options"),
        ({"dropout_p": 0.1, "has_mask": True, "mask_per_key": True}, "sm90/backward"),
        ({"has_block_mask": True, "block_m": 64, "block_n": 128}, "sm90/backward"),
        ({"has_block_mask": True, "block_m": 64, "block_n": 64}, "sm90/backward"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 64}, "sm90/backward"),
        ({"has_block_mask": True, "block_m": 64, "block_n": 192}, "sm90/backward"),
        ({"has_block_mask": True, "block_m": 64, "block_n": 96}, "sm90/backward_options"),
        ({"has_block_mask": True, "block_m": 32, "block_n": 64}, "sm90/backward_options"),
        ({"has_block_mask": True, "block_m": 64, "block_n": 128, "window_right": 0}, "sm90/backward_options"),
    ],
    ids=str,
)
def test_products_overlap_with_one_option_at_head_dim_128(fields: dict[str, Any], kernel: str) -> None:
    found = hopper_plan(operation="backward", head_dim=128, head_dim_v=128, **fields)
    assert (found.kernel, found.block_m, found.block_n) == (kernel, 64, 128)


BIAS = {"has_bias": True, "bias_dtype": "bfloat16"}
KEY_PADDING = {"has_mask": True, "mask_per_key": True}


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({"softcap": 3.0}, "softcap alone"),
        ({"has_alibi": True}, "ALiBi alone"),
        ({"dropout_p": 0.1}, "dropout alone"),
        (BIAS, "bias alone"),
        (BIAS | {"bias_per_key": True}, "per-key bias or key-padding mask alone"),
        (KEY_PADDING, "per-key bias or key-padding mask alone"),
        (BIAS | KEY_PADDING, "bias and key-padding mask alone"),
        ({"dropout_p": 0.1} | KEY_PADDING, "dropout and key-padding mask alone"),
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [{}, {"varlen": True, "heads_kv": 1}, {"window_right": 0, "has_sink": True}], ids=str)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_options_that_take_turns(fields: dict[str, Any], variant: str, more: dict[str, Any], head_dim: int) -> None:
    call = {"operation": "backward", "head_dim": head_dim, "head_dim_v": head_dim, **fields, **more}
    plain, found = hopper_plan(**call), hopper_plan(**call, deterministic=True)
    assert (plain.kernel, plain.variant) == ("sm90/backward", variant)
    assert (found.kernel, found.variant) == ("sm90/backward", f"{variant}, in turns where dQ is asked for")
    assert found.schedule.section_heads >= 8  # as turns want it


@pytest.mark.parametrize("fields", [{}, {"deterministic": True}, {"window_right": 0, "varlen": True, "has_sink": True}])
@pytest.mark.parametrize("head_dim", [136, 256])
def test_the_backward_of_wide_heads(fields: dict[str, Any], head_dim: int) -> None:
    found = hopper_plan(operation="backward", head_dim=head_dim, head_dim_v=head_dim, **fields)
    assert (found.kernel, found.block_m, found.block_n) == ("sm90/backward_wide", 64, 128)


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({}, "wide heads"),
        ({"softcap": 3.0}, "softcap alone"),
        ({"softcap": 5e4}, "softcap alone"),
        ({"softcap": 3.0} | KEY_PADDING, "softcap and key-padding mask alone"),
        ({"has_alibi": True}, "ALiBi alone"),
        ({"has_alibi": True} | KEY_PADDING, "ALiBi and key-padding mask alone"),
        ({"dropout_p": 0.1}, "dropout alone"),
        ({"dropout_p": 0.1} | KEY_PADDING, "dropout and key-padding mask alone"),
        (KEY_PADDING, "per-key bias or key-padding mask alone"),
        ({"has_mask": True}, "masks alone"),
        ({"has_block_mask": True}, "masks alone"),
        (BIAS, "bias alone"),
        (BIAS | KEY_PADDING, "bias and key-padding mask alone"),
        (BIAS | {"seqlen_k": 127}, "bias by elements alone"),
        (BIAS | {"bias_in_chunks": False}, "bias by elements alone"),
        (BIAS | {"bias_dtype": "float32"}, "bias by elements alone"),
        (BIAS | {"has_mask": True}, "all options"),
        ({"softcap": 3.0, "has_alibi": True}, "all options"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [{"head_dim": 136, "head_dim_v": 64}, {"head_dim": 256, "head_dim_v": 256}], ids=str)
def test_options_of_wide_heads(fields: dict[str, Any], variant: str, sizes: dict[str, int]) -> None:
    found = hopper_plan(operation="backward", **sizes, **fields)
    assert (found.kernel, found.variant) == ("sm90/backward_wide", variant)


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
    assert found.kernel == ("sm90/backward_options" if served else "sm80/backward")
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
        ({"bias_in_chunks": False}, "a bias whose rows are not made of 16-byte chunks"),
        ({"bias_dtype": "float64"}, "a bias whose rows are not made of 16-byte chunks"),
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


# ---- The table -----------------------------------------------------------------------------------------------------


def test_every_kernel_has_a_room_and_a_problem() -> None:
    assert len(set(_plan.KERNELS)) == len(_plan.KERNELS)
    folder = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
    rooms = {name for name in _plan.KERNELS if not name.startswith("cpu/")}
    assert all(list((folder / room / "inst").glob("*.cu")) for room in rooms)
    found = set()
    capabilities = [80, *(architecture.compute_capability for architecture in _plan.SPECIAL_ARCHITECTURES)]
    for operation, device, capability, dtype, seqlen_q in itertools.product(
        ["forward", "backward", "weights", "weights_backward", "decode"], ["cpu", "cuda"], capabilities,
        ["bfloat16", "float32"], [1, 4096],
    ):  # fmt: skip
        fields = {"compute_capability": capability, "dtype": dtype, "seqlen_q": seqlen_q, "has_bias": True}
        for head_dim, has_bias in itertools.product([64, 128, 256], {False, operation == "backward"}):
            sizes = {"head_dim": head_dim, "head_dim_v": head_dim}
            chosen = plan(operation=operation, device=device, **{**fields, **sizes, "has_bias": has_bias})
            found |= {chosen.kernel, chosen.bias_kernel}
    assert found - {""} == set(_plan.KERNELS)


@pytest.mark.parametrize(
    ("fields", "tile"),
    [
        ({"head_dim": 96, "head_dim_v": 96, "seqlen_q": 4000, "seqlen_k": 4000}, (192, 80)),
        ({"head_dim": 192, "head_dim_v": 192, "seqlen_q": 4000, "seqlen_k": 4000}, (128, 80)),
        ({"head_dim": 64, "head_dim_v": 64, "seqlen_q": 128, "seqlen_k": 128}, (256, 64)),
        ({"head_dim": 128, "head_dim_v": 128, "seqlen_q": 512, "seqlen_k": 512}, (192, 64)),
    ],
    ids=str,
)
def test_tiles_of_the_forward_with_max_logit(fields: dict[str, Any], tile: tuple[int, int]) -> None:
    """The kernels of fewer head dims serve it, and none has tiles for few queries."""
    found = hopper_plan(operation="forward", dtype="bfloat16", wants_max_logit=True, **fields)
    assert found.fuses_max_logit and (found.block_m, found.block_n) == tile


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("where", ["cpu", "hopper", "ampere"])
def test_where_max_logit_comes_from(where: str, dtype: str) -> None:
    """Long sequences of a head_dim that it has keep kernel and tile. Its reason is given where it is wanted."""
    fields: dict[str, Any] = dict(HOPPER) if where != "cpu" else {}
    fields |= dict(dtype=dtype, seqlen_q=1000, seqlen_k=1000, heads_q=8, heads_kv=8)
    if where == "ampere":
        fields["compute_capability"] = 80
    plain, found = plan(**fields), plan(**fields, wants_max_logit=True)
    assert not plain.fuses_max_logit and not any("max_logit" in reason for reason in plain.reasons)
    assert (found.kernel, found.block_m, found.block_n) == (plain.kernel, plain.block_m, plain.block_n)
    (reason,) = (reason for reason in found.reasons if reason.startswith("max_logit: "))
    own = "sm80/max_logit, a kernel of its own" in reason
    assert own == (where != "cpu" and not found.fuses_max_logit)
