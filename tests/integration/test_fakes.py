"""What an operator refuses of tensors with memory, it refuses of meta tensors and fakes in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.integration.test_ops import VARLEN, qkv, to_device
from tests.oracle import int32, random


def misfits() -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    q, k, v = (t.detach() for t in qkv())
    packed = [t.detach() for t in qkv(packed=True)]
    lengths: dict[str, Any] = dict(max_seqlen_q=5, max_seqlen_k=6)
    return {
        "integer": ([q.int(), k.int(), v.int()], {}),
        "dtype": ([q, k.half(), v], {}),
        "rank": ([q, k, v[0]], {}),
        "batch": ([q, k[:1], v[:1]], {}),
        "rows": ([q, k, v[:, :3]], {}),
        "heads": ([q[:, :, :3], k, v], {}),
        "head_dim of k": ([q, k[..., :8], v], {}),
        "head_dim": ([q[..., :12], k[..., :12], v], {}),
        "softcap": ([q, k, v], {"softcap": -1.0}),
        "bias of a rank": ([q, k, v], {"bias": random(9, 13)}),
        "bias of a shape": ([q, k, v], {"bias": random(1, 3, 9, 13)}),
        "mask": ([q, k, v], {"mask": random(1, 1, 9, 13)}),
        "sink": ([q, k, v], {"sink": random(3)}),
        "alibi_slopes": ([q, k, v], {"alibi_slopes": random(3)}),
        "rng_state": ([q, k, v], {"dropout_p": 0.5, "rng_state": torch.zeros(3, dtype=torch.int64)}),
        "head_dim of v": ([q, k, v[..., :0]], {}),
        "seqused_k": ([q, k, v], {"seqused_k": int32([1, 2, 3])}),
        "cu_seqlens of no dimension": (
            packed,
            {**lengths, "cu_seqlens_q": int32([3])[0], "cu_seqlens_k": int32([3])[0]},
        ),
        "empty cu_seqlens": (packed, {**lengths, "cu_seqlens_q": int32([]), "cu_seqlens_k": int32([])}),
        "packed": (packed, {**lengths, "cu_seqlens_q": VARLEN["cu_seqlens_q"]}),
        "cu_seqlens": (packed, {**lengths, **VARLEN, "cu_seqlens_k": VARLEN["cu_seqlens_k"].long()}),
        "packed bias": (packed, {**lengths, **VARLEN, "bias": random(1, 1, 9, 13)}),
    }


@pytest.mark.parametrize("name", misfits())
def test_fakes_refuse_what_the_operator_refuses(name: str) -> None:
    """In its words, so that what is traced or planned with meta tensors also runs."""
    tensors, options = misfits()[name]
    with pytest.raises(RuntimeError) as expected:
        flash_ext.attention(*tensors, **options)
    with pytest.raises(RuntimeError) as raised:
        flash_ext.attention(*(t.to("meta") for t in tensors), **to_device(options, "meta"))
    assert str(raised.value) == str(expected.value)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        options = {name: mode.from_tensor(t) if isinstance(t, Tensor) else t for name, t in options.items()}
        assert flash_ext.supports(*fakes, **options) == (False, str(expected.value).removeprefix("flash_ext: "))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:1], v[:1]), r"k_cache\.size\(0\) must equal q\.size\(0\): expected 2, got 1"),
        (lambda q, k, v: (q, k, v[:, :3]), r"v_cache\.size\(1\) must equal k_cache\.size\(1\): expected 13, got 3"),
        (lambda q, k, v: (q, k[..., :8], v), r"k_cache\.size\(3\) must equal q\.size\(3\): expected 16, got 8"),
        (lambda q, k, v: (q, k, v.half()), "v_cache must have the dtype of q: expected float32, got float16"),
        (lambda q, k, v: (q[:, :, :3], k, v), "heads of k and v must divide those of q: got 3 heads in q and 2"),
    ],
)
def test_fakes_of_decode_refuse_what_it_refuses(change: Callable[..., Any], message: str) -> None:
    tensors = change(*(t.detach() for t in qkv()))
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match=message):
            flash_ext.decode(*(t.to(device) for t in tensors))


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda call: {"cache_seqlens": call["cache_seqlens"].long()}, "cache_seqlens must be int32, got int64"),
        (lambda call: {"cache_leftpad": int32([0, 0, 0])}, r"cache_leftpad must have shape \(batch\): expected \(2,\)"),
        (lambda call: {"block_table": int32([0, 1])}, r"block_table must be 2-dimensional \(batch, max_pages\)"),
        (lambda call: {"sink": random(3)}, r"sink must have shape \(heads_q\): expected \(4,\), got \(3,\)"),
        (lambda call: {"k": call["k"][:1]}, r"k must have shape .*: expected \(2, 1, 2, 16\), got \(1, 1, 2, 16\)"),
        (lambda call: {"v": call["v"].half()}, "v must have the dtype of q: expected float32, got float16"),
    ],
)
def test_fakes_of_appending_refuse_what_it_refuses(change: Callable[..., Any], message: str) -> None:
    q, k_cache, v_cache = (t.detach() for t in qkv())
    call = dict(k=k_cache[:, :1].clone(), v=v_cache[:, :1].clone(), cache_seqlens=int32([3, 4]))
    call |= change(call)
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match=message):
            flash_ext.decode(*(t.to(device) for t in (q, k_cache, v_cache)), **to_device(call, device))


def test_fakes_fix_no_size() -> None:
    """mark_dynamic raises where a trace holds for one size only."""
    q, k, v = (t.detach() for t in qkv(batch=3))
    for t in (q, k, v):
        torch._dynamo.mark_dynamic(t, 0)
        torch._dynamo.mark_dynamic(t, 1)
    compiled = torch.compile(flash_ext.attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), flash_ext.attention(q, k, v))
