"""Bitmaps of blocks: int32 (n, block_m, block_n / 32), bit b of word w is key 32 w + b."""

from __future__ import annotations

import torch
from torch import Tensor


def no_bitmaps(block_size: tuple[int, int], like: Tensor) -> Tensor:
    return like.new_empty((0, block_size[0], block_size[1] // 32), dtype=torch.int32)


def pack_bits(blocks: Tensor) -> Tensor:
    """bool (n, block_m, block_n) as int32 (n, block_m, block_n / 32)."""
    words = blocks.unflatten(-1, (blocks.shape[-1] // 32, 32))
    return (words.int() << bits_of(blocks)).sum(-1, dtype=torch.int32)


def unpack_bits(bitmaps: Tensor) -> Tensor:
    """The reverse: bool (n, block_m, block_n)."""
    return ((bitmaps[..., None] >> bits_of(bitmaps)) & 1).bool().flatten(-2)


def bits_of(like: Tensor) -> Tensor:
    """0 to 31, int32."""
    return torch.arange(32, dtype=torch.int32, device=like.device)
