"""The planner: which variant of a kernel, and tiles of which size, by options and shared memory."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.build.plans import SHARED, hopper_plan


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
        ({"has_bias": True, "bias_in_chunks": False}, "bias alone", "all options"),
        ({"has_bias": True, "bias_dtype": "float16"}, "all options but dropout", "all options"),
        ({"has_bias": True, "bias_per_key": True}, "bias alone", "per-key bias or key-padding mask alone"),
        ({"has_mask": True}, "masks alone", "masks alone"),
        ({"has_block_mask": True, "block_m": 32, "block_n": 64}, "masks alone", "masks alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128}, "block mask alone", "block mask alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 64}, "block mask alone", "block mask alone"),
        ({"has_block_mask": True, "block_m": 64, "block_n": 64}, "masks alone", "block mask alone"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 32}, "masks alone", "masks alone"),
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
    assert any("copied first" in reason for reason in reasons) != fields.get("bias_in_chunks", True)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "scaled products"),
        ({"has_bias": True, "bias_dtype": "bfloat16"}, "bias alone"),
        ({"has_bias": True, "bias_dtype": "bfloat16", "bias_in_chunks": False}, "all options and pages"),
        ({"has_bias": True, "bias_dtype": "bfloat16", "softmax_scale": 1e-30}, "all options and pages"),
        ({"has_bias": True, "bias_dtype": "float32"}, "all options and pages"),
        ({"has_bias": True, "bias_dtype": "float32", "head_dim": 64, "head_dim_v": 64}, "float32 bias alone"),
        ({"has_bias": True, "bias_dtype": "float64", "head_dim": 64, "head_dim_v": 64}, "all options and pages"),
        ({"has_bias": True, "bias_dtype": "bfloat16", "has_mask": True}, "all options and pages"),
        ({"has_mask": True}, "mask alone"),
        ({"has_mask": True, "head_dim": 256}, "all options and pages"),
        ({"has_mask": True, "dropout_p": 0.1}, "all options and pages"),
        ({"has_block_mask": True, "block_m": 32, "block_n": 192}, "mask alone"),
        ({"has_block_mask": True, "block_m": 64, "block_n": 96}, "all options and pages"),
        ({"has_block_mask": True, "block_m": 48, "block_n": 128}, "all options and pages"),
        ({"has_block_mask": True, "block_m": 32, "block_n": 64, "seqlen_k": 2**17}, "mask alone"),
        ({"has_block_mask": True, "block_m": 32, "block_n": 64, "seqlen_k": 2**17 + 1}, "all options and pages"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128, "has_mask": True}, "all options and pages"),
        ({"has_block_mask": True, "block_m": 128, "block_n": 128, "paged": True}, "all options and pages"),
        (
            {"has_block_mask": True, "block_m": 128, "block_n": 128, "varlen": True, "total_q": 900, "total_k": 900},
            "all options and pages",
        ),
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


# ---- Tiles for all GPUs ----------------------------------------------------------------------------------------------


def test_the_tiles_of_a_bias_for_all() -> None:
    def reason(capability: int, **fields: Any) -> str:
        per_cta, per_sm = SHARED[capability]
        sizes = {"compute_capability": capability, "own_kernels": False, "has_bias": True}
        shared = {"shared_bytes_per_cta": per_cta, "shared_bytes_per_sm": per_sm}
        found = hopper_plan(**{**sizes, **shared, **fields})
        said = next(r for r in found.reasons if r.startswith("bias: "))
        assert found.stages_bias == ("ahead of time" in said)
        return said

    assert "ahead of time" in reason(80, bias_dtype="bfloat16")
    assert "ahead of time" in reason(89, bias_dtype="float32", has_mask=True)
    assert "16-byte chunks" in reason(80, bias_dtype="bfloat16", bias_in_chunks=False)
    assert "16-byte chunks" in reason(80, bias_dtype="float64")
    wide = {"head_dim": 256, "head_dim_v": 256, "dtype": "float32", "bias_dtype": "float32"}
    assert "for want of shared memory" in reason(89, **wide, has_block_mask=True)
    assert "ahead of time" in reason(90, **wide, has_block_mask=True)


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


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({"seqlen_q": 576}, "one head after the other, so that keys stay in L2"),  # full, whole tiles of 192 queries
        (
            {"seqlen_q": 512, "window_right": 0},  # two waves of three tiles on 132 SMs: the last 88 heads
            "one head after the other, so that keys stay in L2; of the last 88 heads together, most keys first",
        ),
        ({"seqlen_q": 768, "window_right": 0, "batch": 1}, "all heads side by side, most keys first"),
        ({"seqlen_q": 576, "heads_kv": 4}, "4 heads side by side, so that keys stay in L2"),
        ({"seqlen_q": 4096, "varlen": True}, "16 heads side by side, so that keys stay in L2"),  # of 2 MiB each
    ],
)
def test_the_order_of_heads_is_explained(fields: dict[str, Any], order: str) -> None:
    sizes = {"batch": 8, "heads_q": 16, "heads_kv": 16, **fields}
    found = hopper_plan(operation="forward", **{**sizes, "seqlen_k": sizes["seqlen_q"]})
    assert [reason for reason in found.reasons if "order of" in reason] == [f"order of query tiles: {order}"]
    side_by_side = {"one": 1, "all": sizes["batch"] * 16}
    assert found.section_heads == (side_by_side.get(order.split()[0]) or int(order.split()[0]))


@pytest.mark.parametrize(
    ("fields", "sections", "order"),
    [
        # Keys and values of a head: 1 MiB of the 24 that stay in L2.
        ({}, (24, 1), "24 heads side by side, so that keys stay in L2"),
        ({"heads_kv": 4}, (32, 1), "all heads side by side, most keys first"),  # 8 each share keys
        ({"seqlen_k": 8192}, (6, 1), "6 heads side by side, so that keys stay in L2"),
        ({"seqlen_k": 8192, "dtype": "float32"}, (3, 1), "3 heads side by side, so that keys stay in L2"),
        ({"seqlen_k": 10**6}, (1, 1), "one head after the other, so that keys stay in L2"),
        ({"seqlen_k": 10**6, "heads_kv": 8}, (4, 1), "4 heads side by side, so that keys stay in L2"),
        (
            {"has_bias": True, "bias_of_all_batches": True},
            (3, 8),
            "3 heads side by side of 8 batch entries, which share a bias, so that keys stay in L2",
        ),
        ({"has_bias": True}, (24, 1), "24 heads side by side, so that keys stay in L2"),
        (  # a grid has 65535 sections of all batch entries at most
            {"batch": 60000, "seqlen_k": 16384},
            (32, 1),
            "all heads side by side, most keys first",
        ),
        ({"total_q": 8 * 2048, "total_k": 8 * 2048, "varlen": True}, (24, 1), "24 heads side by side, so that"),
        ({"batch": 500, "total_q": 4000, "total_k": 4000, "varlen": True}, (0, 1), None),  # a list orders them
        ({"batch": 0}, (0, 1), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [(0, 0), SHARED[80]])
def test_the_order_of_heads_for_all(
    fields: dict[str, Any], sections: tuple[int, int], order: str | None, shared: tuple[int, int]
) -> None:
    sizes = {"batch": 8, "heads_q": 32, "heads_kv": 32, "seqlen_q": 2048, "seqlen_k": 2048}
    known = dict(zip(("shared_bytes_per_cta", "shared_bytes_per_sm"), shared, strict=True))
    found = hopper_plan(**{**sizes, **known, "compute_capability": 80, **fields})
    assert found.kernel == "sm80/forward"
    assert (found.section_heads, found.section_batches) == sections
    said = [reason.removeprefix("order of query tiles: ") for reason in found.reasons if "order of" in reason]
    assert said == ([] if order is None else [said[0]]) and (order is None or said[0].startswith(order))


@pytest.mark.parametrize(
    ("fields", "heads", "order"),
    [
        ({}, 16, "16 heads side by side, so that keys stay in L2"),  # 2 MiB each, of 32, over all batch entries
        ({"batch": 1, "heads_q": 16, "heads_kv": 16}, 16, "all heads side by side, most keys first"),
        ({"heads_kv": 8, "seqlen_k": 65536}, 4, "4 heads side by side, so that keys stay in L2"),
        ({"heads_kv": 32, "seqlen_k": 65536}, 1, "one head after the other, so that keys stay in L2"),
        ({"batch": 500, "total_q": 4000, "total_k": 4000, "varlen": True}, 0, None),
    ],
    ids=str,
)
def test_the_order_of_heads_of_float32_on_hopper(fields: dict[str, Any], heads: int, order: str | None) -> None:
    sizes = {"batch": 8, "heads_q": 32, "heads_kv": 32, "seqlen_q": 2048, "seqlen_k": 2048, "dtype": "float32"}
    found = hopper_plan(**{**sizes, **fields})
    assert (found.kernel, found.section_heads) == ("sm90/forward_f32", heads)
    said = [reason for reason in found.reasons if "order of" in reason]
    assert said == ([] if order is None else [f"order of query tiles: {order}"])


@pytest.mark.parametrize(
    ("capability", "fields", "stages", "staged"),
    [
        # Two CTAs on an SM of 228, 164 and 100 KB, with stages of 24 KB and a tile of bias of 16 KB.
        (90, {}, 4, True),
        (80, {}, 2, True),
        (89, {}, 3, True),  # one CTA
        (90, {"has_mask": True}, 3, True),
        (90, {"has_block_mask": True}, 3, True),
        (90, {"bias_dtype": "float32"}, 3, True),
        (80, {"bias_dtype": "float32", "has_mask": True}, 4, True),  # one CTA
        (80, {"bias_in_chunks": False}, 3, False),
        (80, {"bias_dtype": "float64"}, 3, False),
        (90, {"dtype": "float32", "bias_dtype": "float32"}, 3, True),  # of 32 KB
        (90, {"dtype": "float32", "bias_dtype": "float32", "has_mask": True}, 2, True),
        (89, {"dtype": "float32", "bias_dtype": "float32"}, 2, True),
    ],
    ids=str,
)
def test_shared_memory_of_the_gradient_of_bias_for_all(
    capability: int, fields: dict[str, Any], stages: int, staged: bool
) -> None:
    sizes = {"operation": "backward", "has_bias": True, "bias_dtype": "bfloat16", "own_kernels": False}
    shared = dict(zip(("shared_bytes_per_cta", "shared_bytes_per_sm"), SHARED[capability], strict=True))
    found = hopper_plan(**{**sizes, **shared, "compute_capability": capability, **fields})
    assert found.bias_kernel == "sm80/bias_gradient"
    assert (found.bias_stages, found.bias_kernel_stages_bias) == (stages, staged)
    where = "in shared memory" if staged else "read element by element"
    assert f"gradient of bias: {stages} stages of slabs, bias {where}" in found.reasons


def test_shared_memory_that_is_not_known_decides_nothing() -> None:
    found = hopper_plan(operation="backward", has_bias=True, own_kernels=False)
    assert (found.bias_kernel, found.bias_stages) == ("sm80/bias_gradient", 0)
    assert hopper_plan(operation="backward", has_bias=True).bias_kernel == "sm90/bias_gradient"


BLOCKS = {"has_block_mask": True, "block_m": 128, "block_n": 128}
IDLE = "the lists of the block mask do not drive the loads: each tile looks up its block, because of "


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("fields", "because"),
    [
        ({"window_right": 0},
         "a window or causal beside it (BlockMask.causal and sliding_window can be part of it, by &)"),
        ({"softcap": 3.0}, "other options (softcap)"),
        ({"dropout_p": 0.5, "has_mask": True, "varlen": True, "total_q": 900, "total_k": 900},
         "other options (mask dropout), lengths that lie on the device"),
        ({"head_dim": 192, "head_dim_v": 192}, "head dims above 128"),
        ({"block_m": 32}, "blocks of 32 x 128 that are no multiples of {} x {}"),
        ({"block_n": 32}, "blocks of 128 x 32 that are no multiples of {} x {}"),
    ],
)  # fmt: skip
def test_what_keeps_the_lists_of_a_block_mask_from_driving_loads(
    operation: str, fields: dict[str, Any], because: str
) -> None:
    found = hopper_plan(operation=operation, **{**BLOCKS, **fields}).reasons
    tiles = (128 if operation == "forward" else 64, 64)
    assert [reason for reason in found if "drive" in reason] == [IDLE + because.format(*tiles)]


def test_a_scale_of_0_keeps_lists_from_driving_the_forward() -> None:
    found = hopper_plan(operation="forward", softmax_scale=0.0, **BLOCKS).reasons
    assert [reason for reason in found if "drive" in reason] == [IDLE + "softmax_scale 0"]


def test_every_call_with_a_block_mask_says_whether_lists_drive_it() -> None:
    rng = random.Random(3)
    said = 0
    for _ in range(2000):
        fields = {
            "block_m": rng.choice([32, 64, 128, 256]), "block_n": rng.choice([32, 64, 128, 192]),
            "window_right": rng.choice([-1, -1, 0]), "softcap": rng.choice([0.0, 0.0, 3.0]),
            "has_alibi": rng.random() < 0.2, "has_bias": rng.random() < 0.2, "has_mask": rng.random() < 0.2,
            "dropout_p": rng.choice([0.0, 0.0, 0.3]), "softmax_scale": rng.choice([0.1, 0.1, 0.0, -1.0, 1e-40]),
            "head_dim": (head_dim := rng.choice([40, 64, 96, 128, 192])), "head_dim_v": rng.choice([head_dim, 64, 192]),
            "deterministic": rng.random() < 0.1, "varlen": rng.random() < 0.2,
        }  # fmt: skip
        found = hopper_plan(operation=rng.choice(["forward", "backward"]), has_block_mask=True, **fields)
        if found.kernel.startswith("sm90/"):
            said += 1
            assert sum("drive the loads" in reason for reason in found.reasons) == 1, fields
    assert said > 1000


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_of_a_block_mask_that_drive_loads(operation: str, head_dim: int) -> None:
    found = hopper_plan(operation=operation, head_dim=head_dim, head_dim_v=head_dim, **BLOCKS).reasons
    (reason,) = (reason for reason in found if "drive the loads" in reason)
    tiles = "128 x 64" if operation == "forward" else "64 x 64"
    assert (
        f"blocks of 128 x 128 are multiples of {tiles}; tiles of" in reason and "with the most blocks first" in reason
    )
    assert not any(
        "drive" in reason for reason in hopper_plan(operation=operation, head_dim=head_dim, has_mask=True).reasons
    )


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("per_key", [False, True])
def test_hidden_tiles_are_left_out(operation: str, head_dim: int, per_key: bool) -> None:
    found = hopper_plan(operation=operation, head_dim=head_dim, has_mask=True, mask_per_key=per_key).reasons
    of_group = per_key and operation == "backward" and head_dim <= 128  # all heads, which a CTA goes over
    hidden = "tiles of keys that the mask hides from all heads of a group" if of_group else (
        "tiles of which the mask hides all pairs"
    )  # fmt: skip
    assert [reason for reason in found if "mask hides" in reason] == [f"{hidden} are not computed"]
    assert not any("mask hides" in reason for reason in hopper_plan(operation=operation, has_bias=True).reasons)
