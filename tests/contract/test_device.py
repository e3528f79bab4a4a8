"""Where work goes on CUDA and when: torch's current stream, the tensors' device, and never a wait of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import cumulative, int32, random, values_are_checked

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(values_are_checked("cuda"), reason="FLASH_EXT_CHECK=1 waits for the device"),
]

OPS = torch.ops.flash_ext
BATCH, SEQLEN, HEADS, HEADS_KV, HEAD_DIM = 2, 200, 4, 2, 64

Leaves = Sequence[Tensor]
Run = Callable[[Leaves], Sequence[Tensor]]


def gradients(results: Any, leaves: Leaves) -> list[Tensor]:
    results = results if isinstance(results, tuple) else (results,)
    return list(torch.autograd.grad(results, list(leaves), [torch.ones_like(t) for t in results]))


def rows(device: str, dtype: torch.dtype, heads: int = HEADS) -> Tensor:
    return random(BATCH, SEQLEN, heads, HEAD_DIM, dtype=dtype, device=device)


def qkv(device: str, dtype: torch.dtype) -> list[Tensor]:
    return [rows(device, dtype), rows(device, dtype, HEADS_KV), rows(device, dtype, HEADS_KV)]


def dense(device: str, dtype: torch.dtype, **options: Any) -> tuple[list[Tensor], Run]:
    """Forward and backward."""

    def run(leaves: Leaves) -> list[Tensor]:
        wanted = [t.detach().requires_grad_() for t in leaves]
        results = flash_ext.attention(*wanted, return_lse=True, **options)
        return [*(t.detach() for t in results), *gradients(results, wanted)]

    return qkv(device, dtype), run


def packed(device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run]:
    tensors, _ = dense(device, dtype)
    boundaries = cumulative([150, 0, 250], device)
    options: dict[str, Any] = dict(cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, causal=True)

    def run(leaves: Leaves) -> list[Tensor]:
        wanted = [t.detach().requires_grad_() for t in leaves]
        results = flash_ext.attention(*wanted, return_lse=True, **options)
        return [*(t.detach() for t in results), *gradients(results, wanted)]

    return [t.flatten(0, 1) for t in tensors], run


def weights(device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run]:
    def run(leaves: Leaves) -> list[Tensor]:
        wanted = [t.detach().requires_grad_() for t in leaves]
        found = flash_ext.attention_weights(*wanted)
        return [found.detach(), *gradients(found, wanted)]

    return [*qkv(device, dtype)[:2], torch.full((BATCH, HEADS, SEQLEN), 9.0, device=device)], run


def decode(device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run]:
    lengths = int32([SEQLEN, 3], device)

    def run(leaves: Leaves) -> list[Tensor]:
        return list(flash_ext.decode(*leaves, cache_seqlens=lengths, return_lse=True))

    q, k_cache, v_cache = qkv(device, dtype)
    return [q[:, :1], k_cache, v_cache], run


def append(device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run]:
    lengths = int32([SEQLEN - 1, 3], device)
    angles = torch.rand(SEQLEN, HEAD_DIM // 2, device=device)
    rotary = dict(rotary_cos=angles.cos().to(dtype), rotary_sin=angles.sin().to(dtype))

    def run(leaves: Leaves) -> list[Tensor]:
        q, k_cache, v_cache, k, v = leaves
        caches = k_cache.clone(), v_cache.clone()
        results = flash_ext.decode(q, *caches, k=k, v=v, cache_seqlens=lengths, causal=True, return_lse=True, **rotary)
        return [*results, *caches]

    q, k_cache, v_cache = qkv(device, dtype)
    return [q[:, :1], k_cache, v_cache, k_cache[:, :1].clone(), v_cache[:, :1].clone()], run


def merge(device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run]:
    def run(leaves: Leaves) -> list[Tensor]:
        wanted = [t.detach().requires_grad_() for t in leaves]
        results = flash_ext.merge(*wanted)
        return [*(t.detach() for t in results), *gradients(results, wanted)]

    outs = random(3, BATCH, SEQLEN, HEADS, HEAD_DIM, dtype=dtype, device=device)
    return [outs, random(3, BATCH, HEADS, SEQLEN, device=device)], run


def add_layer_norm(device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run]:
    weight = random(HEAD_DIM, dtype=dtype, device=device)

    def run(leaves: Leaves) -> list[Tensor]:
        return list(OPS.add_layer_norm(*leaves, weight, weight, 1e-5, True))

    return [rows(device, dtype), rows(device, dtype)], run


def dropout_mask(device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run]:
    return [torch.tensor([5, 7], device=device)], lambda leaves: [
        OPS.dropout_mask(leaves[0], 0.5, BATCH, HEADS, SEQLEN, SEQLEN)
    ]


def block_lists(device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run]:
    def run(leaves: Leaves) -> list[Tensor]:
        mask = flash_ext.BlockMask.documents(leaves[0], SEQLEN, (64, 64), causal=True)
        return [*mask.tensors, *mask.transpose().tensors]

    return [cumulative([50, 0, 130], device)], run


def with_bias(device: str, dtype: torch.dtype) -> tuple[list[Tensor], Run]:
    bias = random(1, HEADS, SEQLEN, SEQLEN, dtype=dtype, device=device)
    tensors, _ = dense(device, dtype)

    def run(leaves: Leaves) -> list[Tensor]:
        wanted = [t.detach().requires_grad_() for t in leaves]
        out = flash_ext.attention(*wanted[:3], bias=wanted[3])
        return [out.detach(), *gradients(out, wanted)]

    return [*tensors, bias], run


CALLS: dict[str, Callable[[str, torch.dtype], tuple[list[Tensor], Run]]] = {
    "plain": dense,
    "causal": lambda device, dtype: dense(device, dtype, causal=True),
    "deterministic": lambda device, dtype: dense(device, dtype, deterministic=True),
    "dropout": lambda device, dtype: dense(device, dtype, dropout_p=0.5, rng_state=torch.tensor([1, 2], device=device)),
    "block mask": lambda device, dtype: dense(
        device, dtype, block_mask=flash_ext.BlockMask.causal(SEQLEN, SEQLEN, device=device)
    ),
    "packed": packed,
    "bias": with_bias,
    "weights": weights,
    "decode": decode,
    "append": append,
    "merge": merge,
    "add_layer_norm": add_layer_norm,
    "dropout_mask": dropout_mask,
    "block lists": block_lists,
}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """dQ is summed in any order."""
    for got, want in zip(found, expected, strict=True):
        tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.float().abs().max().item())


@EVERY_CALL
def test_the_host_never_waits(name: str, dtype: torch.dtype) -> None:
    """The call is back while a kernel before it still runs; torch's own watch sees no synchronisation either."""
    tensors, run = CALLS[name]("cuda", dtype)
    run(tensors)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    done = torch.cuda.Event()
    torch.cuda._sleep(1_500_000_000)
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(tensors)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert not done.query()
    torch.cuda.synchronize()


@EVERY_CALL
def test_work_goes_to_the_current_stream(name: str, dtype: torch.dtype) -> None:
    """There the inputs come late. On another stream the kernels would read what was there before."""
    tensors, run = CALLS[name]("cuda", dtype)
    expected = run(tensors)
    places = [t.clone().zero_() for t in tensors]
    run(places)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for place, t in zip(places, tensors, strict=True):
            place.copy_(t)
        found = run(places)
    stream.synchronize()
    assert_close(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EVERY_CALL
def test_work_goes_to_the_tensors_device(name: str, dtype: torch.dtype) -> None:
    """Whichever device is current; it stays the current one."""
    tensors, run = CALLS[name]("cuda:1", dtype)
    with torch.cuda.device(1):
        expected = run(tensors)
        torch.cuda.synchronize()
    with torch.cuda.device(0):
        found = run(tensors)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert all(t.device == torch.device("cuda:1") for t in found)
    assert_close(found, expected)
