"""Malformed input raises before anything is computed, and the message names the argument."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests import reference
from tests.contract.malformed import (
    ERRORS,
    INF,
    NAN,
    ON_CUDA,
    Case,
    Change,
    assert_raises_naming,
    case,
    cumulative,
    ids,
    int32,
    not_last_contiguous,
    random,
    replaced,
    to_meta,
)

# --- flash_ext.attention, dense: q (2, 9, 4, 16), k and v (2, 11, 2, 16) --------------------------------------------


def dense() -> dict[str, Any]:
    return dict(q=random(2, 9, 4, 16), k=random(2, 11, 2, 16), v=random(2, 11, 2, 16))


DENSE: list[Case] = [
    case("q", "integer", q=lambda t: t.int()),
    case("q", "complex", q=lambda t: t.to(torch.complex64)),
    case("q", "three dimensions", q=lambda t: t[0]),
    case("q", "five dimensions", q=lambda t: t[None]),
    case("q", "last dimension strided", q=not_last_contiguous),
    case("k", "other dtype", k=lambda t: t.double()),
    case("v", "other dtype", v=lambda t: t.half()),
    case("k", "other batch", k=lambda t: t[:1]),
    case("v", "other batch", v=lambda t: t[:1]),
    case("k", "other head_dim", k=lambda t: t[..., :8]),
    case("v", "other seqlen", v=lambda t: t[:, :9]),
    case("v", "other heads", v=lambda t: t[:, :, :1]),
    case("k", "three dimensions", k=lambda t: t[0]),
    case("v", "three dimensions", v=lambda t: t[0]),
    case("k", "last dimension strided", k=not_last_contiguous),
    case("v", "last dimension strided", v=not_last_contiguous),
    case("k", "on another device", k=to_meta),
    case("v", "on another device", v=to_meta),
    case("q", "on another device", q=to_meta),
    case("heads_q|q|k", "heads do not divide", q=random(2, 9, 3, 16)),
    case("heads_kv|k", "no kv heads", k=random(2, 11, 0, 16), v=random(2, 11, 0, 16)),
    case("head_dim|q", "head_dim not a multiple of 8", q=random(2, 9, 4, 12), k=random(2, 11, 2, 12)),
    case("head_dim|q", "head_dim above 256", q=random(2, 9, 4, 264), k=random(2, 11, 2, 264)),
    case("head_dim|q", "head_dim zero", q=random(2, 9, 4, 0), k=random(2, 11, 2, 0)),
    case("head_dim_v|v", "head_dim of v not a multiple of 8", v=random(2, 11, 2, 20)),
    case("head_dim_v|v", "head_dim of v above 256", v=random(2, 11, 2, 264)),
    case("softmax_scale", "nan", softmax_scale=NAN),
    case("softmax_scale", "infinite", softmax_scale=INF),
    case("softcap", "nan", softcap=NAN),
    case("softcap", "infinite", softcap=INF),
    case("softcap", "negative", softcap=-1.0),
    case("dropout_p", "nan", dropout_p=NAN, rng_state=torch.tensor([1, 2])),
    case("dropout_p", "negative", dropout_p=-0.1, rng_state=torch.tensor([1, 2])),
    case("dropout_p", "above one", dropout_p=1.1, rng_state=torch.tensor([1, 2])),
    case("dropout_p", "infinite", dropout_p=INF, rng_state=torch.tensor([1, 2])),
    case("rng_state", "dtype", dropout_p=0.5, rng_state=int32([1, 2])),
    case("rng_state", "shape", dropout_p=0.5, rng_state=torch.tensor([1, 2, 3])),
    case("rng_state", "dimensions", dropout_p=0.5, rng_state=torch.tensor([[1, 2]])),
    case("rng_state", "on another device", dropout_p=0.5, rng_state=torch.tensor([1, 2], device="meta")),
    case("window_size|window_left", "left below -1", window_size=(-2, 0)),
    case("window_size|window_right", "right below -1", window_size=(0, -2)),
    case("window_size", "three numbers", window_size=(1, 2, 3)),
    case("window_size", "one number", window_size=(1,)),
    case("window_size", "fraction", window_size=(1.5, 0)),
    case("window_size", "None", window_size=(None, 0)),
    case("q", "an array", q=lambda t: t.cpu().numpy()),
    case("k", "None", k=None),
    case("v", "a list", v=lambda t: t.tolist()),
    case("bias", "a number", bias=1.0),
    case("seqused_k", "a list", seqused_k=[1, 2]),
    case("dropout_p", "None", dropout_p=None),
    case("softcap", "None", softcap=None),
    case("block_mask", "a tensor", block_mask=torch.ones(9, 11, dtype=torch.bool)),
    case("block_mask", "queries", block_mask=flash_ext.BlockMask.causal(10, 11)),
    case("block_mask", "keys", block_mask=flash_ext.BlockMask.causal(9, 10)),
    case("alibi_slopes", "dtype", alibi_slopes=torch.rand(4).double()),
    case("alibi_slopes", "heads", alibi_slopes=torch.rand(3)),
    case("alibi_slopes", "batch", alibi_slopes=torch.rand(3, 4)),
    case("alibi_slopes", "dimensions", alibi_slopes=torch.rand(1, 2, 4)),
    case("alibi_slopes", "on another device", alibi_slopes=torch.rand(4, device="meta")),
    case("bias", "integer", bias=torch.zeros(2, 4, 9, 11, dtype=torch.int32)),
    case("bias", "bool", bias=torch.ones(2, 4, 9, 11, dtype=torch.bool)),
    case("bias", "batch", bias=random(3, 4, 9, 11)),
    case("bias", "heads", bias=random(2, 2, 9, 11)),
    case("bias", "rows", bias=random(2, 4, 8, 11)),
    case("bias", "columns", bias=random(2, 4, 9, 12)),
    case("bias", "five dimensions", bias=random(1, 2, 4, 9, 11)),
    case("bias", "on another device", bias=torch.zeros(2, 4, 9, 11, device="meta")),
    case("mask", "float", mask=torch.ones(2, 4, 9, 11)),
    case("mask", "bytes", mask=torch.ones(2, 4, 9, 11, dtype=torch.uint8)),
    case("mask", "batch", mask=torch.ones(3, 4, 9, 11, dtype=torch.bool)),
    case("mask", "heads", mask=torch.ones(2, 3, 9, 11, dtype=torch.bool)),
    case("mask", "rows", mask=torch.ones(2, 4, 10, 11, dtype=torch.bool)),
    case("mask", "columns", mask=torch.ones(2, 4, 9, 10, dtype=torch.bool)),
    case("mask", "on another device", mask=torch.ones(2, 4, 9, 11, dtype=torch.bool, device="meta")),
    case("sink", "integer", sink=torch.ones(4, dtype=torch.int32)),
    case("sink", "heads", sink=random(2)),
    case("sink", "dimensions", sink=random(1, 4)),
    case("sink", "on another device", sink=torch.zeros(4, device="meta")),
    case("seqused_q", "dtype", seqused_q=torch.tensor([1, 2])),
    case("seqused_q", "shape", seqused_q=int32([1, 2, 3])),
    case("seqused_q", "too long", seqused_q=int32([10, 2])),
    case("seqused_q", "negative", seqused_q=int32([-1, 2])),
    case("seqused_k", "dtype", seqused_k=torch.tensor([1.0, 2.0])),
    case("seqused_k", "shape", seqused_k=int32([1])),
    case("seqused_k", "too long", seqused_k=int32([11, 12])),
    case("seqused_k", "negative", seqused_k=int32([1, -2])),
    case("seqused_k", "strided", seqused_k=int32([1, 9, 2, 9])[::2]),
    case("seqused_k", "on another device", seqused_k=int32([1, 2], "meta")),
]


@pytest.mark.parametrize(("name", "wrong", "change"), DENSE, ids=ids(DENSE))
def test_attention(name: str, wrong: str, change: Change) -> None:
    arguments = dense()
    flash_ext.attention(**arguments)
    assert_raises_naming(name, lambda: flash_ext.attention(**{**arguments, **change(arguments)}))


@pytest.mark.parametrize(("name", "wrong", "change"), DENSE, ids=ids(DENSE))
def test_attention_that_wants_gradients(name: str, wrong: str, change: Change) -> None:
    """The autograd layer neither hides the check nor gets in before it."""
    arguments = dense()
    changed = {**arguments, **change(arguments)}
    for t in (changed["q"], changed["k"]):
        if isinstance(t, Tensor) and t.is_floating_point():
            t.requires_grad_()
    assert_raises_naming(name, lambda: flash_ext.attention(**changed))


# --- flash_ext.attention, packed: two sequences of 4 and 5 queries, 6 and 5 keys ------------------------------------


def packed() -> dict[str, Any]:
    return dict(
        q=random(9, 4, 16), k=random(11, 2, 16), v=random(11, 2, 16), cu_seqlens_q=cumulative([4, 5]),
        cu_seqlens_k=cumulative([6, 5]), max_seqlen_q=5, max_seqlen_k=6,
    )  # fmt: skip


PACKED: list[Case] = [
    case("q", "four dimensions", q=lambda t: t[None]),
    case("q", "no dimension", q=lambda t: t[0, 0, 0]),
    case("k", "four dimensions", k=lambda t: t[None]),
    case("k", "no dimension", k=lambda t: t[0, 0, 0]),
    case("v", "other total", v=lambda t: t[:10]),
    *(
        made
        for name, bad in (("cu_seqlens_q", 9), ("cu_seqlens_k", 11))
        for made in (
            case(name, "int64", **{name: lambda t: t.long()}),
            case(name, "NaN", **{name: lambda t: t / torch.zeros_like(t)}),
            case(name, "complex", **{name: lambda t: t.to(torch.complex64)}),
            case(name, "no dimension", **{name: lambda t: t[0]}),
            case(name, "two dimensions", **{name: lambda t: t[None]}),
            case(name, "empty", **{name: int32([])}),
            case(name, "decreasing", **{name: int32([0, 6, 4])}),
            case(name, "overlapping", **{name: int32([3, 2, bad])}),
            case(name, "negative", **{name: int32([-1, 3, bad])}),
            case(name, "beyond the total", **{name: int32([0, 4, bad + 1])}),
            case(name, "strided", **{name: int32([0, 9, 4, 9, bad, 9])[::2]}),
            case(name, "on another device", **{name: to_meta}),
        )
    ),
    case("cu_seqlens_k", "other batch", cu_seqlens_k=int32([0, 3, 6, 11])),
    case("cu_seqlens_k", "missing", cu_seqlens_k=None),
    case("cu_seqlens_q", "missing", cu_seqlens_q=None),
    case("max_seqlen_q", "negative", max_seqlen_q=-1),
    case("max_seqlen_k", "negative", max_seqlen_k=-1),
    case("max_seqlen_q", "more than int32 counts", max_seqlen_q=2**31),
    case("max_seqlen_k", "more than int64 can multiply", max_seqlen_k=2**62),
    case("max_seqlen_q", "too small", max_seqlen_q=4),
    case("max_seqlen_k", "too small", max_seqlen_k=5),
    case("seqused_q", "beyond its sequence", seqused_q=int32([5, 5])),
    case("seqused_k", "beyond its sequence", seqused_k=int32([6, 6])),
    case("seqused_k", "shape", seqused_k=int32([6, 5, 0])),
    case("bias", "rows of the total", bias=random(2, 4, 9, 6)),
    case("mask", "columns of the total", mask=torch.ones(1, 1, 1, 11, dtype=torch.bool)),
    case("alibi_slopes", "batch", alibi_slopes=torch.rand(3, 4)),
]


@pytest.mark.parametrize(("name", "wrong", "change"), PACKED, ids=ids(PACKED))
def test_packed_attention(name: str, wrong: str, change: Change) -> None:
    arguments = packed()
    flash_ext.attention(**arguments)
    assert_raises_naming(name, lambda: flash_ext.attention(**{**arguments, **change(arguments)}))


# What the longest sequence is read from, where it is not given.
UNBOUNDED = [made for made in PACKED if made[0] in ("q", "k", "cu_seqlens_q", "cu_seqlens_k")]


@pytest.mark.parametrize(("name", "wrong", "change"), UNBOUNDED, ids=ids(UNBOUNDED))
def test_packed_attention_of_unknown_lengths(name: str, wrong: str, change: Change) -> None:
    arguments = packed() | dict(max_seqlen_q=None, max_seqlen_k=None)
    flash_ext.attention(**arguments)
    changed = {**arguments, **change(arguments)}
    assert_raises_naming(name, lambda: flash_ext.attention(**changed))
    ok, reason = flash_ext.supports(**changed)
    assert not ok and re.search(rf"\b{name}\b", str(reason))


# --- block masks: 2 x 2 blocks of 32 x 64 --------------------------------------------------------------------------


def block_sparse() -> dict[str, Any]:
    see = torch.rand(1, 1, 64, 128) < 0.5
    offsets, indices, bitmap_ids, bitmaps = reference.block_mask_tensors(see, 32, 64)
    arguments: dict[str, Any] = dict.fromkeys(
        a.name for a in torch.ops.flash_ext.attention_forward.default._schema.arguments
    )
    return arguments | dict(
        q=random(2, 64, 4, 16), k=random(2, 128, 2, 16), v=random(2, 128, 2, 16), max_seqlen_q=64, max_seqlen_k=128,
        softmax_scale=0.25, softcap=0.0, window_left=-1, window_right=-1, top_left=False, dropout_p=0.0,
        allow_tf32=False,
        block_offsets=offsets, block_indices=indices, block_bitmap_ids=bitmap_ids, block_bitmaps=bitmaps,
    )  # fmt: skip


BLOCKS: list[Case] = [
    *(case(name, "int64", **{name: lambda t: t.long()}) for name in (
        "block_offsets", "block_indices", "block_bitmap_ids", "block_bitmaps")),
    *(case(name, "on another device", **{name: to_meta}) for name in (
        "block_offsets", "block_indices", "block_bitmap_ids", "block_bitmaps")),
    case("block_offsets", "dimensions", block_offsets=lambda t: t[0]),
    case("block_offsets", "batch", block_offsets=lambda t: t.expand(3, 1, -1).contiguous()),
    case("block_offsets", "heads", block_offsets=lambda t: t.expand(1, 3, -1).contiguous()),
    case("block_offsets", "too few rows", block_offsets=lambda t: t[..., :2].contiguous()),
    case("block_offsets", "negative", block_offsets=replaced(0, -1)),
    case("block_offsets", "decreasing", block_offsets=replaced(1, 1000)),
    case("block_offsets", "beyond the lists", block_offsets=replaced(2, 1000)),
    case("block_indices", "negative", block_indices=replaced(0, -1)),
    case("block_indices", "beyond the keys", block_indices=replaced(1, 2)),
    case("block_indices", "descending", block_indices=replaced(0, 1)),
    case("block_indices", "dimensions", block_indices=lambda t: t[None]),
    case("block_bitmap_ids", "below -1", block_bitmap_ids=replaced(0, -2)),
    case("block_bitmap_ids", "beyond the bitmaps", block_bitmap_ids=replaced(0, 1000)),
    case("block_bitmap_ids", "length", block_bitmap_ids=lambda t: t[:1]),
    case("block_bitmaps", "dimensions", block_bitmaps=lambda t: t[0]),
    case("block_bitmaps", "huge blocks of rows", block_bitmaps=int32([]).view(0, 2**21, 2)),
    case("block_bitmaps", "huge blocks of keys", block_bitmaps=int32([]).view(0, 32, 2**16)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "wrong", "change"), BLOCKS, ids=ids(BLOCKS))
def test_block_mask(name: str, wrong: str, change: Change) -> None:
    arguments = block_sparse()
    op = torch.ops.flash_ext.attention_forward
    op(**arguments)
    assert_raises_naming(name, lambda: op(**{**arguments, **change(arguments)}))


# --- merge, weights, dropout mask ----------------------------------------------------------------------------------


def merge_arguments() -> dict[str, Any]:
    return dict(outs=random(3, 2, 5, 4, 8), lses=random(3, 2, 4, 5))


MERGE: list[Case] = [
    case("outs", "integer", outs=lambda t: t.int()),
    case("outs", "dimensions", outs=lambda t: t[0, 0]),
    case("lses", "dtype", lses=lambda t: t.half()),
    case("lses", "double for float32", lses=lambda t: t.double()),
    case("lses", "splits", lses=lambda t: t[:2]),
    case("lses", "batch", lses=lambda t: t[:, :1]),
    case("lses", "heads and rows swapped", lses=lambda t: t.transpose(2, 3)),
    case("lses", "dimensions", lses=lambda t: t[..., 0]),
    case("lses", "on another device", lses=to_meta),
    case("outs", "no parts", outs=lambda t: t[:0], lses=lambda t: t[:0]),
]


@pytest.mark.parametrize(("name", "wrong", "change"), MERGE, ids=ids(MERGE))
def test_merge(name: str, wrong: str, change: Change) -> None:
    arguments = merge_arguments()
    flash_ext.merge(**arguments)
    assert_raises_naming(name, lambda: flash_ext.merge(**{**arguments, **change(arguments)}))


def weights_arguments() -> dict[str, Any]:
    return dict(q=random(2, 9, 4, 16), k=random(2, 11, 2, 16), lse=random(2, 4, 9))


WEIGHTS: list[Case] = [
    case("lse", "dtype", lse=lambda t: t.half()),
    case("lse", "shape", lse=lambda t: t.transpose(1, 2)),
    case("lse", "heads", lse=lambda t: t[:, :2]),
    case("lse", "on another device", lse=to_meta),
    case("k", "head_dim", k=lambda t: t[..., :8]),
    case("softcap", "nan", softcap=NAN),
    case("bias", "columns", bias=random(2, 4, 9, 12)),
    case("mask", "float", mask=torch.ones(2, 4, 9, 11)),
    case("dropout_p", "above one", dropout_p=2.0, rng_state=torch.tensor([1, 2])),
    case("rng_state", "missing", dropout_p=0.5),
]


@pytest.mark.parametrize(("name", "wrong", "change"), WEIGHTS, ids=ids(WEIGHTS))
def test_attention_weights(name: str, wrong: str, change: Change) -> None:
    arguments = weights_arguments()
    flash_ext.attention_weights(**arguments)
    assert_raises_naming(name, lambda: flash_ext.attention_weights(**{**arguments, **change(arguments)}))


DROPOUT_MASK: list[Case] = [
    case("rng", "dtype", rng=int32([1, 2])),
    case("rng", "shape", rng=torch.tensor([1])),
    case("dropout_p", "nan", dropout_p=NAN),
    case("dropout_p", "negative", dropout_p=-0.5),
    case("dropout_p", "above one", dropout_p=1.5),
    case("batch", "negative", batch=-1),
    case("heads_q", "negative", heads_q=-1),
    case("seqlen_q", "negative", seqlen_q=-1),
    case("seqlen_k", "negative", seqlen_k=-1),
]


@pytest.mark.parametrize(("name", "wrong", "change"), DROPOUT_MASK, ids=ids(DROPOUT_MASK))
def test_dropout_mask(name: str, wrong: str, change: Change) -> None:
    arguments = dict(rng=torch.tensor([1, 2]), dropout_p=0.5, batch=1, heads_q=2, seqlen_q=3, seqlen_k=4)
    op = torch.ops.flash_ext.dropout_mask
    op(**arguments)
    assert_raises_naming(name, lambda: op(**{**arguments, **change(arguments)}))


def test_an_unknown_instruction_set_raises() -> None:
    code = "import torch, flash_ext as f; q = torch.zeros(1, 2, 1, 8); f.attention(q, q, q)"
    environment = {**os.environ, "FLASH_EXT_CPU_ISA": "mmx"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode != 0 and "FLASH_EXT_CPU_ISA must be amx, avx512, avx2 or baseline, got mmx" in run.stderr


def test_unknown_arguments_raise() -> None:
    for function, arguments in ((flash_ext.attention, dense()), (flash_ext.merge, merge_arguments())):
        with pytest.raises(TypeError, match="not_an_argument"):
            function(**arguments, not_an_argument=1)


def test_the_message_says_what_came_and_what_is_allowed() -> None:
    arguments = dense()
    with pytest.raises(ERRORS, match=r"(?s)head_dim.*264.*256|264.*256|256.*264"):
        flash_ext.attention(**{**arguments, "q": random(2, 9, 4, 264), "k": random(2, 11, 2, 264)})
    with pytest.raises(ERRORS, match=r"(?s)window.*-7"):
        flash_ext.attention(**arguments, window_size=(-7, 0))


@pytest.mark.skipif(ON_CUDA or not torch.cuda.is_available(), reason="runs this file on CUDA")
def test_all_of_it_on_cuda() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    names = "test_malformed or checks_of_the_call"
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            names,
            *(str(file) for file in Path(__file__).parent.glob("test_malformed*.py")),
            "tests/integration/test_functional.py",
        ],
        env={**environment, "FLASH_EXT_CHECK": "1"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]


@pytest.mark.skipif(not ON_CUDA, reason="checks of values wait for the device on CUDA only")
def test_checks_of_values_cannot_be_captured() -> None:
    arguments = packed()
    flash_ext.attention(**arguments)
    with pytest.raises(RuntimeError, match="FLASH_EXT_CHECK"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flash_ext.attention(**arguments)


def test_the_switch_for_checks_of_values_is_0_or_1() -> None:
    if not torch.cuda.is_available():
        pytest.skip("a switch of the CUDA library")
    code = "import torch, flash_ext as f; q = torch.zeros(1, 2, 1, 8, device='cuda').half(); f.attention(q, q, q)"
    environment = {**os.environ, "FLASH_EXT_CHECK": "yes"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode != 0 and "FLASH_EXT_CHECK must be 0 or 1, got yes" in run.stderr


@pytest.mark.skipif(ON_CUDA or not torch.cuda.is_available(), reason="values are not checked on CUDA")
@pytest.mark.parametrize("lengths", [[-5, 3, 9], [9, 4, 0], [0, 2**31 - 1, 9], [7, 7, 2**31 - 1], [-(2**31), -1, 50]])
def test_wrong_lengths_on_cuda_touch_nothing_else(lengths: list[int]) -> None:
    """Without checks the numbers are wrong. Results take memory between tensors that must stay as they are; a read
    outside, or a write further away, would show under compute-sanitizer."""
    around = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in (512, 2048, 4096) for _ in range(64)]
    del around[::2]
    given = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in packed().items()}
    for name in "qkv":
        given[name].requires_grad_()
    for wrong in ("cu_seqlens_q", "cu_seqlens_k"):
        out = flash_ext.attention(**{**given, wrong: int32(lengths, "cuda")})
        torch.autograd.grad(out.sum(), [given[name] for name in "qkv"])
        used = int32([lengths[0], lengths[2]], "cuda")
        flash_ext.attention(**{**given, "seqused_" + wrong[-1]: used})
    torch.cuda.synchronize()
    assert all((t == 7).all() for t in around)
