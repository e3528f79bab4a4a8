"""``torch.jit.trace``: the same graph whether or not a gradient is recorded while tracing, and a graph that works."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import flash_ext

assert_close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)  # traced modules are not evaluated fused


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's, about every size that Python looks at
        yield


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = flash_ext.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, tuple)
    return out


def weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_ext.attention_weights(q, k, attend_with_lse(q, k, v)[1])


@pytest.mark.parametrize("function", [attend, attend_with_lse, weights])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_functions(device: str, function: object, requires_grad: bool) -> None:
    example = [torch.randn(2, 4, 4, 8, device=device, requires_grad=requires_grad) for _ in range(3)]
    traced = torch.jit.trace(function, example)
    inputs = [torch.randn(2, 4, 4, 8, device=device, requires_grad=True) for _ in range(3)]
    gradients = []
    for called in (traced, function):
        outs = called(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        gradients.append((*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), inputs[:2])))
    assert_close(*gradients)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_converted_encoder(device: str, training: bool, with_grad: bool, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).to(device).train(training)
    flash_ext.convert(encoder, report=lambda line: None)
    padding = torch.zeros((2, 5) if batch_first else (5, 2), dtype=torch.bool, device=device)
    padding[-1, -1] = True

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=padding)

    with torch.set_grad_enabled(with_grad):
        example, other = (torch.randn(2, 5, 16, device=device) for _ in range(2))
        traced, traced_padded = torch.jit.trace(encoder, example), torch.jit.trace(Padded(), (example, padding))
        assert_close(traced(other), encoder(other))
        other_padding = padding.flip(0)  # nothing of the example's padding may be in the graph
        seen = ~other_padding if batch_first else ~other_padding.T
        out = encoder(other, src_key_padding_mask=other_padding)
        assert_close(traced_padded(other, other_padding)[seen], out[seen])
