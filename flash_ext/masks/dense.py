"""Builders of block masks from given visibility: dense masks, whole blocks, and predicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_ext.argument_checks import as_size, check_device, check_tensors, describe
from flash_ext.masks.bitmaps import no_bitmaps, pack_bits
from flash_ext.masks.intervals import Blocks
from flash_ext.masks.lists import HIDDEN, Lists, lists_of_grid
from flash_ext.masks.mask import Mask, as_block_size, as_blocks

if TYPE_CHECKING:
    from typing_extensions import Self

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Visibility of index tensors (batch, head, query, key) that broadcast against each other, as bool."""


class DenseBuilders(Mask):
    @classmethod
    def from_dense(cls, visible: Tensor, block_size: tuple[int, int] = (128, 128)) -> Self:
        """From a dense mask. If it is on a GPU, the host waits for the GPU.

        Args:
            visible: bool (seqlen_q, seqlen_k) or (batch|1, heads_q|1, seqlen_q, seqlen_k), True = visible.
            block_size: (block_m, block_n): block_m is any number of queries, block_n a multiple of 32 keys, each up to
                2^20. Multiples of 128 are fastest on Hopper.

        Returns:
            A ``BlockMask`` on the device of ``visible``.

        Raises:
            ValueError: visible has another dtype or shape, or block_size is not allowed.
            TypeError: visible is not a tensor, or block_size does not consist of integers.
        """
        check_tensors(visible=visible)
        if visible.dtype != torch.bool or visible.dim() not in (2, 4):
            raise ValueError(
                "visible must be bool (seqlen_q, seqlen_k) or (batch|1, heads_q|1, seqlen_q, seqlen_k), "
                f"got {visible.dtype} {tuple(visible.shape)}"
            )
        visible = visible if visible.dim() == 4 else visible[None, None]
        batch, heads, seqlen_q, seqlen_k = visible.shape
        blocks = Blocks(seqlen_q, seqlen_k, *as_block_size(block_size))
        lists = lists_of_mask_mod(lambda b, h, i, j: visible[b, h, i, j], blocks, (batch, heads), visible.device)
        return cls._of_lists(lists, seqlen_q, seqlen_k)

    @classmethod
    def from_blocks(
        cls, blocks: Tensor, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int] = (128, 128)
    ) -> Self:
        """From a grid of blocks that are visible as a whole.

        Args:
            blocks: bool (rows, columns) or (batch|1, heads_q|1, rows, columns), True = every pair of the block is
                visible. There are ceil(seqlen_q / block_m) rows and ceil(seqlen_k / block_n) columns.
            seqlen_q, seqlen_k: the lengths.
            block_size: (block_m, block_n), as for ``from_dense``. Where they are no multiples of 64, the host waits for
                a GPU.

        Returns:
            A ``BlockMask`` on the device of ``blocks``.

        Raises:
            ValueError: blocks has another dtype or shape, or block_size is not allowed.
            TypeError: an argument has a type that is not allowed.
        """
        check_tensors(blocks=blocks)
        grid = as_blocks(seqlen_q, seqlen_k, block_size)
        expected = grid.rows, grid.columns
        if blocks.dtype != torch.bool or blocks.dim() not in (2, 4) or tuple(blocks.shape[-2:]) != expected:
            raise ValueError(
                f"blocks must be bool {expected} or (batch|1, heads_q|1, {expected[0]}, {expected[1]}) for these "
                f"lengths and blocks of {(grid.block_m, grid.block_n)}, got {blocks.dtype} {tuple(blocks.shape)}"
            )
        lists = lists_of_blocks(blocks if blocks.dim() == 4 else blocks[None, None], grid)
        return cls._of_lists(lists, grid.seqlen_q, grid.seqlen_k)

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: MaskMod,
        seqlen_q: int,
        seqlen_k: int,
        batch: int = 1,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
        device: torch.device | str = "cpu",
    ) -> Self:
        """From a predicate over indices, as in FlexAttention (Dong et al. 2024). The host waits for a GPU.

        The predicate is evaluated for one row of blocks of all batch entries and heads at a time, which takes memory
        for batch * heads * block_m * seqlen_k pairs. Other memory grows with the number of blocks, and of bitmaps of
        partial blocks, which are deduplicated at the end.

        Args:
            mask_mod: (batch, head, query, key) -> bool, of integer tensors that broadcast against each other.
            seqlen_q, seqlen_k: the lengths.
            batch, heads: their numbers; 1 if the mask is the same for all.
            block_size: (block_m, block_n), as for ``from_dense``.
            device: of the result, and of the tensors that mask_mod gets.

        Returns:
            A ``BlockMask``.

        Raises:
            ValueError: block_size or a length is not allowed, or mask_mod returns a tensor of another dtype, shape or
                device.
            TypeError: an argument has a type that is not allowed, or mask_mod does not return a tensor.
        """
        if not callable(mask_mod):
            raise TypeError(f"mask_mod must be a function of (batch, head, query, key), got {describe(mask_mod)}")
        blocks = as_blocks(seqlen_q, seqlen_k, block_size)
        batch, heads = as_size("batch", batch), as_size("heads", heads)
        check_device(device)
        lists = lists_of_mask_mod(mask_mod, blocks, (batch, heads), device)
        return cls._of_lists(lists, blocks.seqlen_q, blocks.seqlen_k)


def lists_of_blocks(visited: Tensor, blocks: Blocks) -> Lists:
    """Lists of full blocks, those that bool (batch, heads, rows, columns) shows."""
    # With other block sizes kernels size their memory by the number of blocks, so the host must know it.
    waits = blocks.block_m % 64 != 0 or blocks.block_n % 64 != 0
    grid = visited.int() + HIDDEN
    return lists_of_grid(grid, no_bitmaps((blocks.block_m, blocks.block_n), visited), waits)


def lists_of_mask_mod(mask_mod: MaskMod, blocks: Blocks, sizes: tuple[int, int], device: torch.device | str) -> Lists:
    """Lists of a predicate. ``sizes``: (batch, heads)."""
    b = torch.arange(sizes[0], device=device).view(-1, 1, 1, 1)
    h = torch.arange(sizes[1], device=device).view(1, -1, 1, 1)
    j = torch.arange(blocks.seqlen_k, device=device)
    rows = [torch.empty((*sizes, 0, blocks.columns), dtype=torch.int32, device=device)]
    bitmaps = [torch.empty((0, blocks.block_m, blocks.block_n // 32), dtype=torch.int32, device=device)]
    count = 0
    for start in range(0, blocks.seqlen_q, blocks.block_m):
        i = torch.arange(start, min(start + blocks.block_m, blocks.seqlen_q), device=device)[:, None]
        pairs = _to_blocks(_evaluate(mask_mod, b, h, i, j), blocks.block_n)
        visited = pairs.any(-1).any(-1)
        partial = visited & ~_is_full(pairs, blocks.seqlen_k)
        found = pack_bits(_fill_up(pairs[partial], blocks.block_m))
        row = visited.int() + HIDDEN
        row[partial] = torch.arange(count, count + len(found), dtype=torch.int32, device=device)
        rows.append(row[:, :, None])
        bitmaps.append(found)
        count += len(found)
    return lists_of_grid(torch.cat(rows, 2), torch.cat(bitmaps), waits=True)


def _evaluate(mask_mod: MaskMod, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Visibility of all pairs of the index tensors, bool (batch, heads, rows, seqlen_k)."""
    visible: Any = mask_mod(b, h, i, j)
    if not isinstance(visible, Tensor):
        raise TypeError(f"mask_mod must return a bool Tensor, got {describe(visible)}")
    check_tensors(**{"mask_mod(...)": visible})
    shape = (len(b), h.shape[1], len(i), len(j))
    sizes = (1,) * (4 - visible.dim()) + tuple(visible.shape)
    fits = len(sizes) == 4 and all(size in (1, full) for size, full in zip(sizes, shape, strict=True))
    if visible.dtype != torch.bool or visible.device != j.device or not fits:
        raise ValueError(
            f"mask_mod must return a bool Tensor on {j.device} that broadcasts to (batch, heads, rows, seqlen_k) = "
            f"{shape}, got {visible.dtype} {tuple(visible.shape)} on {visible.device}"
        )
    return visible.expand(shape)


def _to_blocks(strip: Tensor, block_n: int) -> Tensor:
    """(..., rows, seqlen_k) as (..., columns, rows, block_n), False beyond seqlen_k."""
    strip = torch.nn.functional.pad(strip, (0, -strip.shape[-1] % block_n))
    return strip.unflatten(-1, (strip.shape[-1] // block_n, block_n)).transpose(-3, -2)


def _is_full(blocks: Tensor, seqlen_k: int) -> Tensor:
    """Which blocks of (..., columns, rows, block_n) are full: every pair up to seqlen_k is visible."""
    columns, block_n = blocks.shape[-3], blocks.shape[-1]
    beyond = torch.arange(columns * block_n, device=blocks.device).view(columns, 1, block_n) >= seqlen_k
    return (blocks | beyond).all(-1).all(-1)


def _fill_up(blocks: Tensor, block_m: int) -> Tensor:
    """bool (n, rows <= block_m, block_n) with rows of False up to block_m."""
    return torch.nn.functional.pad(blocks, (0, 0, 0, block_m - blocks.shape[1]))
