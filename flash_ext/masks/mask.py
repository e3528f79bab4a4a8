"""The tensors and sizes of a ``BlockMask``, which builders make and operations read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_ext.argument_checks import as_integer, as_pair, as_size
from flash_ext.masks.intervals import Blocks
from flash_ext.masks.lists import Lists, ceil_div, grid_of_lists

if TYPE_CHECKING:
    from typing_extensions import Self


MAX_BLOCK = 2**20  # rows and keys of a block, for which operators take a mask


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """What ``BlockMask`` documents."""

    offsets: Tensor
    indices: Tensor
    bitmap_ids: Tensor
    bitmaps: Tensor
    seqlen_q: int
    seqlen_k: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.offsets, self.indices, self.bitmap_ids, self.bitmaps

    @property
    def block_size(self) -> tuple[int, int]:
        """(block_m, block_n)."""
        return self.bitmaps.shape[1], self.bitmaps.shape[2] * 32

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.offsets.shape[0], self.offsets.shape[1], self.seqlen_q, self.seqlen_k

    @classmethod
    def _of_lists(cls, lists: Lists, seqlen_q: int, seqlen_k: int) -> Self:
        return cls(*lists, seqlen_q=seqlen_q, seqlen_k=seqlen_k)

    def _grid(self) -> Tensor:
        """int32 (batch|1, heads_q|1, rows, columns): see ``flash_ext.masks.lists``."""
        return grid_of_lists(self.offsets, self.indices, self.bitmap_ids, ceil_div(self.seqlen_k, self.block_size[1]))


def as_blocks(seqlen_q: Any, seqlen_k: Any, block_size: Any) -> Blocks:
    """The grid of blocks, of checked sizes."""
    block_m, block_n = as_block_size(block_size)
    return Blocks(as_size("seqlen_q", seqlen_q), as_size("seqlen_k", seqlen_k), block_m, block_n)


def as_block_size(block_size: Any) -> tuple[int, int]:
    block_m, block_n = as_pair("block_size", "(rows, keys)", block_size)
    block_m, block_n = as_integer("block_size[0]", block_m), as_integer("block_size[1]", block_n)
    if not 1 <= block_m <= MAX_BLOCK or not 32 <= block_n <= MAX_BLOCK or block_n % 32 != 0:
        raise ValueError(
            f"block_size must be (rows from 1 to {MAX_BLOCK}, keys a multiple of 32 up to {MAX_BLOCK}), "
            f"got {(block_m, block_n)}"
        )
    return block_m, block_n


def is_integer(tensor: Tensor) -> bool:
    return not (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex())
