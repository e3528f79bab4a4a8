"""Builders of ``BlockMask`` that do not wait for a GPU, and what is made of masks, against dense masks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import BlockMask
from flash_ext.masks import combination, intervals, lists
from tests import reference
from tests.oracle import int32, random

BLOCKS = [(16, 32), (64, 64), (128, 128), (5, 96), (128, 32)]
LENGTHS = [(40, 70), (64, 64), (1, 1), (130, 33), (7, 257), (300, 300)]


def pairs(seqlen_q: int, seqlen_k: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)[None]


def assert_shows(block_mask: BlockMask, visible: Tensor) -> None:
    """What it shows, by its own word and by that of the reference."""
    visible = visible if visible.dim() == 4 else visible[None, None]
    assert block_mask.shape == tuple(visible.shape)
    assert torch.equal(block_mask.to_dense(), visible)
    assert torch.equal(reference.block_mask_visible(block_mask.tensors, *visible.shape[2:]), visible)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in block_mask.tensors)


def between(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def random_block_size() -> tuple[int, int]:
    return between(8, 150), 32 * between(1, 5)


def whole_blocks(blocks: Tensor, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int]) -> Tensor:
    dense = blocks.repeat_interleave(block_size[0], -2).repeat_interleave(block_size[1], -1)
    return dense[..., :seqlen_q, :seqlen_k]


@pytest.mark.parametrize(
    "lengths", [(0, 20, 57, 57, 60), (0, 300), (0, 1, 2, 3, 4, 130, 131, 260), (5, 200), (0,)], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
def test_documents(device: str, block_size: tuple[int, int], causal: bool, lengths: tuple[int, ...]) -> None:
    seqlen = 300
    i, j = pairs(seqlen, seqlen, device)
    cu_seqlens = int32(list(lengths), device)
    document = torch.full((seqlen,), -1, device=device)
    for number, (begin, end) in enumerate(itertools.pairwise(lengths)):
        document[begin:end] = number
    expected = (document[:, None] == document) & (document >= 0) & ((j <= i) | (not causal))
    mask = BlockMask.documents(cu_seqlens, seqlen, block_size, causal=causal)
    assert_shows(mask, expected)
    assert_shows(BlockMask.documents(cu_seqlens.long(), seqlen, block_size, causal=causal), expected)


def test_long_documents_share_bitmaps(device: str) -> None:
    """A row of blocks in which one ends and the next begins sees all columns in part, by few bitmaps."""
    i, j = pairs(2000, 2000, device)
    mask = BlockMask.documents(int32([0, 1000, 2000], device), 2000, (64, 64))
    assert_shows(mask, (i < 1000) == (j < 1000))


def test_random_documents(device: str) -> None:
    """Some of them empty, some of a token, tokens before the first one and behind the last one."""
    for _ in range(15):
        seqlen, causal = between(1, 1000), bool(between(0, 1))
        bounds = torch.randint(0, seqlen + 1, (between(1, 60),)).sort().values
        document = torch.searchsorted(bounds, torch.arange(seqlen), right=True)
        inside = (document > 0) & (document < len(bounds))
        expected = (document[:, None] == document) & inside
        expected = expected.tril() if causal else expected
        mask = BlockMask.documents(bounds.to(device), seqlen, random_block_size(), causal=causal)
        assert_is(mask, expected.to(device))


def test_random_windows(device: str) -> None:
    """Wider than the sequence, narrower than a block, with more global tokens than there are keys."""
    for _ in range(30):
        lengths, top_left, causal = (between(1, 400), between(1, 400)), bool(between(0, 1)), bool(between(0, 1))
        left, right = (min(between(-40, 500), between(-1, 60)) for _ in range(2))
        left, right = max(left, -1), max(right, -1)
        num_global = between(0, 1) * between(0, 450)
        i, j = pairs(*lengths, device)
        at = i + (0 if top_left else lengths[1] - lengths[0])
        expected = ((left < 0) | (j >= at - left)) & ((right < 0) | (j <= at + right))
        expected |= (j < num_global) | ((at >= 0) & (at < num_global))
        expected = expected & (j <= at) if causal or right == 0 else expected
        options = dict(causal=causal, top_left=top_left, device=device)
        mask = BlockMask.sliding_window(*lengths, (left, right), num_global, random_block_size(), **options)
        assert_is(mask, expected)


def test_random_prefixes_and_spans(device: str) -> None:
    for _ in range(15):
        lengths, batch = (between(1, 400), between(1, 400)), between(1, 3)
        i, j = pairs(*lengths, device)
        prefix = torch.randint(0, 450, (batch,), device=device)
        expected = (j <= i + lengths[1] - lengths[0]) | (j < prefix[:, None, None])
        assert_is(BlockMask.prefix_lm(prefix, *lengths, random_block_size()), expected[:, None])
        seqlen = lengths[0]
        ends = torch.randint(0, seqlen + 1, (batch, 2 * between(0, 6))).sort().values.unflatten(1, (-1, 2))
        i, j = pairs(seqlen, seqlen, device)
        begin, end = ends.to(device)[..., None, None].unbind(2)
        expected = (j <= i) | ((i >= begin) & (i < end) & (j >= begin) & (j < end)).any(1)
        assert_is(BlockMask.bidirectional_spans(ends.to(device), seqlen, random_block_size()), expected[:, None])


def assert_is(mask: BlockMask, visible: Tensor) -> None:
    """That it shows this, and lists the blocks that a mask from the dense one does, full or not."""
    assert torch.equal(mask.to_dense(), visible if visible.dim() == 4 else visible[None, None])
    expected = BlockMask.from_dense(visible, mask.block_size)
    assert torch.equal(mask.offsets, expected.offsets)
    count = mask.num_blocks
    assert torch.equal(mask.indices[:count], expected.indices[:count])
    assert torch.equal(mask.bitmap_ids[:count] < 0, expected.bitmap_ids[:count] < 0)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
def test_windows_with_sinks(device: str, block_size: tuple[int, int], lengths: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = lengths
    i, j = pairs(*lengths, device)
    at = i + seqlen_k - seqlen_q
    for left, right, num_global, causal in [
        (3, 0, 4, False),
        (100, 50, 0, False),
        (9, 9, 70, False),
        (20, 3, 33, True),
    ]:
        expected = ((j >= at - left) & (j <= at + right)) | (j < num_global) | ((at >= 0) & (at < num_global))
        expected = expected & (j <= at) if causal or right == 0 else expected
        mask = BlockMask.sliding_window(*lengths, (left, right), num_global, block_size, causal=causal, device=device)
        assert_shows(mask, expected)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
def test_prefix(device: str, block_size: tuple[int, int], lengths: tuple[int, int]) -> None:
    i, j = pairs(*lengths, device)
    causal = j <= i + lengths[1] - lengths[0]
    assert_shows(BlockMask.prefix_lm(int32([50], device), *lengths, block_size), causal | (j < 50))
    prefix = int32([0, 17, 1000], device)
    expected = (causal | (j < prefix[:, None, None]))[:, None]
    assert_shows(BlockMask.prefix_lm(prefix, *lengths, block_size), expected)


@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
def test_bidirectional_spans(device: str, block_size: tuple[int, int]) -> None:
    i, j = pairs(300, 300, device)
    spans = [[[10, 60], [60, 61], [100, 290]], [[200, 230], [0, 5], [7, 7]]]
    expected = torch.stack([j <= i] * 2)
    for entry, of_entry in enumerate(spans):
        for begin, end in of_entry:
            expected[entry, begin:end, begin:end] = True
    mask = BlockMask.bidirectional_spans(torch.tensor(spans, device=device), 300, block_size)
    assert_shows(mask, expected[:, None])
    assert_shows(BlockMask.bidirectional_spans(torch.tensor(spans[1], device=device), 300, block_size), expected[1])
    assert_shows(
        BlockMask.bidirectional_spans(torch.zeros(0, 2, dtype=torch.int64, device=device), 300, block_size), j <= i
    )


@pytest.mark.parametrize("causal", [False, True])
def test_dilated_and_strided(device: str, causal: bool) -> None:
    lengths, block_size = (300, 410), (16, 32)
    row, column = pairs(19, 13, device)
    i, j = pairs(*lengths, device)
    below = (j <= i + 110) | (not causal)
    dilated = ((row - column).abs() % 3 == 0) & ((row - column).abs() <= 6)
    mask = BlockMask.dilated(*lengths, 2, 3, block_size, causal=causal, device=device)
    assert_shows(mask, whole_blocks(dilated, *lengths, block_size) & below)
    strided = ((row - column).abs() <= 1) | (column % 4 == 3)
    mask = BlockMask.strided(*lengths, 1, 4, block_size, causal=causal, device=device)
    assert_shows(mask, whole_blocks(strided, *lengths, block_size) & below)


def test_random(device: str) -> None:
    mask = BlockMask.random(300, 410, 5, 2, 3, (16, 32), device=device)
    assert mask.shape == (2, 3, 300, 410) and (mask.offsets.diff(dim=-1) == 5).all()
    again = [
        BlockMask.random(300, 410, 5, 2, 3, (16, 32), generator=torch.Generator(device).manual_seed(7), device=device)
        for _ in range(2)
    ]
    assert again[0] == again[1] != mask
    assert BlockMask.random(64, 64, 99, block_size=(16, 32), device=device).density == 1.0


def test_top_k(device: str) -> None:
    """Groups of tokens that point one way each."""
    ways = torch.eye(4, 8, device=device)
    k = ways.repeat_interleave(32, 0)[None, :, None].expand(2, -1, 2, -1)
    q = ways[[2, 0, 0, 3]].repeat_interleave(32, 0)[None, :, None].expand(2, -1, 4, -1)
    mask = BlockMask.top_k(q, k, 1, (32, 32))
    blocks = torch.eye(4, dtype=torch.bool, device=device)[[2, 0, 0, 3]]
    assert_shows(mask, whole_blocks(blocks, 128, 128, (32, 32)).expand(2, 4, -1, -1))
    i, j = pairs(128, 128, device)
    mask = BlockMask.top_k(q, k, 2, (32, 32), causal=True)
    assert bool((mask.to_dense() <= (j <= i)).all()) and bool(mask.to_dense().diagonal(dim1=2, dim2=3).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_top_k_shows_what_is_not_finite(device: str, value: float) -> None:
    q, k = torch.ones(1, 128, 1, 8, device=device), torch.ones(1, 128, 1, 8, device=device)
    k[0, 40] = value
    columns = BlockMask.top_k(q, k, 1, (32, 32)).to_dense()[0, 0, :, ::32]
    assert bool(columns[:, 1].all()) == (value != -torch.inf)  # -inf is the smallest product, and is chosen last
    assert bool(BlockMask.top_k(q, k, 4, (32, 32)).to_dense().all())
    causal = BlockMask.top_k(q, k, 1, (32, 32), causal=True).to_dense()
    assert bool(causal.diagonal(dim1=2, dim2=3).all())  # the block that the diagonal ends in stays the first choice
    if value != value:
        mask = BlockMask.top_k(q, k, 1, (32, 32))
        assert bool(flash_ext.attention(q, k, k, block_mask=mask).isnan().all())


def masks(device: str) -> list[BlockMask]:
    return [
        BlockMask.causal(130, 200, (32, 64), device=device),
        BlockMask.sliding_window(130, 200, (30, 30), block_size=(32, 64), device=device),
        BlockMask.from_blocks(torch.rand(1, 3, 5, 4, device=device) < 0.5, 130, 200, (32, 64)),
        BlockMask.from_dense(torch.rand(2, 1, 130, 200, device=device) < 0.5, (32, 64)),
    ]


def test_both_and_either(device: str) -> None:
    for first in masks(device):
        for second in masks(device):
            assert_shows(first & second, first.to_dense() & second.to_dense())
            assert_shows(first | second, first.to_dense() | second.to_dense())


def test_transpose(device: str) -> None:
    for mask in masks(device):
        assert_shows(mask.transpose(), mask.to_dense().transpose(2, 3))
        assert mask.transpose().transpose() == mask
        assert mask.transpose().block_size == (64, 32)
    with pytest.raises(ValueError, match=r"multiple of 32 queries, got block_size \(16, 32\)"):
        BlockMask.causal(64, 64, (16, 32)).transpose()


def test_to_flex_and_back(device: str) -> None:
    for mask in masks(device):
        flex = mask.to_flex()
        assert flex.BLOCK_SIZE == mask.block_size and tuple(flex.seq_lengths) == mask.shape[2:]
        assert BlockMask.from_flex(flex) == mask


def test_from_flex(device: str) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    i, j = pairs(300, 260, device)
    theirs = create_block_mask(lambda b, h, q, kv: (q >= kv) & (kv % 7 != h), 2, 3, 300, 260, device=device)
    head = torch.arange(3, device=device).view(3, 1, 1)
    expected = ((i >= j) & (j % 7 != head)).expand(2, 3, 300, 260)
    assert_shows(BlockMask.from_flex(theirs), expected)
    with pytest.raises(TypeError, match=r"block_mask must be a torch.nn.attention.flex_attention.BlockMask, got int 3"):
        BlockMask.from_flex(3)


def test_plot() -> None:
    shown = BlockMask.causal(96, 96, (32, 32)).plot()
    assert shown == "▒··\n█▒·\n██▒"
    with pytest.raises(ValueError, match="head must be below 3"):
        masks("cpu")[2].plot(head=3)


def test_errors() -> None:
    causal = BlockMask.causal(64, 64)
    for other in (BlockMask.causal(64, 96), BlockMask.causal(64, 64, (64, 64))):
        with pytest.raises(ValueError, match="masks must have one shape and block size"):
            causal & other
    with pytest.raises(TypeError):
        causal & 3
    wrong: list[tuple[str, Callable[[], BlockMask]]] = [
        (
            r"cu_seqlens must be int32 or int64 \(documents \+ 1\), got torch.float32",
            lambda: BlockMask.documents(torch.zeros(3), 4),
        ),
        (r"prefix must be integer \(batch\|1\)", lambda: BlockMask.prefix_lm(torch.zeros(2), 4, 4)),
        (r"spans must be integer \(num_spans, 2\)", lambda: BlockMask.bidirectional_spans(int32([1, 2], "cpu"), 4)),
        ("dilation must be >= 1, got 0", lambda: BlockMask.dilated(4, 4, 1, 0)),
        ("stride must be >= 1, got 0", lambda: BlockMask.strided(4, 4, 1, 0)),
        ("q and k must be", lambda: BlockMask.top_k(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 16), 1)),
        (
            "k must hold real numbers, got torch.complex64",
            lambda: BlockMask.top_k(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8, dtype=torch.complex64), 1),
        ),
        ("k must have heads that divide", lambda: BlockMask.top_k(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 2, 8), 1)),
    ]
    for message, build in wrong:
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.parametrize("bounds", [[2, 9, 4, 8], [0, 5, 30], [-2, 5]], ids=str)
def test_boundaries_of_documents_are_checked_on_a_cpu(bounds: list[int]) -> None:
    message = re.escape(f"cu_seqlens must ascend from 0 or above to at most seqlen = 10, got {bounds}")
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match=message):
            BlockMask.documents(torch.tensor(bounds, dtype=dtype), 10)
    BlockMask.documents(int32([2, 2, 4, 10], "cpu"), 10)


@pytest.mark.parametrize("spans", [[[0, 4], [2, 6]], [[2, 6], [0, 4]], [[-1, 2]], [[5, 9]], [[4, 2]]], ids=str)
def test_spans_are_checked_on_a_cpu(spans: list[list[int]]) -> None:
    message = "spans must begin and end within 0 and seqlen = 8 and not overlap, got "
    with pytest.raises(ValueError, match=f"{message}{re.escape(str(spans))} for batch entry 1"):
        BlockMask.bidirectional_spans(torch.tensor([[[0, 8], [3, 3]][: len(spans)], spans]), 8)
    BlockMask.bidirectional_spans(torch.tensor([[4, 8], [-1, -1], [0, 4]], dtype=torch.int16), 8)


def test_builders_do_not_wait_for_the_gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("a CPU waits for nothing")
    cu_seqlens, prefix = int32([0, 500, 900, 2000], device), int32([3, 700], device)
    spans, blocks = int32([[10, 300], [400, 1000]], device), torch.rand(1, 2, 16, 16, device=device) < 0.5
    q, k = (torch.randn(1, 2000, heads, 64, device=device) for heads in (4, 2))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole = BlockMask.from_blocks(blocks, 2000, 2000)
        causal = BlockMask.causal(2000, 2000, device=device)
        BlockMask.sliding_window(2000, 2000, (300, 0), 4, device=device)
        BlockMask.documents(cu_seqlens, 2000, causal=True)
        BlockMask.prefix_lm(prefix, 2000, 2000)
        BlockMask.bidirectional_spans(spans, 2000)
        BlockMask.dilated(2000, 2000, 2, 3, device=device)
        BlockMask.strided(2000, 2000, 2, 4, device=device)
        BlockMask.random(2000, 2000, 4, device=device)
        BlockMask.top_k(q, k, 4)
        whole & causal, whole | causal, causal.transpose(), whole.to_flex()
        causal & BlockMask.documents(cu_seqlens, 2000), causal | BlockMask.prefix_lm(prefix, 2000, 2000)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def lists_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room behind the last block, and bitmaps that are there twice: nobody waits to cut them."""
    for module in (intervals, lists):
        monkeypatch.setattr(module, "compacted", lambda made: made)
    monkeypatch.setattr(combination, "can_read", lambda x: False)


@pytest.mark.parametrize("most_bytes", [0, combination.MOST_BITMAP_BYTES])
def test_what_is_made_of_lists_with_room(device: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with bits in both of two masks get a bitmap each where there is room for that."""
    cut = masks(device)
    lists_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(combination, "MOST_BITMAP_BYTES", most_bytes)
    loose = masks(device)[:2] + [mask.transpose().transpose() for mask in cut[2:]]
    if device == "cpu":
        assert sum(len(mask.indices) > mask.num_blocks for mask in loose) > 1
    for mask, expected in zip(loose[:2], cut[:2], strict=True):
        assert mask == expected and mask.to_dense().equal(expected.to_dense())
    for first in loose:
        assert_shows(first.transpose(), first.to_dense().transpose(2, 3))
        for second in loose:
            assert_shows(first & second, first.to_dense() & second.to_dense())
            assert_shows(first | second, first.to_dense() | second.to_dense())


def test_blocks_that_share_a_bitmap_are_combined(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of blocks in which documents meet has many blocks with the same bits, which are stored once."""
    lists_as_on_a_gpu(monkeypatch)
    ends = ([300, 850, 1370, 1800], [290, 800, 1300, 1800])
    first, second = (BlockMask.documents(int32([0, *of_mask], device), 1800, (512, 32)) for of_mask in ends)
    assert all(int((mask.bitmap_ids[: mask.num_blocks] >= 0).sum()) > len(mask.bitmaps) for mask in (first, second))
    visible = first.to_dense(), second.to_dense()
    assert_shows(first & second, visible[0] & visible[1])
    assert_shows(first | second, visible[0] | visible[1])
    assert_shows((first | second) & second, visible[1])


def test_there_is_room_for_what_there_is(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for a band not much more."""
    lists_as_on_a_gpu(monkeypatch)
    for _ in range(50):
        lengths, top_left, causal = (between(1, 900), between(1, 900)), bool(between(0, 1)), bool(between(0, 1))
        window, num_global = (between(-1, 900), between(-1, 90)), between(0, 1) * between(0, 900)
        options = dict(causal=causal, top_left=top_left, device=device)
        mask = BlockMask.sliding_window(*lengths, window, num_global, random_block_size(), **options)
        assert mask.num_blocks <= len(mask.indices) == len(mask.bitmap_ids)
    band = BlockMask.sliding_window(8192, 8192, (256, 0), device=device)
    causal_mask = BlockMask.causal(8192, 8192, device=device)
    assert len(band.indices) < band.num_blocks + 2 * 64
    assert len(causal_mask.indices) < causal_mask.num_blocks + 2 * 64


def test_attention_by_builders_with_room(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lists_as_on_a_gpu(monkeypatch)
    q, k, v = (random(1, 300, 4, 64, device=device) for _ in range(3))
    cu_seqlens = int32([0, 100, 100, 260], device)
    for mask in (
        BlockMask.sliding_window(300, 300, (70, 0), 4, (64, 64), device=device),
        BlockMask.sliding_window(300, 300, (70, 20), 4, (128, 64), device=device),
        BlockMask.documents(cu_seqlens, 300, (64, 128)),
        BlockMask.documents(cu_seqlens, 300, (64, 64), causal=True).transpose(),
    ):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        out = flash_ext.attention(*inputs, block_mask=mask)
        expected = reference.attention(*inputs, reference.Options(mask=mask.to_dense()))[0]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        got, want = (torch.autograd.grad(result.square().sum(), inputs) for result in (out, expected))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_masks_of_a_deterministic_run(device: str) -> None:
    """No operator that they use is refused there."""
    torch.use_deterministic_algorithms(True)
    try:
        made = masks(device)
        BlockMask.documents(int32([0, 100, 260], device), 300, causal=True)
        BlockMask.bidirectional_spans(int32([[10, 60], [100, 290]], device), 300)
        BlockMask.strided(300, 300, 1, 4, causal=True, device=device)
        for mask in made:
            assert_shows(mask.transpose(), mask.to_dense().transpose(2, 3))
            assert_shows(mask & made[0], mask.to_dense() & made[0].to_dense())
    finally:
        torch.use_deterministic_algorithms(False)


def test_attention_by_lists_with_room(device: str) -> None:
    """Lists longer than what `offsets` say."""
    q, k, v = (random(1, n, 4, 64, device=device) for n in (300, 400, 400))
    blocks = torch.rand(1, 4, 3, 4, device=device) < 0.5
    mask = BlockMask.from_blocks(blocks, 300, 400)
    room = [torch.cat([t, t.new_full((50,), 10**6)]) for t in (mask.indices, mask.bitmap_ids)]
    loose = BlockMask(mask.offsets, *room, mask.bitmaps, 300, 400)
    expected = reference.attention(q, k, v, reference.Options(mask=mask.to_dense()))[0]
    torch.testing.assert_close(flash_ext.attention(q, k, v, block_mask=loose), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", ["window", "dilated", "strided", "top_k", "transpose", "both"])
def test_builders_compile_in_one_graph(device: str, pattern: str) -> None:
    """Their lists have shapes that the compiler knows."""
    torch._dynamo.reset()  # what it compiled for other parameters counts towards its limit
    size = (300, 300)
    patterns: dict[str, Callable[[Tensor], BlockMask]] = {
        "window": lambda x: BlockMask.sliding_window(*size, (70, 3), 5, (64, 64), device=device),
        "dilated": lambda x: BlockMask.dilated(*size, 1, 2, (64, 64), causal=True, device=device),
        "strided": lambda x: BlockMask.strided(*size, 1, 2, (64, 64), causal=True, device=device),
        "top_k": lambda x: BlockMask.top_k(x, x, 2, (64, 64), causal=True),
        "transpose": lambda x: BlockMask.causal(*size, (64, 64), device=device).transpose(),
        "both": lambda x: patterns["window"](x) & patterns["strided"](x),
    }
    build = patterns[pattern]
    x = random(1, 300, 2, 16, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(x: Tensor) -> Tensor:
        return flash_ext.attention(x, x, x, block_mask=build(x))

    expected = flash_ext.attention(x, x, x, mask=build(x).to_dense())
    torch.testing.assert_close(attend(x), expected, rtol=1e-4, atol=1e-5)
