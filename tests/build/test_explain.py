"""What ``explain`` tells the planner of a call: each option changes what it is about, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import _plan, planning
from tests.oracle import cumulative, int32, random

FIELDS = [name for name in dir(_plan.Problem) if not name.startswith("_")]


def fields(problem: _plan.Problem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in FIELDS}


def changes(problem: _plan.Problem, plain: _plan.Problem) -> dict[str, Any]:
    return {name: value for name, value in fields(problem).items() if value != getattr(plain, name)}


def qkv() -> list[Tensor]:
    return [random(*shape) for shape in [(2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 24)]]


PLAIN = dict(
    operation="forward", device="cpu", dtype="float32", batch=2, heads_q=4, heads_kv=2, seqlen_q=9, seqlen_k=13,
    head_dim=16, head_dim_v=24, softmax_scale=0.25, softcap=0.0, window_left=-1, window_right=-1, top_left=False,
    dropout_p=0.0, broadcast=False, varlen=False, paged=False, has_bias=False, has_mask=False, has_block_mask=False,
    has_alibi=False, has_sink=False, deterministic=False, num_splits=1, batch_invariant=False, total_q=0, total_k=0,
)  # fmt: skip

OPTIONS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "causal": (lambda: {"causal": True}, {"window_right": 0}),
    "window": (lambda: {"window_size": (3, 1)}, {"window_left": 3, "window_right": 1}),
    "top_left": (lambda: {"top_left": True}, {"top_left": True}),
    "scale": (lambda: {"softmax_scale": 0.5}, {"softmax_scale": 0.5}),
    "softcap": (lambda: {"softcap": 2.0}, {"softcap": 2.0}),
    "alibi": (lambda: {"alibi_slopes": torch.rand(4)}, {"has_alibi": True}),
    "sink": (lambda: {"sink": torch.rand(4)}, {"has_sink": True}),
    "mask": (lambda: {"mask": torch.ones(1, 1, 1, 13, dtype=torch.bool)}, {"has_mask": True}),
    "bias": (lambda: {"bias": torch.zeros(1, 1, 9, 13)}, {"has_bias": True, "bias_dtype": "float32"}),
    "block mask": (lambda: {"block_mask": flash_ext.BlockMask.causal(9, 13, (16, 32))}, {"has_block_mask": True}),
    "dropout": (lambda: {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])}, {"dropout_p": 0.5}),
    "deterministic": (lambda: {"deterministic": True}, {"deterministic": True}),
    "seqused_q": (lambda: {"seqused_q": int32([1, 2])}, {"varlen": True}),
    "seqused_k": (lambda: {"seqused_k": int32([1, 2])}, {"varlen": True}),
}


def test_a_plain_call() -> None:
    problem = fields(flash_ext.explain(*qkv()).problem)
    assert {name: problem[name] for name in PLAIN} == PLAIN
    assert problem["num_workers"] == torch.get_num_threads()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option(name: str) -> None:
    make, expected = OPTIONS[name]
    tensors = qkv()
    plain = flash_ext.explain(*tensors).problem
    assert changes(flash_ext.explain(*tensors, **make()).problem, plain) == expected


def test_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert flash_ext.explain(*qkv()).problem.num_workers == count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("value", "wanted"), [("", True), ("1", True), ("0", False)])
def test_the_switch_of_kernels_for_hopper(value: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_EXT_HOPPER", value)
    planning._wants_hopper_kernels.cache_clear()
    try:
        assert planning._wants_hopper_kernels() == wanted
    finally:
        planning._wants_hopper_kernels.cache_clear()


def test_the_global_switch_of_determinism() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert flash_ext.explain(*qkv(), operation="backward").problem.deterministic
        assert not flash_ext.explain(*qkv(), operation="backward", deterministic=False).problem.deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_strides_of_zero(which: str) -> None:
    tensors = dict(zip("qkv", qkv(), strict=True))
    tensors[which] = tensors[which][:1].expand(2, -1, -1, -1)
    assert flash_ext.explain(**tensors).problem.broadcast


def test_weights_have_no_v() -> None:
    problem = flash_ext.explain(*qkv(), operation="weights").problem
    assert problem.head_dim_v == 16 and problem.operation == "weights"


def test_packed_sequences() -> None:
    q, k, v = (t.flatten(0, 1) for t in qkv())
    problem = flash_ext.explain(q, k, v, cu_seqlens_q=cumulative([7, 11]), cu_seqlens_k=cumulative([20, 6])).problem
    found = fields(problem)
    expected = dict(batch=2, seqlen_q=11, seqlen_k=20, total_q=18, total_k=26, varlen=True)
    assert {name: found[name] for name in expected} == expected


DECODE: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "lengths": (lambda: {"cache_seqlens": int32([3, 4])}, {"varlen": True}),
    "left padding": (lambda: {"cache_leftpad": int32([1, 0])}, {"varlen": True}),
    "splits": (lambda: {"num_splits": 3}, {"num_splits": 3}),
    "batch_invariant": (lambda: {"batch_invariant": True}, {"batch_invariant": True}),
    "softcap": (lambda: {"softcap": 2.0}, {"softcap": 2.0}),
    "sink": (lambda: {"sink": torch.rand(4)}, {"has_sink": True}),
    "alibi": (lambda: {"alibi_slopes": torch.rand(4)}, {"has_alibi": True}),
    "causal": (lambda: {"causal": True}, {"window_right": 0}),
    "pages": (lambda: {"block_table": int32([[0, 1, 0], [1, 1, 0]])}, {"paged": True, "seqlen_k": 39}),
}


@pytest.mark.parametrize("name", DECODE)
def test_an_option_of_decoding(name: str) -> None:
    make, expected = DECODE[name]
    tensors = qkv()
    plain = flash_ext.explain(*tensors, operation="decode").problem
    assert plain.operation == "decode" and plain.num_splits == 0 and plain.seqlen_k == 13
    assert changes(flash_ext.explain(*tensors, operation="decode", **make()).problem, plain) == expected
