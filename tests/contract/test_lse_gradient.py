"""LSE is an output with a gradient of its own (z-loss, merging of partial results)."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from tests.oracle import assert_matches_oracle, make_call, make_varlen_call, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_gradient_through(device: str, dtype: torch.dtype, through: str) -> None:
    call = make_call(dtype=dtype, device=device, causal=True).with_random_gradients()
    if through == "out":
        call.grad_lse = None
    if through == "lse":
        call.grad_out = None
    assert_matches_oracle(call)


def test_lse_alone_gives_v_no_gradient(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    v = call.v.requires_grad_()
    _, lse = flash_ext.attention(call.q.requires_grad_(), call.k, v, return_lse=True)
    (gradient,) = torch.autograd.grad(lse.sum(), v, allow_unused=True)
    assert gradient is None or not gradient.any()


def test_lse_gradient_with_sink_bias_and_softcap(device: str, dtype: torch.dtype) -> None:
    options = {"sink": random(4, device=device), "bias": random(2, 1, 33, 47, device=device), "softcap": 2.0}
    assert_matches_oracle(make_call(dtype=dtype, device=device, **options))


def test_lse_gradient_of_packed_sequences(device: str, dtype: torch.dtype) -> None:
    assert_matches_oracle(make_varlen_call([5, 0, 19], [7, 3, 19], device, causal=True, dtype=dtype))


def test_z_loss(device: str, dtype: torch.dtype) -> None:
    call = make_call(1, 9, 11, dtype=dtype, device=device)
    q = call.q.requires_grad_()
    _, lse = flash_ext.attention(q, call.k, call.v, return_lse=True)
    (lse**2).mean().backward()
    call.grad_lse = 2 * lse.detach() / lse.numel()
    call.q = call.q.detach()
    result = assert_matches_oracle(call, gradients_of=("q",))
    torch.testing.assert_close(q.grad, result["dq"])
