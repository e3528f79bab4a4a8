"""What ``explain`` shows is what the operator itself gave the planner: sizes, strides, numbers, devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import random

BATCH, HEADS_Q, HEADS_KV, SEQLEN_Q, SEQLEN_K = 2, 4, 2, 9, 13
DEFAULTS: dict[str, Any] = dict(
    batch=BATCH, heads_q=HEADS_Q, heads_kv=HEADS_KV, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K, total_q=0, total_k=0,
    head_dim=16, head_dim_v=24, softmax_scale=0.25, softcap=0.0, window_left=-1, window_right=-1, top_left=False,
    dropout_p=0.0, broadcast=False, varlen=False, paged=False, has_bias=False, bias_dtype="float16",
    bias_in_chunks=True, bias_per_key=False, bias_of_all_batches=False, has_mask=False, mask_per_key=False,
    has_block_mask=False, block_m=0, block_n=0,
    has_alibi=False, has_sink=False, deterministic=False, num_splits=1, batch_invariant=False,
)  # fmt: skip


def qkv(device: str) -> list[Tensor]:
    return [
        random(BATCH, SEQLEN_Q, HEADS_Q, 16, device=device),
        random(BATCH, SEQLEN_K, HEADS_KV, 16, device=device),
        random(BATCH, SEQLEN_K, HEADS_KV, 24, device=device),
    ]


# Of each: the options of a call, and the fields that follow from them.
Case = tuple[Callable[[str], dict[str, Any]], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": (lambda device: {}, {}),
    "causal": (lambda device: {"causal": True}, {"window_right": 0}),
    "window": (lambda device: {"window_size": (3, 5), "top_left": True},
               {"window_left": 3, "window_right": 5, "top_left": True}),
    "scale": (lambda device: {"softmax_scale": 1 / 3, "softcap": 1e-7}, {"softmax_scale": 1 / 3, "softcap": 1e-7}),
    "bias": (lambda device: {"bias": random(1, 1, SEQLEN_Q, SEQLEN_K, device=device)},
             {"has_bias": True, "bias_dtype": "float32", "bias_in_chunks": False}),
    "bias in chunks": (lambda device: {"bias": random(1, HEADS_Q, SEQLEN_Q, 16, device=device)[..., :SEQLEN_K]},
                       {"has_bias": True, "bias_dtype": "float32", "bias_of_all_batches": True}),
    "bias of each sequence": (lambda device: {"bias": random(BATCH, HEADS_Q, SEQLEN_Q, 16, device=device)[..., :13]},
                              {"has_bias": True, "bias_dtype": "float32"}),
    "per-key bias": (lambda device: {"bias": random(BATCH, 1, 1, 16, device=device)[..., :SEQLEN_K]},
                     {"has_bias": True, "bias_dtype": "float32", "bias_per_key": True}),
    "a bias that begins off": (lambda device: {"bias": random(1, HEADS_Q, SEQLEN_Q, 16, device=device)[..., 1:14]},
                               {"has_bias": True, "bias_dtype": "float32", "bias_in_chunks": False,
                                "bias_of_all_batches": True}),
    "a bias with keys as rows": (lambda device: {"bias": random(1, 1, 16, 16, device=device)
                                                          .transpose(2, 3)[..., :SEQLEN_Q, :SEQLEN_K]},
                                 {"has_bias": True, "bias_dtype": "float32", "bias_in_chunks": False}),
    "a bias with gaps": (lambda device: {"bias": random(1, 1, SEQLEN_Q, 32, device=device)[..., : 2 * SEQLEN_K : 2]},
                         {"has_bias": True, "bias_dtype": "float32", "bias_in_chunks": False}),
    "masks": (lambda device: {"mask": torch.ones(1, 1, 1, SEQLEN_K, dtype=torch.bool, device=device),
                              "block_mask": flash_ext.BlockMask.causal(SEQLEN_Q, SEQLEN_K, device=device)},
              {"has_mask": True, "mask_per_key": True, "has_block_mask": True, "block_m": 128, "block_n": 128}),
    "alibi and sink": (lambda device: {"alibi_slopes": random(HEADS_Q, device=device),
                                       "sink": random(HEADS_Q, device=device)},
                       {"has_alibi": True, "has_sink": True}),
    "dropout": (lambda device: {"dropout_p": 0.3}, {"dropout_p": 0.3}),
    "lengths": (lambda device: {"seqused_k": torch.tensor([3, 4], dtype=torch.int32, device=device)}, {"varlen": True}),
}  # fmt: skip


def is_copied(device: str, operation: str) -> bool:
    """Whether kernels get a copy of a bias that does not consist of chunks."""
    return device != "cpu" and operation in ("forward", "backward")


def fields_of(problem: Any) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in DEFAULTS}


def check(device: str, operation: str, tensors: list[Tensor], options: dict[str, Any], **expected: Any) -> None:
    problem = flash_ext.explain(*tensors, operation=operation, **options).problem
    assert (problem.operation, problem.device, problem.dtype) == (operation, device, "float32")
    assert fields_of(problem) == DEFAULTS | expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("operation", ["forward", "backward", "weights", "weights_backward"])
def test_options(device: str, operation: str, name: str) -> None:
    options, expected = CASES[name]
    if operation.startswith("weights"):
        if name == "alibi and sink":
            pytest.skip("attention_weights takes no sink")
        expected = expected | {"head_dim_v": 16}  # it reads no v
    if is_copied(device, operation):
        expected = expected | {"bias_in_chunks": True}
    check(device, operation, qkv(device), options(device), **expected)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_a_stride_of_0(device: str, operation: str, place: int) -> None:
    tensors = qkv(device)
    tensors[place] = tensors[place][:1].expand(BATCH, -1, -1, -1)
    check(device, operation, tensors, {}, broadcast=True)


def test_a_dimension_of_one_has_no_stride(device: str) -> None:
    tensors = [t[:1].expand(1, -1, -1, -1) for t in qkv(device)]
    check(device, "forward", tensors, {}, batch=1)


@pytest.mark.parametrize(("globally", "asked"), list(itertools.product([False, True], [None, False, True])))
def test_deterministic(device: str, globally: bool, asked: bool | None) -> None:
    wanted = globally if asked is None else asked
    torch.use_deterministic_algorithms(globally)
    try:
        check(device, "backward", qkv(device), {"deterministic": asked}, deterministic=wanted)
        check(device, "forward", qkv(device), {"deterministic": asked})  # a forward always is
    finally:
        torch.use_deterministic_algorithms(False)


def test_packed_sequences(device: str) -> None:
    q, k, v = (t.flatten(0, 1) for t in qkv(device))
    cu_q = torch.tensor([0, 4, 18], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 20, 26], dtype=torch.int32, device=device)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 16, "max_seqlen_k": 1000}
    # The host knows the lengths on a CPU alone.
    longest = {"seqlen_q": 14, "seqlen_k": 20} if device == "cpu" else {"seqlen_q": 16, "seqlen_k": 26}
    check(device, "forward", [q, k, v], options, total_q=18, total_k=26, varlen=True, **longest)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"causal": True, "num_splits": 3}, {"window_right": 0, "num_splits": 3}),
        ({"batch_invariant": True, "softcap": 2.0}, {"batch_invariant": True, "softcap": 2.0}),
    ],
    ids=str,
)
def test_decode(device: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    check(device, "decode", qkv(device), options, **{"num_splits": 0, **expected})


def test_decode_of_pages(device: str) -> None:
    q, k, v = qkv(device)
    table = torch.zeros(BATCH, 5, dtype=torch.int32, device=device)
    check(device, "decode", [q, k, v], {"block_table": table}, num_splits=0, paged=True, seqlen_k=5 * SEQLEN_K)


def test_the_gpu_is_that_of_torch(device: str) -> None:
    """Else its own kernels would never run, and nobody would notice but by the time."""
    if device == "cpu":
        pytest.skip("a CPU is described by its instruction set")
    problem, gpu = flash_ext.explain(*qkv(device)).problem, torch.cuda.get_device_properties(device)
    assert problem.compute_capability == 10 * gpu.major + gpu.minor
    assert problem.num_workers == gpu.multi_processor_count


def test_autocast(device: str) -> None:
    """The call casts, so its plan is that of what it casts to."""
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flash_ext.explain(*qkv(device)).problem.dtype == "bfloat16"


def test_nothing_is_drawn(device: str) -> None:
    q, k, v = qkv(device)
    torch.manual_seed(0)
    expected = torch.rand(3, device=device)
    torch.manual_seed(0)
    flash_ext.explain(q, k, v, dropout_p=0.5)
    assert torch.equal(torch.rand(3, device=device), expected)


def test_tensors_without_memory_are_refused(device: str) -> None:
    q, k, v = qkv(device)
    with pytest.raises(TypeError, match=r"k must be a tensor in memory.*on meta"):
        flash_ext.explain(q, k.to("meta"), v)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fakes = [torch.empty(t.shape, device=device) for t in (q, k, v)]
        with pytest.raises(TypeError, match=r"q must be a tensor in memory.*FakeTensor"):
            flash_ext.explain(*fakes)


def test_tensors_that_do_not_fit_raise_what_the_call_raises(device: str) -> None:
    q, k, v = qkv(device)
    with pytest.raises(RuntimeError) as expected:
        flash_ext.attention(q, k[..., :8], v)
    with pytest.raises(RuntimeError) as raised:
        flash_ext.explain(q, k[..., :8], v)
    assert str(raised.value) == str(expected.value)
