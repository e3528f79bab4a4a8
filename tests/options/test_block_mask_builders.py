"""``BlockMask``: its builders against dense masks, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import BlockMask
from tests import reference
from tests.options.test_block_mask_patterns import assert_shows
from tests.oracle import random

BLOCKS = [(16, 32), (64, 64), (1, 32), (128, 128), (5, 96)]
LENGTHS = [(40, 70), (64, 64), (1, 1), (130, 33), (7, 257)]


def indices(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    return torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None]


def assert_lists(block_mask: BlockMask, visible: Tensor) -> None:
    """What it shows, and that blocks are listed as the kernels want them."""
    assert_shows(block_mask, visible)
    visible = visible if visible.dim() == 4 else visible[None, None]
    expected = reference.block_mask_tensors(visible, *block_mask.block_size)
    for got, want in zip(block_mask.tensors[:2], expected[:2], strict=True):
        assert torch.equal(got, want)
    assert torch.equal(block_mask.bitmap_ids < 0, expected[2] < 0)
    assert len(block_mask.bitmaps) == len(torch.unique(block_mask.bitmaps, dim=0))
    # Bits behind the last query and key say nothing: blocks there may share a bitmap with others.
    assert len(block_mask.bitmaps) <= len(torch.unique(expected[3], dim=0))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.6, 1.0])
def test_from_dense(lengths: tuple[int, int], block_size: tuple[int, int], density: float) -> None:
    visible = torch.rand(2, 3, *lengths) < density
    block_mask = BlockMask.from_dense(visible, block_size)
    assert block_mask.block_size == block_size
    assert_lists(block_mask, visible)
    assert_lists(BlockMask.from_dense(visible[0, 0], block_size), visible[0, 0])


def test_every_bit_of_a_word() -> None:
    visible = torch.eye(64, dtype=torch.bool)
    assert_lists(BlockMask.from_dense(visible, (64, 64)), visible)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("block_size", BLOCKS, ids=str)
def test_from_blocks(lengths: tuple[int, int], block_size: tuple[int, int]) -> None:
    rows, cols = (-(-n // size) for n, size in zip(lengths, block_size, strict=True))
    blocks = torch.rand(2, 3, rows, cols) < 0.5
    block_mask = BlockMask.from_blocks(blocks, *lengths, block_size)
    dense = blocks.repeat_interleave(block_size[0], 2).repeat_interleave(block_size[1], 3)
    assert_lists(block_mask, dense[..., : lengths[0], : lengths[1]])
    assert len(block_mask.bitmaps) == 0
    assert block_mask.density == pytest.approx(blocks.float().mean().item())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("block_size", BLOCKS[:2], ids=str)
def test_causal(lengths: tuple[int, int], top_left: bool, block_size: tuple[int, int]) -> None:
    options = reference.Options(causal=True, top_left=top_left)
    assert_lists(BlockMask.causal(*lengths, block_size, top_left=top_left), reference.visible(*lengths, options))


def test_diagonal_blocks_share_a_bitmap() -> None:
    block_mask = BlockMask.causal(1024, 1024, (64, 64))
    assert len(block_mask.bitmaps) == 1
    assert block_mask.density == pytest.approx(17 / 32)


@pytest.mark.parametrize("window_size", [(3, 0), (0, 5), (-1, 2), (20, -1), (-1, -1), (4, 4)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS[:3], ids=str)
def test_sliding_window(window_size: tuple[int, int], lengths: tuple[int, int]) -> None:
    for top_left in (False, True):
        options = reference.Options(window_size=window_size, top_left=top_left)
        block_mask = BlockMask.sliding_window(*lengths, window_size, block_size=(16, 32), top_left=top_left)
        assert_lists(block_mask, reference.visible(*lengths, options))


def test_global_tokens_see_and_are_seen() -> None:
    i, j = indices(50, 50)
    expected = ((i - j).abs() <= 4) | (i < 3) | (j < 3)
    assert_lists(BlockMask.sliding_window(50, 50, (4, 4), 3, (16, 32)), expected)
    assert_lists(BlockMask.sliding_window(50, 50, (4, 4), 3, (16, 32), causal=True), expected & (j <= i))


def test_attention_sinks_beside_a_causal_window() -> None:
    i, j = indices(20, 50)
    expected = (j <= i + 30) & ((j >= i + 30 - 4) | (j < 3))
    assert_lists(BlockMask.sliding_window(20, 50, (4, 0), 3, (16, 32)), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal: bool) -> None:
    ids = torch.tensor([[0] * 20 + [1] * 37 + [-1] * 13, [5] * 40 + [2] * 30])
    i, j = indices(70, 70)
    expected = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None] & ((j <= i) | (not causal))
    assert_lists(BlockMask.document(ids, block_size=(16, 32), causal=causal), expected[:, None])
    assert_lists(BlockMask.document(ids[1], block_size=(16, 32), causal=causal), expected[1])


@pytest.mark.parametrize("causal", [False, True])
def test_documents_of_queries_and_keys(causal: bool) -> None:
    """The diagonal ends at the last query and the last key."""
    ids_q, ids_k = torch.randint(-1, 4, (2, 30)), torch.randint(-1, 4, (2, 45))
    i, j = indices(30, 45)
    expected = (ids_q[:, :, None] == ids_k[:, None]) & (ids_q >= 0)[:, :, None] & ((j <= i + 15) | (not causal))
    assert_lists(BlockMask.document(ids_q, ids_k, (16, 32), causal=causal), expected[:, None])


def test_a_causal_window_has_no_right_side() -> None:
    """Whatever it was given, and not for global tokens either."""
    i, j = indices(50, 70)
    expected = ((j >= i + 20 - 3) | (j < 2) | (i + 20 < 2)) & (j <= i + 20)
    assert_lists(BlockMask.sliding_window(50, 70, (3, 5), 2, (16, 32), causal=True), expected)


def test_from_mask_mod() -> None:
    slopes = torch.tensor([1, 2, 5])
    block_mask = BlockMask.from_mask_mod(lambda b, h, i, j: (j * slopes[h] <= i + b) & (j != 3), 50, 70, 2, 3, (16, 32))
    b, h, i, j = (
        torch.arange(n).view(shape) for n, shape in [(2, (2, 1, 1, 1)), (3, (3, 1, 1)), (50, (50, 1)), (70, (70,))]
    )
    assert_lists(block_mask, (j * slopes[h] <= i + b) & (j != 3))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(lengths: tuple[int, int]) -> None:
    block_mask = BlockMask.causal(*lengths)
    assert block_mask.to_dense().shape == (1, 1, *lengths)
    assert block_mask.density == 0.0
    assert len(block_mask.indices) == 0


def test_to_device(device: str) -> None:
    block_mask = BlockMask.causal(40, 50, (16, 32)).to(device)
    assert all(t.device.type == device for t in block_mask.tensors)
    assert BlockMask.causal(40, 50, (16, 32), device=device).offsets.device.type == device
    assert block_mask.to_dense().device.type == device


def test_on_the_host_and_on_a_gpu(device: str) -> None:
    mask = BlockMask.causal(100, 70)
    there = mask.cuda() if device == "cuda" else mask.to(device)
    assert {t.device.type for t in there.tensors} == {device}
    assert {t.device.type for t in there.cpu().tensors} == {"cpu"}
    assert there == mask and mask == there and hash(there) == hash(mask)


def test_equality_is_of_what_is_visible() -> None:
    """However it is written: with a bitmap for a full block, with a block that shows nothing, in lists with gaps."""
    visible = torch.rand(2, 3, 70, 100) < 0.5
    visible[:, :, :32, :64] = True
    visible[:, :, 32:64, :32] = False
    mask = BlockMask.from_dense(visible, (32, 32))
    assert mask == BlockMask.from_dense(visible, (32, 32)) and not mask != BlockMask.from_dense(visible, (32, 32))
    offsets, indices, ids, bitmaps = (t.clone() for t in mask.tensors)
    full = torch.full((1, 32, 1), -1, dtype=torch.int32)
    written_out = BlockMask(
        torch.arange(0, 2 * 3 * 12 + 1, 4, dtype=torch.int32).unfold(0, 4, 3).reshape(2, 3, 4),
        torch.arange(4, dtype=torch.int32).repeat(18),
        torch.arange(18 * 4, dtype=torch.int32),
        _bitmaps_of_all_blocks(visible),
        70,
        100,
    )
    assert torch.equal(written_out.to_dense(), visible) and written_out == mask and hash(written_out) == hash(mask)
    shifted = BlockMask(
        offsets + 1, *(torch.cat([t[:1], t]) for t in (indices, ids)), torch.cat([bitmaps, full]), 70, 100
    )
    assert shifted == mask
    for changed in (visible.clone(), visible[:1], visible[..., :99]):
        if changed.shape == visible.shape:
            changed[1, 2, 69, 99] ^= True
        assert BlockMask.from_dense(changed, (32, 32)) != mask
    for block_size in ((32, 64), (16, 32)):
        assert BlockMask.from_dense(visible, block_size) != mask
    assert BlockMask.from_dense(visible, (64, 32)) != mask and mask != "a mask"


def _bitmaps_of_all_blocks(visible: Tensor) -> Tensor:
    """int32 (blocks, 32, 1) of blocks of 32 x 32, every bit beyond the lengths set."""
    padded = torch.nn.functional.pad(visible, (0, 28, 0, 26), value=True)
    blocks = padded.unflatten(3, (4, 32)).unflatten(2, (3, 32)).transpose(3, 4).reshape(-1, 32, 1, 32)
    words = (blocks.long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def test_usable_as_a_key() -> None:
    masks = {BlockMask.causal(64, 64): "causal", BlockMask.causal(64, 96): "longer"}
    assert masks[BlockMask.causal(64, 64)] == "causal" and len(masks) == 2


def test_repr_of_what_has_no_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    line = "BlockMask(shape=(1, 1, 100, 100), block_size=(32, 32), device='{}')"
    assert repr(BlockMask.causal(100, 100, (32, 32)).to("meta")) == line.format("meta")
    with FakeTensorMode():
        made = [BlockMask.causal(100, 100, (32, 32)), BlockMask.causal(100, 100, (32, 32)).transpose()]
    assert [repr(mask) for mask in made] == 2 * [line.format("cpu")]


def test_repr_is_a_line() -> None:
    mask = BlockMask.causal(1024, 1024)
    shown = "BlockMask(shape=(1, 1, 1024, 1024), block_size=(128, 128), blocks=36, density=0.562, device='cpu')"
    assert repr(mask) == shown
    assert repr(BlockMask.causal(0, 0)).startswith("BlockMask(shape=(1, 1, 0, 0)")


def test_attention_with_a_built_mask(device: str) -> None:
    q, k, v = (random(2, n, 4, 16, device=device) for n in (100, 150, 150))
    block_mask = BlockMask.sliding_window(100, 150, (20, 0), 4, (16, 32), device=device)
    expected = reference.attention(q, k, v, reference.Options(mask=block_mask.to_dense()))[0]
    torch.testing.assert_close(flash_ext.attention(q, k, v, block_mask=block_mask), expected, rtol=1e-4, atol=1e-5)


def test_errors() -> None:
    for block_size in [(0, 32), (16, 48), (16, 0), (16, 16), (2**20 + 1, 32), (16, 2**20 + 32)]:
        with pytest.raises(ValueError, match="block_size must be"):
            BlockMask.causal(8, 8, block_size)
    with pytest.raises(ValueError, match="visible must be bool"):
        BlockMask.from_dense(torch.ones(3, 4))
    with pytest.raises(ValueError, match="visible must be bool"):
        BlockMask.from_dense(torch.ones(2, 3, 4).bool())
    with pytest.raises(ValueError, match=r"blocks must be bool \(3, 2\)"):
        BlockMask.from_blocks(torch.ones(2, 3).bool(), 40, 64, (16, 32))
    with pytest.raises(ValueError, match="ids_k must be integer"):
        BlockMask.document(torch.zeros(3).int(), torch.zeros(3))
    with pytest.raises(ValueError, match="ids_q and ids_k"):
        BlockMask.document(torch.zeros(2, 3).int(), torch.zeros(4).int())


def test_the_largest_blocks(device: str) -> None:
    """Their memory is that of the blocks that there are. Torch's own mask of nothing has larger ones."""
    from torch.nn.attention.flex_attention import _create_empty_block_mask

    q = torch.randn(1, 5, 1, 8, device=device)
    mask = BlockMask.causal(5, 5, (2**20, 32), device=device)
    torch.testing.assert_close(flash_ext.attention(q, q, q, block_mask=mask), flash_ext.attention(q, q, q, causal=True))
    with pytest.raises(ValueError, match=r"^block_size must be .* up to 1048576\), got \(1073741824, 1073741824\)"):
        BlockMask.from_flex(_create_empty_block_mask(q.transpose(1, 2), q.transpose(1, 2)))


@pytest.mark.parametrize("window_size", [(-5, -5), (-2, 0), (0, -2)], ids=str)
def test_only_minus_one_is_unlimited(window_size: tuple[int, int]) -> None:
    """As for ``attention``, which refuses the rest too."""
    q = torch.zeros(1, 64, 1, 8)
    for causal in (False, True):
        with pytest.raises(ValueError, match=r"window_size must .*\(-1 = unlimited\), got"):
            BlockMask.sliding_window(64, 64, window_size, causal=causal)
        with pytest.raises(RuntimeError, match=r"window_size\[.\].* must be >= -1 \(-1 = unlimited\), got -"):
            flash_ext.attention(q, q, q, window_size=window_size, causal=causal)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (True, TypeError, "mask_mod must return a bool Tensor, got bool True"),
        (1.0, TypeError, "mask_mod must return a bool Tensor, got float 1.0"),
        (torch.ones(64, 64), ValueError, r"mask_mod must return a bool Tensor .* got torch.float32"),
        (torch.ones(64, 3, dtype=torch.bool), ValueError, r"= \(1, 1, 64, 64\), got torch.bool \(64, 3\)"),
        (torch.ones(1, 1, 1, 64, 64, dtype=torch.bool), ValueError, r"mask_mod must .* got torch.bool \(1, 1, 1, 64"),
        (torch.ones(64, 64, dtype=torch.bool, device="meta"), ValueError, "mask_mod must .* on cpu .* on meta"),
    ],
    ids=["bool", "float", "float tensor", "shape", "dimensions", "device"],
)
def test_predicates_that_do_not_say_what_is_visible(result: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlockMask.from_mask_mod(lambda b, h, i, j: result, 64, 64)
