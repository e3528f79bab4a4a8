"""Conversion to and from the block masks of ``torch.nn.attention.flex_attention``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_ext.argument_checks import describe
from flash_ext.masks.bitmaps import no_bitmaps, pack_bits
from flash_ext.masks.intervals import Blocks
from flash_ext.masks.lists import FULL, HIDDEN, Lists, lists_of_grid
from flash_ext.masks.mask import Mask, as_block_size

if TYPE_CHECKING:
    from typing_extensions import Self


class FlexConversions(Mask):
    def to_flex(self) -> Any:
        """The mask for ``torch.nn.attention.flex_attention``: its ``BlockMask``, whose mask_mod looks up bitmaps."""
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        grid = self._grid()
        return FlexBlockMask.from_kv_blocks(
            *_columns_of(grid >= 0),
            *_columns_of(grid == FULL),
            BLOCK_SIZE=self.block_size,
            mask_mod=_mask_mod(grid, self.bitmaps),
            seq_lengths=(self.seqlen_q, self.seqlen_k),
        )

    @classmethod
    def from_flex(cls, block_mask: Any) -> Self:
        """From a ``BlockMask`` of ``torch.nn.attention.flex_attention``.

        Args:
            block_mask: that one. Its mask_mod is evaluated where blocks are partial, as for ``from_mask_mod``; the host
                waits for how many those are.

        Returns:
            A ``BlockMask`` on its device.

        Raises:
            TypeError: block_mask is none of these.
            ValueError: its blocks are not of a multiple of 32 keys, or have more than 2^20 queries or keys.
        """
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        if not isinstance(block_mask, FlexBlockMask):
            raise TypeError(
                f"block_mask must be a torch.nn.attention.flex_attention.BlockMask, got {describe(block_mask)}"
            )
        blocks = Blocks(*block_mask.seq_lengths, *as_block_size(block_mask.BLOCK_SIZE))
        return cls._of_lists(_lists_of_flex(block_mask, blocks), blocks.seqlen_q, blocks.seqlen_k)


def _columns_of(seen: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns each row sees, and these, and then the others."""
    return seen.sum(-1, dtype=torch.int32), seen.int().argsort(dim=-1, descending=True, stable=True).int()


def _mask_mod(grid: Tensor, bitmaps: Tensor) -> Any:
    batches, heads = grid.shape[:2]
    block_m, block_n = bitmaps.shape[1], bitmaps.shape[2] * 32

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at_b, at_h = (b if batches > 1 else b * 0), (h if heads > 1 else h * 0)
        block = grid[at_b, at_h, q // block_m, kv // block_n]
        if len(bitmaps) == 0:
            return block == FULL
        word = bitmaps[block.clamp_min(0), q % block_m, kv % block_n // 32]
        return (block == FULL) | ((block >= 0) & ((word >> kv % 32) & 1).bool())

    return mask_mod


def _lists_of_flex(block_mask: Any, blocks: Blocks) -> Lists:
    full = _visited(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, block_mask, blocks)
    partial = _visited(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask, blocks) & ~full
    b, h, row, column = partial.nonzero().unbind(-1)
    queries, keys = (torch.arange(n, device=row.device) for n in (blocks.block_m, blocks.block_n))
    q = (row[:, None] * blocks.block_m + queries).clamp_max(blocks.seqlen_q - 1)[:, :, None]
    kv = (column[:, None] * blocks.block_n + keys).clamp_max(blocks.seqlen_k - 1)[:, None]
    shown = block_mask.mask_mod(b[:, None, None], h[:, None, None], q, kv)
    shown = shown.expand(len(b), blocks.block_m, blocks.block_n)
    grid = full.int() + HIDDEN
    grid[partial] = torch.arange(len(b), dtype=torch.int32, device=row.device)
    bitmaps = pack_bits(shown) if len(b) else no_bitmaps((blocks.block_m, blocks.block_n), row)
    return lists_of_grid(grid, bitmaps, waits=True)


def _visited(counts: Tensor | None, indices: Tensor | None, block_mask: Any, blocks: Blocks) -> Tensor:
    """bool (batch, heads, rows, columns): the first so many of the listed columns of each row."""
    some = block_mask.kv_num_blocks
    columns = blocks.columns
    seen = torch.zeros(*some.shape[:2], blocks.rows, columns + 1, dtype=torch.bool, device=some.device)
    if counts is None or indices is None:
        return seen[..., :columns]
    exists = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = indices.long().where(exists, columns)[:, :, : blocks.rows]
    return seen.scatter_(3, places, True)[..., :columns]
