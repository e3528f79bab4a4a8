"""Builders of block masks that choose whole blocks: by distance, at random, or by their content."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_ext.argument_checks import as_flag, as_integer, as_size, check_device, check_tensors, describe
from flash_ext.masks.bitmaps import no_bitmaps
from flash_ext.masks.combination import GridMask, both
from flash_ext.masks.dense import lists_of_blocks
from flash_ext.masks.intervals import Blocks
from flash_ext.masks.lists import HIDDEN, Lists
from flash_ext.masks.mask import Mask, as_blocks
from flash_ext.masks.windows import lists_of_causal

if TYPE_CHECKING:
    from typing_extensions import Self


class PatternBuilders(Mask):
    @classmethod
    def dilated(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        blocks: int,
        dilation: int,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
        device: torch.device | str = "cpu",
    ) -> Self:
        """A window with gaps (Longformer, Beltagy et al. 2020), in blocks: row r sees column r and the columns r +-
        dilation, r +- 2 dilation, ..., ``blocks`` of them on each side. Rows and columns count from the first query and
        key.

        Args:
            seqlen_q, seqlen_k: the lengths.
            blocks: number of visible columns on each side.
            dilation: distance between two of them; 1 leaves no gap.
            block_size: (block_m, block_n), as for ``from_dense``.
            causal: also hide keys to the right of the diagonal that ends at the last query and key.
            device: of the result.

        Returns:
            A ``BlockMask`` for all batch entries and heads.

        Raises:
            ValueError: a number is not allowed.
            TypeError: an argument has a type that is not allowed.
        """
        blocks, dilation = as_size("blocks", blocks), as_integer("dilation", dilation)
        if dilation < 1:
            raise ValueError(f"dilation must be >= 1, got {dilation}")
        grid, causal = as_blocks(seqlen_q, seqlen_k, block_size), as_flag("causal", causal)
        row, column = _numbers(grid, device)
        distance = (row - column).abs_()
        seen = (distance % dilation == 0) & (distance <= blocks * dilation)
        return cls._of_blocks(seen, grid, causal)

    @classmethod
    def strided(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        local_blocks: int,
        stride: int,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
        device: torch.device | str = "cpu",
    ) -> Self:
        """A local window and every stride-th block (Sparse Transformers, Child et al. 2019): row r sees the columns
        from r - local_blocks to r + local_blocks, and the columns stride - 1, 2 stride - 1, ...

        Args:
            local_blocks: number of neighbouring columns on each side.
            stride: distance between the columns that all rows see.

        The others: as for ``dilated``.

        Returns:
            A ``BlockMask`` for all batch entries and heads.

        Raises:
            ValueError: a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        local_blocks, stride = as_size("local_blocks", local_blocks), as_integer("stride", stride)
        if stride < 1:
            raise ValueError(f"stride must be >= 1, got {stride}")
        grid, causal = as_blocks(seqlen_q, seqlen_k, block_size), as_flag("causal", causal)
        row, column = _numbers(grid, device)
        seen = ((row - column).abs_() <= local_blocks) | (column % stride == stride - 1)
        return cls._of_blocks(seen, grid, causal)

    @classmethod
    def random(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        blocks: int,
        batch: int = 1,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The same number of random blocks in each row (BigBird, Zaheer et al. 2020).

        Args:
            blocks: number in each row, at most all of them.
            batch, heads: their numbers; 1 if the mask is the same for all.
            generator: source of random numbers; None: torch's default generator.

        The others: as for ``dilated``.

        Returns:
            A ``BlockMask``.

        Raises:
            ValueError: a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        blocks, batch, heads = as_size("blocks", blocks), as_size("batch", batch), as_size("heads", heads)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {describe(generator)}")
        grid, causal = as_blocks(seqlen_q, seqlen_k, block_size), as_flag("causal", causal)
        check_device(device)
        scores = torch.rand(batch, heads, grid.rows, grid.columns, generator=generator, device=device)
        return cls._of_blocks(_highest(scores, blocks), grid, causal)

    @classmethod
    def top_k(
        cls,
        q: Tensor,
        k: Tensor,
        blocks: int,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
    ) -> Self:
        """For each block of queries the key blocks with the largest product of means, mean(q) · mean(k).

        Args:
            q: (batch, seqlen_q, heads_q, head_dim).
            k: (batch, seqlen_k, heads_kv, head_dim), heads_kv divides heads_q.
            blocks: number in each row, at most all of them. A product of NaN counts as the largest.
            block_size: (block_m, block_n), as for ``from_dense``.
            causal: also hide keys to the right of the diagonal that ends at the last query and key. Blocks behind it
                are not chosen; the block that it ends in always is.

        Returns:
            A ``BlockMask`` for each batch entry and query head. It has no gradient.

        Raises:
            ValueError: q or k has another shape or is complex, or a number is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        check_tensors(q=q, k=k)
        blocks, causal = as_size("blocks", blocks), as_flag("causal", causal)
        _check_queries_and_keys(q, k)
        grid = as_blocks(q.shape[1], k.shape[1], block_size)
        with torch.no_grad():
            scores = _scores_of_means(q, k, grid)
            if causal:
                scores = _up_to_diagonal(scores, grid)
            seen = _highest(scores, blocks)
        return cls._of_blocks(seen, grid, causal)

    @classmethod
    def _of_blocks(cls, seen: Tensor, blocks: Blocks, causal: bool) -> Self:
        seen = seen if seen.dim() == 4 else seen[None, None]
        lists = _causal_part(seen, blocks) if causal else lists_of_blocks(seen, blocks)
        return cls._of_lists(lists, blocks.seqlen_q, blocks.seqlen_k)


def _causal_part(seen: Tensor, blocks: Blocks) -> Lists:
    """Lists of the blocks with the causal mask applied."""
    causal = lists_of_causal(blocks, seen.device)
    diagonal = GridMask.of_lists(causal, blocks.columns)
    return both(diagonal, GridMask(seen.int() + HIDDEN, no_bitmaps((blocks.block_m, blocks.block_n), seen), 0))


def _numbers(blocks: Blocks, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Rows (rows, 1) and columns (columns) of blocks."""
    check_device(device)
    return torch.arange(blocks.rows, device=device)[:, None], torch.arange(blocks.columns, device=device)


def _highest(scores: Tensor, count: int) -> Tensor:
    """True for the `count` highest numbers of the last dimension, but never for -inf."""
    best = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (scores > -torch.inf)


def _check_queries_and_keys(q: Tensor, k: Tensor) -> None:
    for name, tokens in (("q", q), ("k", k)):
        if tokens.is_complex():
            raise ValueError(f"{name} must hold real numbers, got {tokens.dtype}")
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            "q and k must be (batch, seqlen, heads, head_dim) with one batch and head_dim, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"k must have heads that divide those of q, {q.shape[2]}, got {k.shape[2]}")


def _scores_of_means(q: Tensor, k: Tensor, blocks: Blocks) -> Tensor:
    """Finite float (batch, heads_q, rows, columns). NaN becomes the largest number, so that a mask shows what has to be
    seen in the output."""
    keys = _means(k, blocks.block_n).repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", _means(q, blocks.block_m), keys)
    return scores.nan_to_num(nan=torch.finfo(scores.dtype).max)


def _means(tokens: Tensor, block: int) -> Tensor:
    """Means of blocks of tokens: float (batch, blocks, heads, head_dim)."""
    seqlen = tokens.shape[1]
    padded = torch.nn.functional.pad(tokens.float(), (0, 0, 0, 0, 0, -seqlen % block)).unflatten(1, (-1, block))
    blocks = torch.arange(padded.shape[1], device=tokens.device)
    return padded.sum(2) / (seqlen - blocks * block).clamp(1, block)[:, None, None]


def _up_to_diagonal(scores: Tensor, blocks: Blocks) -> Tensor:
    """The scores with -inf behind the block that the diagonal ends in, and inf in that block."""
    row, column = _numbers(blocks, scores.device)
    last_query = ((row + 1) * blocks.block_m).clamp_max(blocks.seqlen_q) - 1
    diagonal = (last_query + blocks.seqlen_k - blocks.seqlen_q) // blocks.block_n
    return scores.masked_fill(column > diagonal, -torch.inf).masked_fill(column == diagonal, torch.inf)
