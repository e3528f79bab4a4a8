"""``BlockMask``: its contents, its device, and operations on masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flash_ext.argument_checks import as_size, check_device
from flash_ext.masks.bitmaps import unpack_bits
from flash_ext.masks.combination import GridMask, both, either
from flash_ext.masks.dense import DenseBuilders
from flash_ext.masks.documents import DocumentBuilders
from flash_ext.masks.flex import FlexConversions
from flash_ext.masks.lists import FULL, Lists, ceil_div, transposed_lists
from flash_ext.masks.patterns import PatternBuilders
from flash_ext.masks.windows import WindowBuilders


class BlockMask(DenseBuilders, WindowBuilders, DocumentBuilders, PatternBuilders, FlexConversions):
    """Visibility of (batch|1, heads_q|1, seqlen_q, seqlen_k) in blocks of (block_m, block_n); a 1 is for all.

    Two are equal (``==``) if they have one shape and block size and let the same pairs see each other, on whatever
    device. The host waits for that; it reads the lists, and of masks that are written differently also the pairs, a row
    of blocks at a time: seqlen_q * seqlen_k operations.

    Attributes:
        offsets: int32 (batch|1, heads_q|1, num_row_blocks + 1), where the blocks of each row begin in the lists.
        indices: int32 (num_blocks), the key block of each block, ascending within a row.
        bitmap_ids: int32 (num_blocks), which bitmap a block has; -1 = every pair is visible.
        bitmaps: int32 (num_bitmaps, block_m, block_n / 32); bit b of word w is key 32 w + b. Bits of queries and keys
            behind the last ones say nothing.
        seqlen_q, seqlen_k: the lengths it is made for.

    Builders do not wait for a GPU, but where they say so: the lists then have room for what there may be, and `offsets`
    say what there is. What is behind that says nothing.
    """

    @property
    def density(self) -> float:
        """The share of blocks that are visited, full or partial: what attention costs, as a part of what it costs
        without a mask. The host waits for it, as for ``num_blocks``."""
        rows = self.offsets.shape[0] * self.offsets.shape[1] * (self.offsets.shape[2] - 1)
        blocks = rows * ceil_div(self.seqlen_k, self.block_size[1])
        return self.num_blocks / blocks if blocks else 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks that are visited, of all batch entries and heads that have lists of their own."""
        return int((self.offsets[..., -1:] - self.offsets[..., :1]).sum())

    def __repr__(self) -> str:
        text = f"BlockMask(shape={self.shape}, block_size={self.block_size}"
        if type(self.offsets) is Tensor and not self.offsets.is_meta:
            text += f", blocks={self.num_blocks}, density={self.density:.3g}"
        return f"{text}, device='{self.offsets.device}')"

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
        """The hash of what the host knows without reading the device."""
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
        (block_m, block_n), columns = self.block_size, ceil_div(self.seqlen_k, self.block_size[1])
        row, entry = self._entries()
        ids = self.bitmap_ids[entry].long()
        blocks = torch.ones(len(entry), block_m, block_n, dtype=torch.bool, device=ids.device)
        blocks[ids >= 0] = unpack_bits(self.bitmaps[ids[ids >= 0]])
        grid = blocks.new_zeros(batch * heads * rows, columns, block_m, block_n)
        grid[row, self.indices[entry].long()] = blocks
        dense = grid.view(batch, heads, rows, columns, block_m, block_n).transpose(3, 4)
        return dense.reshape(batch, heads, rows * block_m, columns * block_n)[..., : self.seqlen_q, : self.seqlen_k]

    def __and__(self, other: BlockMask) -> BlockMask:
        """The intersection of two masks of one shape (batch and heads of 1 broadcast) and block size. The host waits
        for a GPU if both have bitmaps, and lists with room for more blocks than 64 MiB hold bitmaps."""
        return self._combined(other, both)

    def __or__(self, other: BlockMask) -> BlockMask:
        """The union of two masks; shapes as for ``&``."""
        return self._combined(other, either)

    def transpose(self) -> BlockMask:
        """The mask with queries and keys exchanged.

        Returns:
            A ``BlockMask`` of shape (batch|1, heads_q|1, seqlen_k, seqlen_q), blocks of (block_n, block_m).

        Raises:
            ValueError: block_m is no multiple of 32.
        """
        if self.block_size[0] % 32:
            raise ValueError(f"transpose() wants blocks of a multiple of 32 queries, got block_size {self.block_size}")
        lists = transposed_lists(Lists(*self.tensors), ceil_div(self.seqlen_k, self.block_size[1]))
        return self._of_lists(lists, self.seqlen_k, self.seqlen_q)

    def plot(self, batch: int = 0, head: int = 0) -> str:
        """The blocks as text, for ``print(mask.plot())``. The host waits for the device.

        Args:
            batch, head: which is shown.

        Returns:
            A line for each row of blocks: ``█`` full, ``▒`` partial, ``·`` not visited.

        Raises:
            ValueError: there is no such batch entry or head.
            TypeError: batch or head is not an integer.
        """
        batch, head = as_size("batch", batch), as_size("head", head)
        for name, index, size in (("batch", batch, self.shape[0]), ("head", head, self.shape[1])):
            if index >= size and size > 1:
                raise ValueError(f"{name} must be below {size}, which the mask has, got {index}")
        shown = self._grid()[min(batch, self.shape[0] - 1), min(head, self.shape[1] - 1)]
        return "\n".join("".join("▒" if kind > FULL else "·█"[kind == FULL] for kind in row) for row in shown.tolist())

    def _combined(self, other: BlockMask, combine: Callable[[GridMask, GridMask], Lists]) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._check_fits(other)
        return self._of_lists(combine(self._as_grid(), other._as_grid()), self.seqlen_q, self.seqlen_k)

    def _as_grid(self) -> GridMask:
        return GridMask.of_lists(Lists(*self.tensors), ceil_div(self.seqlen_k, self.block_size[1]))

    def _check_fits(self, other: BlockMask) -> None:
        fits = all(a == b or 1 in (a, b) for a, b in zip(self.shape[:2], other.shape[:2], strict=True))
        if self.shape[2:] != other.shape[2:] or self.block_size != other.block_size or not fits:
            raise ValueError(
                f"masks must have one shape and block size, got {self.shape} in blocks of {self.block_size} and "
                f"{other.shape} in blocks of {other.block_size}"
            )
        if self.offsets.device != other.offsets.device:
            raise ValueError(f"masks must be on one device, got {self.offsets.device} and {other.offsets.device}")

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
