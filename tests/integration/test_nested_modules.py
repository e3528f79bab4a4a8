"""Nested tensors through ``MultiheadAttention``: values, gradients, offsets, compilation, and batches of nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import flash_ext

EMBED_DIM, NUM_HEADS = 16, 2
LENGTHS = [3, 0, 1, 6]

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
assert_close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)  # products of other shapes round otherwise


def make_module(device: str) -> flash_ext.MultiheadAttention:
    return flash_ext.MultiheadAttention(EMBED_DIM, NUM_HEADS, batch_first=True, device=device)


def make_nested(device: str, lengths: list[int] = LENGTHS, layout: torch.layout = torch.jagged) -> Tensor:
    sequences = [torch.randn(length, EMBED_DIM, device=device) for length in lengths]
    return torch.nested.nested_tensor(sequences, layout=layout, requires_grad=True)


def with_residual(module: flash_ext.MultiheadAttention, x: Tensor, causal: bool = False) -> Tensor:
    return x + module(x, x, x, need_weights=False, is_causal=causal)[0]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("causal", [False, True])
def test_each_sequence_attends_to_itself(device: str, layout: torch.layout, causal: bool) -> None:
    module = make_module(device)
    x = make_nested(device, layout=layout)
    out = with_residual(module, x, causal)
    torch.cat(out.unbind()).square().sum().backward()
    for part, alone, gradient in zip(out.unbind(), x.detach().unbind(), x.grad.unbind(), strict=True):
        alone = alone.clone().requires_grad_()
        hidden = torch.ones(2 * (len(alone),), dtype=torch.bool, device=device).triu(1) if causal else None
        expected = alone + module(alone, alone, alone, attn_mask=hidden)[0]
        expected.square().sum().backward()
        assert_close(part, expected)
        assert_close(gradient, alone.grad)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("average", [True, False])
def test_weights_are_padded_by_zeros(device: str, layout: torch.layout, average: bool) -> None:
    """They are what torch returns of nested tensors, where nothing is said of ``need_weights``."""
    module = make_module(device)
    x = make_nested(device, layout=layout)
    out, weights = module(x, x, x, average_attn_weights=average)
    heads = () if average else (NUM_HEADS,)
    assert weights.shape == (len(LENGTHS), *heads, max(LENGTHS), max(LENGTHS))
    for n, (part, alone) in enumerate(zip(out.unbind(), x.detach().unbind(), strict=True)):
        expected = torch.zeros_like(weights[n])
        expected_part, expected[..., : len(alone), : len(alone)] = module(alone, alone, alone,
                                                                         average_attn_weights=average)  # fmt: skip
        assert_close((part, weights[n]), (expected_part, expected))


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_torchs(device: str, average: bool) -> None:
    """torch's own fast path takes strided nested tensors, and answers in float32 without gradients alone."""
    module = make_module(device)
    theirs = torch.nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, batch_first=True, device=device).eval()
    theirs.load_state_dict(module.state_dict())
    x = make_nested(device, [3, 1, 6], torch.strided)
    with torch.no_grad():
        (out, weights), (expected, expected_weights) = (
            m(x, x, x, average_attn_weights=average) for m in (module, theirs)
        )
    assert_close(tuple(out.unbind()), tuple(expected.unbind()))
    for n, length in enumerate([3, 1, 6]):  # what lies behind a length, and how far, depends on torch's device
        entry = (n, ..., slice(length), slice(length))
        assert_close((weights[entry],), (expected_weights[entry],))


def test_weights_of_jagged_tensors_of_unknown_lengths(device: str) -> None:
    module = make_module(device)
    known = make_nested(device)
    unknown = torch.nested.nested_tensor_from_jagged(known.values(), known.offsets())
    assert_close(module(unknown, unknown, unknown)[1], module(known, known, known)[1])


def test_jagged_result_has_the_offsets_of_the_input(device: str) -> None:
    x = make_nested(device)
    out, _ = make_module(device)(x, x, x, need_weights=False)
    assert out.layout == torch.jagged and out.shape == x.shape and out.offsets() is x.offsets()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_jagged_compiles_in_one_graph(device: str, causal: bool, need_weights: bool) -> None:
    module = make_module(device)

    def residual(x: Tensor) -> Tensor:
        return x + module(x, x, x, need_weights=need_weights, is_causal=causal)[0]

    torch._dynamo.reset()
    compiled = torch.compile(residual, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (LENGTHS, [5, 2]):
        x = make_nested(device, lengths)
        gradients = []
        for function in (compiled, residual):
            x.grad = None
            out = function(x)
            out.values().square().sum().backward()
            gradients.append((out.values(), x.grad.values()))
        assert_close(*gradients)


def test_jagged_with_rows_between_the_sequences(device: str) -> None:
    """Such as torch.nested.narrow makes."""
    module = make_module(device)
    starts, lengths = (torch.tensor(values, device=device) for values in ([0, 1], [3, 4]))
    x = torch.nested.narrow(torch.randn(2, 6, EMBED_DIM, device=device), 1, starts, lengths, layout=torch.jagged)
    for part, alone in zip(module(x, x, x, need_weights=False)[0].unbind(), x.unbind(), strict=True):
        assert_close(part, module(alone, alone, alone)[0])


def test_jagged_in_another_dimension_raises(device: str) -> None:
    x = make_nested(device).transpose(1, 2)
    with pytest.raises(AssertionError, match="jagged in dimension 1"):
        make_module(device)(x, x, x, need_weights=False)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_empty_sequences(device: str, layout: torch.layout) -> None:
    x = make_nested(device, [0, 0], layout)
    module = make_module(device)
    assert [part.shape for part in with_residual(module, x).unbind()] == [(0, EMBED_DIM)] * 2
    assert module(x, x, x)[1].shape == (2, 0, 0)


def test_empty_batch(device: str) -> None:
    module = make_module(device)
    offsets = torch.zeros(1, dtype=torch.int64, device=device)
    jagged = torch.nested.nested_tensor_from_jagged(torch.randn(0, EMBED_DIM, device=device), offsets)
    strided = torch.nested.nested_tensor([], device=device)
    for x in (jagged, strided):
        assert module(x, x, x, need_weights=False)[0].size(0) == 0
        out, weights = module(x, x, x)
        assert out.size(0) == 0 and weights.shape == (0, 0, 0)
