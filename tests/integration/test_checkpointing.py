"""Activation checkpointing: what the second forward drops is what the first one dropped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_ext
from tests.oracle import random


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flash_ext.attention(q, k, v, causal=True, dropout_p=0.4)
    assert isinstance(out, Tensor)
    return out


def leaves(device: str) -> list[Tensor]:
    return [random(2, 33, 4, 16, device=device).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout(device: str, use_reentrant: bool) -> None:
    q, k, v = leaves(device)
    torch.manual_seed(7)
    out = attend(q, k, v)
    expected = torch.autograd.grad(out.sum(), (q, k, v))
    torch.manual_seed(7)
    again = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
    torch.rand(5, device=device)  # what is drawn in between must not matter
    again.sum().backward()
    assert torch.equal(again, out)
    for leaf, right in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(leaf.grad, right)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective(device: str, policy: CheckpointPolicy) -> None:
    """Attention saved by the name of its operator, or computed again."""
    calls = []

    def choose(ctx: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        if operator is torch.ops.flash_ext.attention_forward.default:
            calls.append(operator)
            return policy
        return CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = leaves(device)
    torch.manual_seed(7)
    expected = torch.autograd.grad(attend(q * 2, k, v).sum(), (q, k, v))
    torch.manual_seed(7)
    out = checkpoint(
        lambda q, k, v: attend(q * 2, k, v),
        q,
        k,
        v,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(choose),
    )
    for found, right in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(found, right)
    assert calls


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_module_in_training(device: str, use_reentrant: bool) -> None:
    module = flash_ext.MultiheadAttention(32, 4, dropout=0.3, batch_first=True, device=device)
    x = torch.randn(2, 9, 32, device=device, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        out, _ = module(x, x, x, need_weights=False)
        assert isinstance(out, Tensor)
        return out

    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(run(x).square().sum(), x)
    torch.manual_seed(1)
    checkpoint(run, x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    assert all(parameter.grad is not None for parameter in nn.Module.parameters(module))
