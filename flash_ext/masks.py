"""Block-sparse visibility: which blocks of keys each block of queries attends to, and a bitmap where not all pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_ext.argument_checks import (
    as_flag,
    as_integer,
    as_pair,
    as_size,
    check_device,
    check_tensors,
    check_window,
    describe,
)

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Visibility of index tensors (batch, head, query, key) that broadcast against each other, as bool."""


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Visibility of (batch|1, heads_q|1, seqlen_q, seqlen_k) in blocks of (block_m, block_n); a 1 is for all.

    Two are equal (``==``) if they have one shape and block size and let the same pairs see each other, on whatever
    device. The host waits for that; it reads the lists, and of masks that are written differently also the pairs, a row
    of blocks at a time: seqlen_q * seqlen_k operations.

    Attributes:
        offsets: int32 (batch|1, heads_q|1, num_row_blocks + 1), where the blocks of each row begin in the lists.
        indices: int32 (num_blocks), the key block of each block, ascending within a row.
        bitmap_ids: int32 (num_blocks), which bitmap a block has; -1 = every pair is visible.
        bitmaps: int32 (num_bitmaps, block_m, block_n / 32); bit b of word w is key 32 w + b.
        seqlen_q, seqlen_k: the lengths it is made for.
    """

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

    @property
    def density(self) -> float:
        """The share of blocks that are visited, full or partial: what attention costs, as a part of what it costs
        without a mask."""
        rows = self.offsets.shape[0] * self.offsets.shape[1] * (self.offsets.shape[2] - 1)
        blocks = rows * _ceil_div(self.seqlen_k, self.block_size[1])
        return self.indices.shape[0] / blocks if blocks else 0.0

    def __repr__(self) -> str:
        blocks = f"block_size={self.block_size}, blocks={self.indices.shape[0]}, density={self.density:.3g}"
        return f"BlockMask(shape={self.shape}, {blocks}, device='{self.offsets.device}')"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if (self.shape, self.block_size) != (other.shape, other.block_size):
            return False
        other = other.to(self.offsets.device)
        if all(map(torch.equal, self.tensors, other.tensors)):
            return True
        rows = range(self.offsets.shape[2] - 1)
        return all(torch.equal(self._row(row).to_dense(), other._row(row).to_dense()) for row in rows)

    def __hash__(self) -> int:
        """Of what the host knows without looking at the device."""
        return hash((BlockMask, self.shape, self.block_size))

    def to(self, device: torch.device | str | int) -> BlockMask:
        """The same mask with its tensors on ``device``."""
        check_device(device)
        offsets, indices, bitmap_ids, bitmaps = (t.to(device) for t in self.tensors)
        return replace(self, offsets=offsets, indices=indices, bitmap_ids=bitmap_ids, bitmaps=bitmaps)

    def cpu(self) -> BlockMask:
        """The same mask with its tensors in the host's memory."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int | None = None) -> BlockMask:
        """The same mask with its tensors on a GPU; None: the current one."""
        return self.to("cuda" if device is None else device)

    def to_dense(self) -> Tensor:
        """The mask as bool (batch|1, heads_q|1, seqlen_q, seqlen_k), True = visible."""
        batch, heads, rows = self.offsets.shape[0], self.offsets.shape[1], self.offsets.shape[2] - 1
        (block_m, block_n), cols = self.block_size, _ceil_div(self.seqlen_k, self.block_size[1])
        row, entry = self._entries()
        ids = self.bitmap_ids[entry].long()
        blocks = torch.ones(len(entry), block_m, block_n, dtype=torch.bool, device=ids.device)
        blocks[ids >= 0] = _unpack_bits(self.bitmaps[ids[ids >= 0]])
        grid = blocks.new_zeros(batch * heads * rows, cols, block_m, block_n)
        grid[row, self.indices[entry].long()] = blocks
        dense = grid.view(batch, heads, rows, cols, block_m, block_n).transpose(3, 4)
        return dense.reshape(batch, heads, rows * block_m, cols * block_n)[..., : self.seqlen_q, : self.seqlen_k]

    def _row(self, row: int) -> BlockMask:
        """One row of blocks."""
        seqlen_q = min(self.block_size[0], self.seqlen_q - row * self.block_size[0])
        return replace(self, offsets=self.offsets[..., row : row + 2], seqlen_q=seqlen_q)

    def _entries(self) -> tuple[Tensor, Tensor]:
        """Of each visited block: its row of blocks, counted through batch and heads, and its place in the lists."""
        counts = self.offsets.diff(dim=-1).flatten().long()
        row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        before = counts.cumsum(0) - counts
        return row, self.offsets[..., :-1].flatten()[row] + torch.arange(len(row), device=row.device) - before[row]

    @staticmethod
    def from_dense(visible: Tensor, block_size: tuple[int, int] = (128, 128)) -> BlockMask:
        """From a dense mask.

        Args:
            visible: bool (seqlen_q, seqlen_k) or (batch|1, heads_q|1, seqlen_q, seqlen_k), True = visible.
            block_size: (block_m, block_n): any number of queries, a multiple of 32 keys. Multiples of 64 each are the
                quickest on GPUs.

        Returns:
            A ``BlockMask`` on the device of ``visible``.

        Raises:
            ValueError: visible or block_size is none of these.
            TypeError: visible is no tensor, or block_size not of integers.
        """
        check_tensors(visible=visible)
        if visible.dtype != torch.bool or visible.dim() not in (2, 4):
            raise ValueError(
                "visible must be bool (seqlen_q, seqlen_k) or (batch|1, heads_q|1, seqlen_q, seqlen_k), "
                f"got {visible.dtype} {tuple(visible.shape)}"
            )
        visible = visible if visible.dim() == 4 else visible[None, None]
        batch, heads, seqlen_q, seqlen_k = visible.shape
        return BlockMask.from_mask_mod(
            lambda b, h, i, j: visible[b, h, i, j], seqlen_q, seqlen_k, batch, heads, block_size, visible.device
        )

    @staticmethod
    def from_blocks(
        blocks: Tensor, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int] = (128, 128)
    ) -> BlockMask:
        """From whole blocks.

        Args:
            blocks: bool (rows, columns) or (batch|1, heads_q|1, rows, columns), True = every pair of the block is
                visible. There are ceil(seqlen_q / block_m) rows and ceil(seqlen_k / block_n) columns.
            seqlen_q, seqlen_k: the lengths.
            block_size: (block_m, block_n), as for ``from_dense``.

        Returns:
            A ``BlockMask`` on the device of ``blocks``.

        Raises:
            ValueError: blocks is of another dtype or shape, or block_size not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        check_tensors(blocks=blocks)
        block_size = _as_block_size(block_size)
        seqlen_q, seqlen_k = as_size("seqlen_q", seqlen_q), as_size("seqlen_k", seqlen_k)
        expected = (_ceil_div(seqlen_q, block_size[0]), _ceil_div(seqlen_k, block_size[1]))
        if blocks.dtype != torch.bool or blocks.dim() not in (2, 4) or tuple(blocks.shape[-2:]) != expected:
            raise ValueError(
                f"blocks must be bool {expected} or (batch|1, heads_q|1, {expected[0]}, {expected[1]}) for these "
                f"lengths and blocks of {block_size}, got {blocks.dtype} {tuple(blocks.shape)}"
            )
        blocks = blocks if blocks.dim() == 4 else blocks[None, None]
        bitmaps = torch.zeros(0, block_size[0], block_size[1] // 32, dtype=torch.int32, device=blocks.device)
        return _from_grid(blocks, torch.full(blocks.shape, -1, device=blocks.device), bitmaps, seqlen_q, seqlen_k)

    @staticmethod
    def from_mask_mod(
        mask_mod: MaskMod,
        seqlen_q: int,
        seqlen_k: int,
        batch: int = 1,
        heads: int = 1,
        block_size: tuple[int, int] = (128, 128),
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """From a predicate over indices, as in FlexAttention (Dong et al. 2024).

        It is evaluated for one row of blocks, of all batch entries and heads, at a time, so that this takes memory for
        batch * heads * block_m * seqlen_k pairs. What is kept besides grows with the number of blocks, and with that
        of partial ones, whose bitmaps are told apart at the end.

        Args:
            mask_mod: (batch, head, query, key) -> bool, of integer tensors that broadcast against each other.
            seqlen_q, seqlen_k: the lengths.
            batch, heads: 1 where the mask is the same for all.
            block_size: (block_m, block_n), as for ``from_dense``.
            device: of the result, and of what mask_mod is given.

        Returns:
            A ``BlockMask``.

        Raises:
            ValueError: block_size or a length is not allowed, or mask_mod returns something of another dtype, shape or
                device.
            TypeError: an argument is of a type that it cannot have, or mask_mod does not return a tensor.
        """
        if not callable(mask_mod):
            raise TypeError(f"mask_mod must be a function of (batch, head, query, key), got {describe(mask_mod)}")
        block_m, block_n = _as_block_size(block_size)
        seqlen_q, seqlen_k = as_size("seqlen_q", seqlen_q), as_size("seqlen_k", seqlen_k)
        batch, heads = as_size("batch", batch), as_size("heads", heads)
        check_device(device)
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=device).view(1, -1, 1, 1)
        j = torch.arange(seqlen_k, device=device)
        seen: list[Tensor] = []
        ids: list[Tensor] = []
        bitmaps = [torch.zeros(0, block_m, block_n // 32, dtype=torch.int32, device=device)]
        for start in range(0, seqlen_q, block_m):
            i = torch.arange(start, min(start + block_m, seqlen_q), device=device)[:, None]
            blocks = _to_blocks(_evaluate(mask_mod, b, h, i, j), block_n)
            any_pair = blocks.any(-1).any(-1)
            partial = any_pair & ~_is_full(blocks, seqlen_k)
            row_ids = torch.full(partial.shape, -1, device=device)
            row_ids[partial] = torch.arange(int(partial.sum()), device=device) + sum(len(known) for known in bitmaps)
            bitmaps.append(_pack_bits(blocks[partial], block_m))
            seen.append(any_pair)
            ids.append(row_ids)
        cols = _ceil_div(seqlen_k, block_n)
        none = torch.zeros(batch, heads, 0, cols, dtype=torch.bool, device=device)
        visited = torch.stack(seen, 2) if seen else none
        all_ids = torch.stack(ids, 2) if ids else none.long()
        shared, which = torch.unique(torch.cat(bitmaps), dim=0, return_inverse=True)
        all_ids[all_ids >= 0] = which[all_ids[all_ids >= 0]]
        return _from_grid(visited, all_ids, shared, seqlen_q, seqlen_k)

    @staticmethod
    def causal(
        seqlen_q: int,
        seqlen_k: int,
        block_size: tuple[int, int] = (128, 128),
        *,
        top_left: bool = False,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """No key to the right of the diagonal.

        Args:
            seqlen_q, seqlen_k: the lengths.
            block_size: (block_m, block_n), as for ``from_dense``.
            top_left: the diagonal starts at the first query and key, and not where it ends at the last ones.
            device: of the result.

        Returns:
            A ``BlockMask`` for all batch entries and heads.

        Raises:
            ValueError: a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        return BlockMask.sliding_window(
            seqlen_q, seqlen_k, (-1, 0), block_size=block_size, top_left=top_left, device=device
        )

    @staticmethod
    def sliding_window(
        seqlen_q: int,
        seqlen_k: int,
        window_size: tuple[int, int],
        num_global: int = 0,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
        top_left: bool = False,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """The window of ``attention``, and some tokens at the start that see all and are seen by all (Longformer,
        Beltagy et al. 2020; with ``causal`` or a right window of 0: the attention sinks of StreamingLLM, Xiao et al.
        2023).

        Args:
            seqlen_q, seqlen_k: the lengths.
            window_size: (left, right), as for ``attention``; -1 = unlimited.
            num_global: of those tokens.
            block_size: (block_m, block_n), as for ``from_dense``.
            causal: also nothing to the right of the diagonal.
            top_left: where the diagonal lies, as for ``causal()``.
            device: of the result.

        Returns:
            A ``BlockMask`` for all batch entries and heads.

        Raises:
            ValueError: a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        left, right = check_window(window_size)
        if left < -1 or right < -1:
            raise ValueError(f"window_size must be (left, right), each >= -1 (-1 = unlimited), got {window_size!r}")
        seqlen_q, seqlen_k = as_size("seqlen_q", seqlen_q), as_size("seqlen_k", seqlen_k)
        num_global = as_size("num_global", num_global)
        top_left, causal = as_flag("top_left", top_left), as_flag("causal", causal) or right == 0
        offset = 0 if top_left else seqlen_k - seqlen_q

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = j - i - offset
            near = torch.ones_like(distance, dtype=torch.bool)
            if left >= 0:
                near &= distance >= -left
            if right >= 0:
                near &= distance <= right
            near |= (j < num_global) | (i + offset < num_global)
            return near & (distance <= 0) if causal else near

        return BlockMask.from_mask_mod(visible, seqlen_q, seqlen_k, block_size=block_size, device=device)

    @staticmethod
    def document(
        ids_q: Tensor, ids_k: Tensor | None = None, block_size: tuple[int, int] = (128, 128), *, causal: bool = False
    ) -> BlockMask:
        """Queries see the keys of their own document.

        Args:
            ids_q: integer (seqlen_q) or (batch, seqlen_q), the document of each query. A negative one sees nothing and
                is seen by nobody: padding.
            ids_k: the same of the keys; None: those of the queries.
            block_size: (block_m, block_n), as for ``from_dense``.
            causal: also nothing to the right of the diagonal that ends at the last query and key.

        Returns:
            A ``BlockMask`` on the device of ``ids_q``, for all heads.

        Raises:
            ValueError: ids_q or ids_k is not integer, their shapes or devices do not fit together, or a block_size that
                is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        ids_k = ids_q if ids_k is None else ids_k
        check_tensors(ids_q=ids_q, ids_k=ids_k)
        causal = as_flag("causal", causal)
        for name, ids in (("ids_q", ids_q), ("ids_k", ids_k)):
            if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
                raise ValueError(f"{name} must be integer, got {ids.dtype}")
        if ids_k.device != ids_q.device:
            raise ValueError(f"ids_k must be on the device of ids_q, {ids_q.device}, got {ids_k.device}")
        if ids_q.dim() != ids_k.dim() or ids_q.dim() not in (1, 2) or ids_q.shape[:-1] != ids_k.shape[:-1]:
            raise ValueError(
                "ids_q and ids_k must be (seqlen) or (batch, seqlen) with the same batch, "
                f"got {tuple(ids_q.shape)} and {tuple(ids_k.shape)}"
            )
        documents_q, documents_k = torch.atleast_2d(ids_q), torch.atleast_2d(ids_k)
        (batch, seqlen_q), seqlen_k = documents_q.shape, documents_k.shape[1]

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = (documents_q[b, i] == documents_k[b, j]) & (documents_q[b, i] >= 0)
            return same & (j <= i + seqlen_k - seqlen_q) if causal else same

        return BlockMask.from_mask_mod(visible, seqlen_q, seqlen_k, batch, 1, block_size, ids_q.device)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _as_block_size(block_size: Any) -> tuple[int, int]:
    block_m, block_n = as_pair("block_size", "(rows, keys)", block_size)
    block_m, block_n = as_integer("block_size[0]", block_m), as_integer("block_size[1]", block_n)
    if block_m < 1 or block_n < 32 or block_n % 32 != 0:
        raise ValueError(f"block_size must be (rows >= 1, keys a multiple of 32), got {block_size}")
    return block_m, block_n


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
    """Which of (..., columns, rows, block_n) see all keys there are."""
    columns, block_n = blocks.shape[-3], blocks.shape[-1]
    beyond = torch.arange(columns * block_n, device=blocks.device).view(columns, 1, block_n) >= seqlen_k
    return (blocks | beyond).all(-1).all(-1)


def _pack_bits(blocks: Tensor, block_m: int) -> Tensor:
    """bool (n, rows <= block_m, block_n) as int32 (n, block_m, block_n / 32)."""
    n, rows, block_n = blocks.shape
    padded = torch.nn.functional.pad(blocks, (0, 0, 0, block_m - rows)).view(n, block_m, block_n // 32, 32)
    words = (padded.long() << torch.arange(32, device=blocks.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _unpack_bits(bitmaps: Tensor) -> Tensor:
    """The reverse: bool (n, block_m, block_n)."""
    return ((bitmaps[..., None] >> torch.arange(32, device=bitmaps.device)) & 1).bool().flatten(-2)


def _from_grid(visited: Tensor, ids: Tensor, bitmaps: Tensor, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """From which blocks are visited, bool (batch|1, heads|1, rows, columns), and the bitmap of each."""
    batch, heads, rows, _ = visited.shape
    ends = visited.sum(-1).flatten().cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    first = torch.arange(batch * heads, device=visited.device)[:, None] * rows
    offsets = starts[first + torch.arange(rows + 1, device=visited.device)].view(batch, heads, rows + 1)
    return BlockMask(
        offsets.int(), visited.nonzero()[:, 3].int(), ids[visited].int(), bitmaps, seqlen_q=seqlen_q, seqlen_k=seqlen_k
    )
