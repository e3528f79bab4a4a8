"""Block-sparse visibility through its four tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_ext
from tests import reference
from tests.oracle import (
    FLOATS,
    Call,
    assert_alike,
    assert_matches_oracle,
    cumulative,
    int32,
    make_call,
    make_varlen_call,
    random,
    random_rng,
    run_library,
)

SEQLEN_Q, SEQLEN_K = 100, 170
NAMES = ("block_offsets", "block_indices", "block_bitmap_ids", "block_bitmaps")


def random_blocks(batch: int, heads: int, block_m: int, block_n: int, device: str = "cpu") -> torch.Tensor:
    """A visibility of whole, partial and missing blocks, (batch, heads, SEQLEN_Q, SEQLEN_K)."""
    rows, cols = -(-SEQLEN_Q // block_m), -(-SEQLEN_K // block_n)
    kind = torch.randint(0, 3, (batch, heads, rows, cols), device=device)
    kind = kind.repeat_interleave(block_m, 2).repeat_interleave(block_n, 3)[:, :, :SEQLEN_Q, :SEQLEN_K]
    return (kind == 2) | ((kind == 1) & (torch.rand(kind.shape, device=device) < 0.5))


def blocked(call: Call, see: torch.Tensor, block_m: int, block_n: int) -> Call:
    tensors = reference.block_mask_tensors(see, block_m, block_n)
    call = call.with_options(block_mask=flash_ext.BlockMask(*tensors, seqlen_q=see.shape[2], seqlen_k=see.shape[3]))
    call.block_visible = see
    return call


def make_blocked(
    device: str, dtype: torch.dtype, batch: int = 2, heads: int = 4, block: tuple[int, int] = (32, 64), **options: Any
) -> Call:
    see = random_blocks(batch, heads, *block, device)
    return blocked(make_call(2, SEQLEN_Q, SEQLEN_K, dtype=dtype, device=device, **options), see, *block)


@pytest.mark.parametrize("block", [(16, 32), (32, 64), (64, 64), (128, 128), (64, 256), (1, 32)], ids=str)
def test_the_oracle_packs_what_it_unpacks(block: tuple[int, int]) -> None:
    see = random_blocks(2, 3, *block)
    tensors = reference.block_mask_tensors(see, *block)
    assert torch.equal(reference.block_mask_visible(tensors, SEQLEN_Q, SEQLEN_K), see)


@pytest.mark.parametrize("block", [(1, 32), (20, 32), (33, 64), (100, 96)], ids=str)
def test_dropout_beside_blocks_of_odd_sizes(device: str, dtype: torch.dtype, block: tuple[int, int]) -> None:
    """Random bits are drawn for eight rows at a time, which these blocks cut through."""
    call = make_blocked(device, dtype, block=block, dropout_p=0.3, rng_state=random_rng(device))
    assert_matches_oracle(call)


@pytest.mark.parametrize("block", [(16, 32), (32, 64), (64, 64), (128, 128), (64, 256)], ids=str)
def test_block_sizes(device: str, dtype: torch.dtype, block: tuple[int, int]) -> None:
    assert_matches_oracle(make_blocked(device, dtype, block=block))


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (40, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("block", [(128, 128), (256, 128), (128, 256), (128, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_blocks_of_whole_tiles(
    device: str, heads: int, block: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    """Several tiles, the last one of which is cut, rows and columns without any block, heads that share keys."""
    seqlen_q, seqlen_k = 450, 700
    rows, cols = -(-seqlen_q // block[0]), -(-seqlen_k // block[1])
    kind = torch.randint(0, 3, (1, heads, rows, cols), device=device)
    kind[:, :, rows // 2] = kind[..., cols // 2] = 0
    kind = kind.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, :seqlen_q, :seqlen_k]
    see = (kind == 2) | ((kind == 1) & (torch.rand(kind.shape, device=device) < 0.5))
    call = make_call(1, seqlen_q, seqlen_k, 4, 2, head_dim, device=device, dtype=dtype, sink=random(4, device=device))
    assert_matches_oracle(blocked(call, see, *block))


def test_rows_of_many_blocks(device: str) -> None:
    """More than a warp looks at in one go, on both sides."""
    for seqlen_q, seqlen_k in ((130, 4800), (4800, 130)):
        see = torch.rand(1, 1, -(-seqlen_q // 128), -(-seqlen_k // 128), device=device) < 0.9
        see = see.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seqlen_q, :seqlen_k].clone()
        see[..., :7, 200:300] = False
        assert_matches_oracle(
            blocked(make_call(1, seqlen_q, seqlen_k, 2, 1, 64, device=device, dtype=torch.bfloat16), see, 128, 128)
        )


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("block", [(96, 96), (16, 32), (200, 32), (48, 160), (64, 96), (1, 32)], ids=str)
def test_few_blocks_of_odd_sizes(device: str, block: tuple[int, int], heads: int) -> None:
    """Many more pairs than the lists keep, and tiles of kernels that hold parts of several blocks."""
    seqlen_q, seqlen_k = 230, 420
    row = torch.arange(seqlen_q, device=device)[:, None] // block[0]
    key = torch.arange(seqlen_k, device=device) // block[1]
    head = torch.arange(heads, device=device).view(1, -1, 1, 1)
    see = (row * block[0] // block[1] == key + head) | (key == 2)
    see &= (torch.rand(see.shape, device=device) < 0.9) | (key % 2 == 0)
    call = make_call(2, seqlen_q, seqlen_k, dtype=torch.bfloat16, device=device)
    assert_matches_oracle(blocked(call, see, *block))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    assert_matches_oracle(make_blocked(device, dtype, causal=True))


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_lists_broadcast_over_batch_and_heads(device: str, dtype: torch.dtype, batch: int, heads: int) -> None:
    assert_matches_oracle(make_blocked(device, dtype, batch, heads))


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": True, "top_left": True}, {"window_size": (60, 20)}], ids=str
)
def test_with_a_window(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert_matches_oracle(make_blocked(device, dtype, **options))


def test_with_every_other_option(device: str, dtype: torch.dtype) -> None:
    options = {
        "mask": torch.rand(2, 1, SEQLEN_Q, SEQLEN_K, device=device) < 0.8,
        "bias": random(1, 4, SEQLEN_Q, SEQLEN_K, device=device),
        "sink": random(4, device=device),
        "alibi_slopes": torch.rand(4, device=device),
        "softcap": 3.0,
        "dropout_p": 0.2,
        "rng_state": random_rng(device),
    }
    assert_matches_oracle(make_blocked(device, dtype, **options))


@pytest.mark.parametrize("block", [(48, 96), (1, 32), (96, 64)], ids=str)
def test_blocks_of_odd_sizes_beside_a_mask(device: str, dtype: torch.dtype, block: tuple[int, int]) -> None:
    mask = torch.rand(2, 1, SEQLEN_Q, SEQLEN_K, device=device) < 0.8
    assert_matches_oracle(make_blocked(device, dtype, block=block, mask=mask))


def test_with_lengths_in_use(device: str, dtype: torch.dtype) -> None:
    used = {"seqused_q": int32([100, 33], device), "seqused_k": int32([65, 170], device)}
    assert_matches_oracle(make_blocked(device, dtype, **used, causal=True))


def test_packed_sequences(device: str, dtype: torch.dtype) -> None:
    """Blocks count rows and keys from the start of each sequence."""
    call = make_varlen_call([100, 0, 37], [170, 4, 64], device, causal=True, dtype=dtype)
    assert_matches_oracle(blocked(call, random_blocks(3, 4, 32, 64, device), 32, 64))


@pytest.mark.parametrize("lists", [1, 3])
def test_packed_sequences_of_several_tiles(device: str, dtype: torch.dtype, lists: int) -> None:
    """With lists that all sequences share, and with lists of each."""
    call = make_varlen_call([300, 17, 150], [400, 90, 260], device, dtype=dtype)
    see = (torch.rand(lists, 1, 3, 4, device=device) < 0.6).repeat_interleave(128, 2).repeat_interleave(128, 3)
    see = see[:, :, :300, :400].clone()
    see[..., 130:140, 200:210] = False
    assert_matches_oracle(blocked(call, see, 128, 128))


def test_packed_sequences_of_a_mask_for_more_keys(device: str, dtype: torch.dtype) -> None:
    """Lists may name blocks that no sequence reaches, in the forward, the backward and the weights alike."""
    lengths = [40, 20]
    cu = cumulative(lengths, device)
    options: dict[str, Any] = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=1000, max_seqlen_k=60)
    q, k, v = (random(60, 2, 16, dtype=dtype, device=device).requires_grad_() for _ in range(3))
    mask = flash_ext.BlockMask.sliding_window(1000, 1000, (10, 300), block_size=(32, 32), top_left=True, device=device)
    found = flash_ext.attention(q, k, v, return_lse=True, block_mask=mask, **options)
    weights = flash_ext.attention_weights(q, k, found[1].detach(), block_mask=mask, **options)
    expected = flash_ext.attention(q, k, v, return_lse=True, window_size=(10, 300), top_left=True, **options)
    wanted = flash_ext.attention_weights(q, k, expected[1].detach(), window_size=(10, 300), top_left=True, **options)
    for ours, theirs in zip((*found, weights), (*expected, wanted), strict=True):
        torch.testing.assert_close(ours, theirs)
        grad = torch.randn_like(ours)
        found_grads = torch.autograd.grad(ours, (q, k), grad, retain_graph=True)
        expected_grads = torch.autograd.grad(theirs, (q, k), grad, retain_graph=True)
        torch.testing.assert_close(found_grads, expected_grads)


def test_packed_sequences_still_have_their_lists_checked() -> None:
    cu, mask = cumulative([40, 20], "cpu"), flash_ext.BlockMask.causal(96, 96, (32, 32))
    x = random(60, 2, 16)
    for entry, value, message in ((1, -1, "is -1"), (1, 2**26, r"below ceil\(\(2\^31 - 1\) / block_n\) = 67108864")):
        mask.indices[entry] = value
        with pytest.raises(RuntimeError, match=rf"block_indices must ascend within a row.*{message}"):
            flash_ext.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, block_mask=mask)


def test_rows_without_blocks(device: str, dtype: torch.dtype) -> None:
    see = random_blocks(1, 1, 32, 64, device)
    see[:, :, 32:64] = False
    result = assert_matches_oracle(blocked(make_call(2, SEQLEN_Q, SEQLEN_K, dtype=dtype, device=device), see, 32, 64))
    assert (result["out"][:, 32:64] == 0).all() and torch.isneginf(result["lse"][:, :, 32:64]).all()


@pytest.mark.parametrize("visible", [False, True])
def test_no_bitmaps_at_all(device: str, dtype: torch.dtype, visible: bool) -> None:
    """Full blocks only, or no blocks; the block size comes from the shape of the empty bitmaps."""
    see = torch.full((1, 1, SEQLEN_Q, SEQLEN_K), visible, device=device)
    call = make_call(2, SEQLEN_Q, SEQLEN_K, dtype=dtype, device=device)
    result = assert_matches_oracle(blocked(call, see, 32, 64))
    if visible:
        assert_alike(result["out"], run_library(call)["out"])


def test_blocks_that_nobody_lists_may_hold_nan(device: str, dtype: torch.dtype) -> None:
    see = random_blocks(1, 1, 32, 64, device)
    see[..., 64:128] = False
    call = blocked(make_call(2, SEQLEN_Q, SEQLEN_K, dtype=dtype, device=device), see, 32, 64)
    call.k[:, 64:128] = call.v[:, 64:128] = torch.nan
    assert_matches_oracle(call)


def forward_op(call: Call, **overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.ops.flash_ext.attention_forward, with everything absent that is not named."""
    op = torch.ops.flash_ext.attention_forward
    arguments: dict[str, Any] = dict.fromkeys(a.name for a in op.default._schema.arguments)
    arguments |= dict(q=call.q, k=call.k, v=call.v, max_seqlen_q=call.q.shape[1], max_seqlen_k=call.k.shape[1])
    arguments |= dict(softmax_scale=32**-0.5, softcap=0.0, window_left=-1, window_right=-1, top_left=False)
    return op(**{**arguments, "dropout_p": 0.0, "allow_tf32": False, **overrides})


def test_the_four_tensors_by_themselves(device: str, dtype: torch.dtype) -> None:
    see = random_blocks(2, 4, 32, 64, device)
    call = blocked(make_call(2, SEQLEN_Q, SEQLEN_K, dtype=dtype, device=device), see, 32, 64)
    tensors = dict(zip(NAMES, reference.block_mask_tensors(see, 32, 64), strict=True))
    expected = run_library(call)
    out, lse = forward_op(call, **tensors)
    assert torch.equal(out, expected["out"]) and torch.equal(lse, expected["lse"])


@pytest.mark.parametrize("missing", NAMES)
def test_all_four_tensors_or_none(device: str, dtype: torch.dtype, missing: str) -> None:
    call = make_call(2, SEQLEN_Q, SEQLEN_K, dtype=dtype, device=device)
    tensors = dict(zip(NAMES, reference.block_mask_tensors(random_blocks(1, 1, 32, 64, device), 32, 64), strict=True))
    with pytest.raises(RuntimeError, match="block_"):
        forward_op(call, **{**tensors, missing: None})


def test_unused_entries_of_lists_may_lie_between_rows(device: str, dtype: torch.dtype) -> None:
    """Offsets are global: heads may share lists, in any order."""
    see = random_blocks(1, 1, 32, 64, device)
    offsets, *rest = reference.block_mask_tensors(see, 32, 64)
    shared = offsets.expand(2, 4, -1)
    call = make_call(2, SEQLEN_Q, SEQLEN_K, dtype=dtype, device=device)
    out, _ = forward_op(call, **dict(zip(NAMES, (shared, *rest), strict=True)))
    assert torch.equal(out, forward_op(call, **dict(zip(NAMES, (offsets, *rest), strict=True)))[0])
