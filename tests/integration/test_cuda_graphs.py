"""CUDA graphs: capture by hand, and by ``torch.cuda.make_graphed_callables``; lengths that change between replays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flash_ext
from tests.oracle import cumulative, random

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Packed(nn.Module):
    """Self-attention of packed sequences, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(64, 3 * 64, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 16)).unbind(1)
        out = flash_ext.attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        assert isinstance(out, Tensor)
        return out.flatten(-2)


def rows() -> Tensor:
    return random(96, 64, dtype=torch.bfloat16, device="cuda")


def test_make_graphed_callables_with_varlen() -> None:
    """The graph is captured with some lengths and replayed with others: no length is read by the host."""
    torch.manual_seed(0)
    module = Packed()
    reference = Packed()
    reference.load_state_dict(module.state_dict())
    sample = (rows().requires_grad_(), cumulative([40, 56], "cuda"))
    graphed = torch.cuda.make_graphed_callables(module, sample)
    for lengths in ([40, 56], [96, 0], [1, 95], [0, 10]):
        x, cu_seqlens = rows().requires_grad_(), cumulative(lengths, "cuda")
        found, expected = graphed(x, cu_seqlens), reference(x.detach().requires_grad_(), cu_seqlens)
        used = sum(lengths)
        torch.testing.assert_close(found[:used], expected[:used])
        found[:used].float().sum().backward()
        expected[:used].float().sum().backward()
        for mine, right in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, right.grad, rtol=2e-2, atol=2e-2)
            mine.grad = right.grad = None


def test_make_graphed_callables_with_dropout() -> None:
    """Each replay drops other weights, the same ones in its forward and its backward."""
    module = flash_ext.MultiheadAttention(64, 4, dropout=0.5, batch_first=True, device="cuda", dtype=torch.bfloat16)

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.attention(x, x, x, need_weights=False)
            assert isinstance(out, Tensor)
            return out

    x = random(2, 32, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
    graphed = torch.cuda.make_graphed_callables(Attend(), (x,))
    first = graphed(x).clone()
    second = graphed(x).clone()
    assert not torch.equal(first, second)
    graphed(x).float().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("captured_lengths", [[40, 56], [0, 0]], ids=str)
def test_capture_with_backward_and_other_lengths(captured_lengths: list[int]) -> None:
    q, k, v = (random(96, 4, 64, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3))
    cu_seqlens = cumulative(captured_lengths, "cuda")

    def step() -> tuple[Tensor, ...]:
        out = flash_ext.attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        assert isinstance(out, Tensor)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([40, 56], [96, 0], [3, 20]):
        cu_seqlens.copy_(cumulative(lengths, "cuda"))
        graph.replay()
        used = sum(lengths)
        for found, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(found[:used], expected[:used], rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("block_size", [(128, 128), (64, 64), (48, 96)], ids=str)
def test_capture_with_a_block_mask_whose_lists_change(device: str, block_size: tuple[int, int]) -> None:
    """What kernels make of the lists is made anew in each replay."""
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    q, k, v = (random(1, 300, 4, 64, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(3))
    windows = [
        flash_ext.BlockMask.sliding_window(300, 300, window, block_size=block_size, device=device)
        for window in ((40, 200), (200, 40), (150, 150))
    ]
    # Room for all blocks, and for a bitmap for each of them.
    rows, columns = -(-300 // block_size[0]), -(-300 // block_size[1])
    sizes = (1, 1, rows + 1), (rows * columns,), (rows * columns,), (rows * columns, block_size[0], block_size[1] // 32)
    lists = tuple(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
    mask = flash_ext.BlockMask(*lists, seqlen_q=300, seqlen_k=300)

    def fill(window: flash_ext.BlockMask) -> None:
        found = (window.offsets, window.indices, window.bitmap_ids, window.bitmaps)
        for own, other in zip(lists, found, strict=True):
            room = tuple(slice(min(size, most)) for size, most in zip(other.shape, own.shape, strict=True))
            own[room] = other[room]

    def step(block_mask: flash_ext.BlockMask) -> tuple[Tensor, ...]:
        out = flash_ext.attention(q, k, v, block_mask=block_mask)
        assert isinstance(out, Tensor)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    fill(windows[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(mask)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(mask)
    for window in windows:
        fill(window)
        graph.replay()
        for found, expected in zip(captured, step(window), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
