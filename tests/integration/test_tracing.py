"""``torch.jit.trace``: the same graph whether or not a gradient is recorded while tracing, and a graph that works.
And every tracer, and vmap, where a function reads lengths that lie in tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flash_ext
from flash_ext.tracing import can_read
from tests.oracle import int32

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


def of_documents(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    mask = flash_ext.BlockMask.documents(cu_seqlens, len(x), causal=True)
    return flash_ext.attention(x[None], x[None], x[None], block_mask=mask)


def over_pages(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    pages, table = x.new_ones(4, 4, 2, 16), cu_seqlens.new_zeros(2, 2)
    return flash_ext.flash_attn_varlen_func(x, pages, pages, cu_seqlens, cu_seqlens, 5, 5, block_table=table)


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attention": lambda x, cu: flash_ext.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu),
    "decode": lambda x, cu: flash_ext.decode(x, *x.new_ones(2, 2, 8, 2, 16), cu_seqlens_q=cu),
    "flash_attn_varlen_func": over_pages,
    "BlockMask": of_documents,
}


@pytest.mark.parametrize("name", READERS)
def test_lengths_are_not_read_while_somebody_looks(name: str) -> None:
    """What is traced for some lengths serves others. The tensors are on a CPU: on a GPU nothing is read anyway."""
    function, x = READERS[name], torch.randn(5, 2, 16)
    cu_seqlens, others = int32([0, 3, 5]), int32([0, 1, 5])
    expected = function(x, others)
    for mode in ("real", "fake", "symbolic"):
        assert_close(make_fx(function, tracing_mode=mode)(x, cu_seqlens)(x, others), expected)
    assert_close(make_fx(function, pre_dispatch=True)(x, cu_seqlens)(x, others), expected)
    assert_close(torch.jit.trace(function, (x, cu_seqlens))(x, others), expected)
    assert_close(torch.vmap(function)(torch.stack([x, x]), torch.stack([cu_seqlens, others]))[1], expected)
    with FakeTensorMode() as mode:
        assert function(mode.from_tensor(x), mode.from_tensor(others)).shape == expected.shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert function(x, others).shape == expected.shape


def test_lengths_are_read_beside_modes_that_do_not_trace() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    seen: list[bool] = []

    def loss(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        seen.append(can_read(cu_seqlens))
        return x.sum()

    with FlopCounterMode(display=False):
        loss(torch.ones(3), int32([0, 3]))
    torch.func.grad(loss)(torch.ones(3), int32([0, 3]))
    assert seen == [True, True]
