"""torch's distributed tensors and its ``context_parallel`` over this library's kernels: two processes each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flash_ext
from flash_ext.integrations import aten_attention, sdpa_provider
from tests.processes import needs_gpus, run_processes

WORLD = 2


def tensors(device: str, seqlen: int = 64) -> list[Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [torch.randn(2, 4, seqlen, 32, device=device).to(dtype).requires_grad_() for _ in range(3)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    tolerance = 1e-4 if found[0].dtype == torch.float32 else 3e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def attend_with_heads_on_each_rank(device: str, mesh: Any) -> None:
    """torch has rules for its CUDA operators alone. A CPU gets the flash one here, so that gloo can check it."""
    library = torch.library.Library("aten", "IMPL")
    if device == "cpu":
        library.impl("_scaled_dot_product_flash_attention", aten_attention.flash_forward, "CPU")
        library.impl("_scaled_dot_product_flash_attention_backward", aten_attention.flash_backward, "CPU")
    q, k, v = tensors(device)
    weight = torch.linspace(-1, 1, q.numel(), device=device, dtype=q.dtype).view(q.shape)
    flash = torch.ops.aten._scaled_dot_product_flash_attention

    with flash_ext.activated():
        sharded = [distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in (q, k, v)]
        out = (
            flash(*sharded, 0.0, True)[0]
            if device == "cpu"
            else F.scaled_dot_product_attention(*sharded, is_causal=True)
        )
        assert isinstance(out, DTensor) and out.placements == (Shard(1),)
        gradients = torch.autograd.grad(
            (out * distribute_tensor(weight, mesh, [Shard(1)])).sum().full_tensor(), sharded
        )
        assert device == "cpu" or sdpa_provider.calls_served()
    found = [out.full_tensor(), *(x.full_tensor() for x in gradients)]
    expected = flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_same(found, [expected, *torch.autograd.grad((expected * weight).sum(), (q, k, v))])


def test_dtensor_with_sharded_heads(device: str) -> None:
    needs_gpus(device)
    run_processes(device, attend_with_heads_on_each_rank)


def attend_in_a_ring(device: str, mesh: Any, is_causal: bool) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    q, k, v = tensors(device, seqlen=256)
    expected = flash_ext.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    right = [expected, *torch.autograd.grad(expected.float().sum(), (q, k, v))]
    parts = [x.detach().clone() for x in (q, k, v)]
    shards = [x.detach().clone() for x in right]
    buffers = [*parts, *shards]
    with flash_ext.activated(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
            for part in parts:  # only now: what needs a gradient cannot be cut in place
                part.requires_grad_()
            out = F.scaled_dot_product_attention(*parts, is_causal=is_causal)
            gradients = torch.autograd.grad(out.float().sum(), parts)
            assert sdpa_provider.calls_served()["_scaled_dot_product_flash_attention"] > 0
            assert_same([out.detach(), *gradients], shards)
            for part in parts:
                part.requires_grad_(False)


@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} GPUs")
@pytest.mark.parametrize("is_causal", [False, True])
def test_context_parallel(is_causal: bool) -> None:
    run_processes("cuda", attend_in_a_ring, is_causal)
