"""torch's ``varlen_attn`` under ``flash_ext.activate()``: packed sequences, pages, results in place, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext.integrations import sdpa_provider
from tests.integration.test_sdpa_provider import gradients, served
from tests.oracle import cumulative, random

varlen = pytest.importorskip("torch.nn.attention.varlen")


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    with flash_ext.activated():
        sdpa_provider.forget_calls()
        yield


def varlen_attn(*args: Any, window_size: tuple[int, int]) -> Tensor:
    """Of any torch: those up to 2.10 have is_causal and not windows."""
    if "window_size" in varlen.varlen_attn.__annotations__:
        out: Tensor = varlen.varlen_attn(*args, window_size=window_size)
        return out
    if window_size not in ((-1, -1), (-1, 0)):
        pytest.skip("this torch's varlen_attn has no windows")
    out = varlen.varlen_attn(*args, is_causal=window_size == (-1, 0))
    return out


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (5, 0)], ids=str)
def test_varlen_attn(device: str, window_size: tuple[int, int]) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    cu_q, cu_k = cumulative([5, 11, 3], device), cumulative([7, 11, 8], device)
    q, k, v = (random(n, 4, 16, dtype=dtype, device=device).requires_grad_() for n in (19, 26, 26))
    out = varlen_attn(q, k, v, cu_q, cu_k, 11, 11, window_size=window_size)
    expected = flash_ext.attention(q, k, v, window_size=window_size, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert isinstance(expected, Tensor)
    for found, right in zip(
        [out, *gradients(out, (q, k, v))], [expected, *gradients(expected, (q, k, v))], strict=True
    ):
        torch.testing.assert_close(found, right)
    assert served() == {"_flash_attention_forward", "_flash_attention_backward"}


@pytest.mark.parametrize("num_splits", [None, 1, 2])
def test_varlen_attn_over_pages(device: str, num_splits: int | None) -> None:
    if "block_table" not in varlen.varlen_attn.__annotations__:
        pytest.skip("this torch's varlen_attn has no pages")
    splits = {} if num_splits is None else {"num_splits": num_splits}
    if not varlen.varlen_attn.__annotations__.keys() >= splits.keys():
        pytest.skip("this torch's varlen_attn has no num_splits")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = random(19, 4, 16, dtype=dtype, device=device)
    k, v = (random(6, 256, 2, 16, dtype=dtype, device=device) for _ in range(2))
    table = torch.arange(6, dtype=torch.int32, device=device).view(3, 2)
    lengths, cu_seqlens = torch.tensor([300, 31, 7], dtype=torch.int32, device=device), cumulative([5, 11, 3], device)
    pages = dict(seqused_k=lengths, block_table=table)
    out = varlen.varlen_attn(
        q, k, v, cu_seqlens, None, 11, 512, window_size=(-1, 0), enable_gqa=True, **pages, **splits
    )
    expected = flash_ext.decode(
        q,
        k,
        v,
        cache_seqlens=lengths,
        block_table=table,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_q=11,
        causal=True,
        num_splits=num_splits or 0,
        batch_invariant=num_splits == 1,
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert served() == {"_flash_attention_forward"}


def test_varlen_attn_out(device: str) -> None:
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    cu_seqlens = cumulative([5, 11, 3], device)
    q, k, v = (random(19, 4, 16, dtype=dtype, device=device) for _ in range(3))
    out = torch.empty_like(q)
    varlen.varlen_attn_out(out, q, k, v, cu_seqlens, cu_seqlens, 11, 11)
    torch.testing.assert_close(out, flash_ext.attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens))
    assert served() == {"_flash_attention_forward_no_dropout_inplace"}


CUDNN = {"_cudnn_attention_forward", "_cudnn_attention_backward"}


@pytest.mark.parametrize("is_causal", [False, True])
def test_cudnn_operators(device: str, is_causal: bool) -> None:
    """Those that varlen_attn calls on Hopper in later versions, called by themselves."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    cu_seqlens = cumulative([150, 0, 11, 139], device)
    cu_k = cu_seqlens if is_causal else cumulative([7, 3, 200, 90], device)
    q, k, v, grad = (random(300, 4, 64, dtype=dtype, device=device) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    lengths = (cu_seqlens, cu_k, 150, 200)
    forward, backward = torch.ops.aten._cudnn_attention_forward, torch.ops.aten._cudnn_attention_backward
    with torch.no_grad():
        out, lse, *rest = forward(*leaves, None, *lengths, True, 0.0, is_causal, False, scale=0.3)
        found = backward(grad, *leaves, out, lse, *rest[-3:-1], None, *lengths, 0.0, is_causal, scale=0.3)
    expected, expected_lse = flash_ext.attention(
        *leaves,
        causal=is_causal,
        softmax_scale=0.3,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_k,
        return_lse=True,
    )
    torch.testing.assert_close(lse, expected_lse)
    right = torch.autograd.grad(expected, leaves, grad)
    for one, other in zip((out, *found), (expected, *right), strict=True):
        torch.testing.assert_close(one, other)
    assert served() == CUDNN


def test_cudnn_operators_leave_to_torch_what_is_not_theirs() -> None:
    """On a CPU torch has none, and says why the call was not ours."""
    q, cu_seqlens = torch.randn(8, 2, 16), cumulative([3, 5])
    forward = torch.ops.aten._cudnn_attention_forward
    for args, reason in (
        ((None, None, None, 8, 8, True), "dense rows"),
        ((None, cu_seqlens, cu_seqlens.clone(), 5, 5, True, 0.0, True), "is_causal of queries and keys with lengths"),
        ((torch.zeros(8, 8), cu_seqlens, cu_seqlens, 5, 5, True), "attn_bias"),
        ((None, cu_seqlens, cu_seqlens, 5, 5, True, 0.5), "dropout of packed sequences"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            forward(q, q, q, *args)


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0)], ids=str)
def test_long_sequences(device: str, window_size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper torch takes them to cuDNN's operators since 2.14, which a CPU is told to do here."""
    by_cudnn = hasattr(varlen, "_can_use_cudnn")
    if by_cudnn and device == "cpu":
        monkeypatch.setattr(varlen, "_can_use_cudnn", lambda q, k, v, max_q, window, *args: window == [-1, -1])
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    cu_seqlens = cumulative([150, 11, 139], device)
    q, k, v = (random(300, 4, 64, dtype=dtype, device=device).requires_grad_() for _ in range(3))
    by_cudnn = by_cudnn and varlen._can_use_cudnn(q, k, v, 150, list(window_size))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, 150, 150, window_size=window_size)
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    expected = flash_ext.attention(q, k, v, window_size=window_size, **lengths)
    assert isinstance(expected, Tensor)
    for found, right in zip(
        [out, *gradients(out, (q, k, v))], [expected, *gradients(expected, (q, k, v))], strict=True
    ):
        torch.testing.assert_close(found, right)
    assert served() == (CUDNN if by_cudnn else {"_flash_attention_forward", "_flash_attention_backward"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_varlen_attn_in_a_cuda_graph() -> None:
    """Captured with some lengths, replayed with others."""
    q, k, v = (random(26, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    cu_seqlens = cumulative([5, 11, 10], "cuda")

    def attend() -> Tensor:
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, 26, 26, window_size=(-1, 0))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for lengths in ([5, 11, 10], [26, 0, 0], [1, 24, 1]):
        cu_seqlens.copy_(cumulative(lengths, "cuda"))
        graph.replay()
        torch.testing.assert_close(captured, attend(), rtol=2e-2, atol=2e-2)
