"""Attention over ranks in a training step: checkpointing, autocast, FSDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flash_ext
from flash_ext.integrations.distributed import context_parallel_attention, join_sequence, split_sequence
from tests.integration.rank_pool import METHODS


def train(device: str) -> float:
    """Loss of a step in which only some ranks' results are used, and attention is recomputed in the backward."""
    torch.manual_seed(0)
    x = torch.randn(1, 16, 2, 16, device=device, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        out = context_parallel_attention(x, x, x, None, layout="zigzag", causal=True)
        assert isinstance(out, Tensor)
        return out

    out = torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)
    (out.sum() * dist.get_rank()).backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    return float(x.grad.abs().sum())


def test_checkpoint_and_unused_results(pools: Any, device: str) -> None:
    assert pools(2, device).run(train) > 0  # rank 0's keys, by what rank 1 made of them


def under_autocast(device: str) -> None:
    """As attention is: computed in autocast's dtype, with gradients in that of the inputs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 16, 4, 16, device=device, requires_grad=True) for _ in range(3))
    parts = [split_sequence(x.detach(), None).clone().requires_grad_() for x in (q, k, v)]
    for method in METHODS:
        with torch.autocast(device, torch.bfloat16):
            whole = flash_ext.attention(q, k, v, causal=True)
            out = context_parallel_attention(*parts, None, method=method, causal=True)  # type: ignore[arg-type]
        assert isinstance(whole, Tensor) and isinstance(out, Tensor) and out.dtype == whole.dtype == torch.bfloat16
        expected = [whole, *torch.autograd.grad(whole.float().square().sum(), (q, k, v))]
        found = [out, *torch.autograd.grad(out.float().square().sum(), parts)]
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(join_sequence(one, None), other, rtol=5e-2, atol=5e-2)


def test_autocast(pools: Any, device: str) -> None:
    pools(2, device).run(under_autocast)


class Attend(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 96)

    def forward(self, x: Tensor, group: Any = None, parallel: bool = False) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        if parallel:
            out = context_parallel_attention(q, k, v, group, layout="zigzag", causal=True)
        else:
            out = flash_ext.attention(q, k, v, causal=True)
        assert isinstance(out, Tensor)
        return out.flatten(-2)


def fsdp_step(device: str) -> None:
    """A sharded model on shards of the sequence has the gradient of the whole model on the whole sequence."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    world = dist.get_world_size()
    torch.manual_seed(0)
    whole = Attend().to(device)
    sharded = Attend().to(device)
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=init_device_mesh(device, (world,)))
    x = torch.randn(1, 32, 32, device=device)
    whole(x).square().sum().backward()
    mine = split_sequence(x, None, layout="zigzag")
    (sharded(mine, parallel=True).square().sum() * world).backward()  # FSDP means what it sums
    for name, parameter in sharded.named_parameters():
        expected = whole.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-4, atol=1e-4)  # type: ignore


def test_fsdp(pools: Any, device: str) -> None:
    pools(2, device).run(fsdp_step)
