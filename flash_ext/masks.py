"""Block-sparse visibility: which blocks of keys each block of queries attends to, and a bitmap where not all pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_ext import block_lists
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

    Builders do not wait for a GPU, but where they say so: the lists then have room for what there may be, and `offsets`
    say what there is.
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
        without a mask. The host waits for it, as for ``num_blocks``."""
        rows = self.offsets.shape[0] * self.offsets.shape[1] * (self.offsets.shape[2] - 1)
        blocks = rows * block_lists.ceil_div(self.seqlen_k, self.block_size[1])
        return self.num_blocks / blocks if blocks else 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks that are visited, of all batch entries and heads that the lists tell apart."""
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
        (block_m, block_n), cols = self.block_size, block_lists.ceil_div(self.seqlen_k, self.block_size[1])
        row, entry = self._entries()
        ids = self.bitmap_ids[entry].long()
        blocks = torch.ones(len(entry), block_m, block_n, dtype=torch.bool, device=ids.device)
        blocks[ids >= 0] = block_lists.unpack_bits(self.bitmaps[ids[ids >= 0]])
        grid = blocks.new_zeros(batch * heads * rows, cols, block_m, block_n)
        grid[row, self.indices[entry].long()] = blocks
        dense = grid.view(batch, heads, rows, cols, block_m, block_n).transpose(3, 4)
        return dense.reshape(batch, heads, rows * block_m, cols * block_n)[..., : self.seqlen_q, : self.seqlen_k]

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both masks show, of one shape (batch and heads of 1 broadcast) and block size. The host waits where both
        have bitmaps."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._check_fits(other)
        return _of_lists(block_lists.both(self._grid(), other._grid()), self.seqlen_q, self.seqlen_k)

    def __or__(self, other: BlockMask) -> BlockMask:
        """What one of two masks shows, as for ``&``."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._check_fits(other)
        return _of_lists(block_lists.either(self._grid(), other._grid()), self.seqlen_q, self.seqlen_k)

    def transpose(self) -> BlockMask:
        """The mask with queries and keys in each other's place.

        Returns:
            A ``BlockMask`` of shape (batch|1, heads_q|1, seqlen_k, seqlen_q), blocks of (block_n, block_m).

        Raises:
            ValueError: block_m is no multiple of 32.
        """
        if self.block_size[0] % 32:
            raise ValueError(f"transpose() wants blocks of a multiple of 32 queries, got block_size {self.block_size}")
        visited, ids, bitmaps = self._grid()
        bitmaps = block_lists.transposed_bitmaps(bitmaps)
        lists = block_lists.from_grid(visited.transpose(2, 3), ids.transpose(2, 3), bitmaps)
        return _of_lists(lists, self.seqlen_k, self.seqlen_q)

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
        visited, ids, _ = self._grid()
        kinds = (visited.int() + (visited & (ids >= 0)).int())[
            min(batch, self.shape[0] - 1), min(head, self.shape[1] - 1)
        ]
        return "\n".join("".join("·█▒"[kind] for kind in row) for row in kinds.tolist())

    def to_flex(self) -> Any:
        """The mask for ``torch.nn.attention.flex_attention``: its ``BlockMask``, whose mask_mod looks up bitmaps."""
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        visited, ids, bitmaps = self._grid()
        block_m, block_n = self.block_size
        batches, heads = self.shape[:2]

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            at_b, at_h = (b if batches > 1 else b * 0), (h if heads > 1 else h * 0)
            block = at_b, at_h, q // block_m, kv // block_n
            if len(bitmaps) == 0:
                return visited[block]
            word = bitmaps[ids[block].clamp_min(0), q % block_m, kv % block_n // 32]
            return visited[block] & ((ids[block] < 0) | ((word >> kv % 32) & 1).bool())

        partial, full = visited & (ids >= 0), visited & (ids < 0)
        counts = [
            (kind.sum(-1).int(), kind.int().argsort(dim=-1, descending=True, stable=True).int())
            for kind in (partial, full)
        ]
        return FlexBlockMask.from_kv_blocks(
            *counts[0],
            *counts[1],
            BLOCK_SIZE=self.block_size,
            mask_mod=mask_mod,
            seq_lengths=(self.seqlen_q, self.seqlen_k),
        )

    @staticmethod
    def from_flex(block_mask: Any) -> BlockMask:
        """From a ``BlockMask`` of ``torch.nn.attention.flex_attention``.

        Args:
            block_mask: that one. Its mask_mod is evaluated where blocks are partial, as for ``from_mask_mod``; the host
                waits for how many those are.

        Returns:
            A ``BlockMask`` on its device.

        Raises:
            TypeError: block_mask is none of these.
            ValueError: its blocks are not of a multiple of 32 keys.
        """
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        if not isinstance(block_mask, FlexBlockMask):
            raise TypeError(
                f"block_mask must be a torch.nn.attention.flex_attention.BlockMask, got {describe(block_mask)}"
            )
        block_m, block_n = block_size = _as_block_size(block_mask.BLOCK_SIZE)
        seqlen_q, seqlen_k = block_mask.seq_lengths
        columns = block_lists.ceil_div(seqlen_k, block_n)

        def grid(counts: Tensor | None, indices: Tensor | None) -> Tensor:
            rows = block_lists.ceil_div(seqlen_q, block_m)
            shape = (*block_mask.kv_num_blocks.shape[:2], rows, columns)
            seen = torch.zeros(*shape[:3], columns + 1, dtype=torch.bool, device=block_mask.kv_num_blocks.device)
            if counts is None or indices is None:
                return seen[..., :columns]
            exists = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
            places = indices.long().where(exists, columns)[:, :, :rows]
            return seen.scatter_(3, places, True)[..., :columns]

        full = grid(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        partial = grid(block_mask.kv_num_blocks, block_mask.kv_indices) & ~full
        b, h, row, column = partial.nonzero().unbind(-1)
        q = (row[:, None] * block_m + torch.arange(block_m, device=row.device)).clamp_max(seqlen_q - 1)[:, :, None]
        kv = (column[:, None] * block_n + torch.arange(block_n, device=row.device)).clamp_max(seqlen_k - 1)[:, None]
        shown = block_mask.mask_mod(b[:, None, None], h[:, None, None], q, kv).expand(len(b), block_m, block_n)
        ids = torch.full(partial.shape, -1, device=row.device)
        ids[partial] = torch.arange(len(b), device=row.device)
        bitmaps = block_lists.pack_bits(shown) if len(b) else _no_bitmaps(block_size, row)
        return _of_lists(block_lists.from_grid(partial | full, ids, bitmaps, waits=True), seqlen_q, seqlen_k)

    def _grid(self) -> tuple[Tensor, Tensor, Tensor]:
        columns = block_lists.ceil_div(self.seqlen_k, self.block_size[1])
        return *block_lists.grid_of(self.offsets, self.indices, self.bitmap_ids, columns), self.bitmaps

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

    @staticmethod
    def from_dense(visible: Tensor, block_size: tuple[int, int] = (128, 128)) -> BlockMask:
        """From a dense mask.

        Args:
            visible: bool (seqlen_q, seqlen_k) or (batch|1, heads_q|1, seqlen_q, seqlen_k), True = visible.
            block_size: (block_m, block_n): any number of queries, a multiple of 32 keys. Multiples of 128 each are the
                quickest on Hopper.

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
            block_size: (block_m, block_n), as for ``from_dense``. The host waits for a GPU where they are no multiples
                of 64.

        Returns:
            A ``BlockMask`` on the device of ``blocks``.

        Raises:
            ValueError: blocks is of another dtype or shape, or block_size not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        check_tensors(blocks=blocks)
        block_size = _as_block_size(block_size)
        seqlen_q, seqlen_k = as_size("seqlen_q", seqlen_q), as_size("seqlen_k", seqlen_k)
        expected = (block_lists.ceil_div(seqlen_q, block_size[0]), block_lists.ceil_div(seqlen_k, block_size[1]))
        if blocks.dtype != torch.bool or blocks.dim() not in (2, 4) or tuple(blocks.shape[-2:]) != expected:
            raise ValueError(
                f"blocks must be bool {expected} or (batch|1, heads_q|1, {expected[0]}, {expected[1]}) for these "
                f"lengths and blocks of {block_size}, got {blocks.dtype} {tuple(blocks.shape)}"
            )
        blocks = blocks if blocks.dim() == 4 else blocks[None, None]
        # By how many there are kernels make room for what blocks of other sizes become.
        waits = block_size[0] % 64 != 0 or block_size[1] % 64 != 0
        lists = block_lists.from_grid(blocks, None, _no_bitmaps(block_size, blocks), waits)
        return _of_lists(lists, seqlen_q, seqlen_k)

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
            bitmaps.append(block_lists.pack_bits(_fill_up(blocks[partial], block_m)))
            seen.append(any_pair)
            ids.append(row_ids)
        cols = block_lists.ceil_div(seqlen_k, block_n)
        none = torch.zeros(batch, heads, 0, cols, dtype=torch.bool, device=device)
        visited = torch.stack(seen, 2) if seen else none
        all_ids = torch.stack(ids, 2) if ids else none.long()
        shared, which = torch.unique(torch.cat(bitmaps), dim=0, return_inverse=True)
        all_ids[all_ids >= 0] = which[all_ids[all_ids >= 0]]
        return _of_lists(block_lists.from_grid(visited, all_ids, shared, waits=True), seqlen_q, seqlen_k)

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
            num_global: of those tokens. A query that the diagonal puts before the first key is none of them.
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

        block_size = _as_block_size(block_size)
        check_device(device)
        position = torch.arange(seqlen_q, device=device)[None] + offset
        begin = position - left if left >= 0 else torch.zeros_like(position)
        end = position + right + 1 if right >= 0 else torch.full_like(position, seqlen_k)
        before = None
        if num_global > 0:
            is_global = (position >= 0) & (position < num_global)
            begin, end = begin.where(~is_global, 0), end.where(~is_global, seqlen_k)
            before = torch.full_like(position, num_global)
        if causal:
            end = torch.minimum(end, position + 1)
            before = None if before is None else torch.minimum(before, position + 1)
        edges = (left >= 0) + (right >= 0 or causal) + 2 * (num_global > 0)
        return _of_intervals(begin, end, before, seqlen_k, block_size, edges)

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

    @staticmethod
    def documents(
        cu_seqlens: Tensor, seqlen: int, block_size: tuple[int, int] = (128, 128), *, causal: bool = False
    ) -> BlockMask:
        """Documents that stand one behind the other in a sequence: tokens see those of their own.

        Args:
            cu_seqlens: int32 or int64 (documents + 1), where they begin, ascending, and where the last one ends. Tokens
                behind that see nothing and are seen by nobody.
            seqlen: of the sequence, queries and keys.
            block_size: (block_m, block_n), as for ``from_dense``.
            causal: also nothing behind themselves.

        Returns:
            A ``BlockMask`` on the device of ``cu_seqlens``, for all batch entries and heads.

        Raises:
            ValueError: cu_seqlens is of another dtype or shape, or a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        check_tensors(cu_seqlens=cu_seqlens)
        causal, seqlen, block_size = as_flag("causal", causal), as_size("seqlen", seqlen), _as_block_size(block_size)
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
            raise ValueError(
                f"cu_seqlens must be int32 or int64 (documents + 1), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            )
        bounds = torch.cat([cu_seqlens.long(), torch.full((1,), seqlen, device=cu_seqlens.device)])
        token = torch.arange(seqlen, device=cu_seqlens.device)
        document = torch.searchsorted(bounds[:-1], token, right=True)  # 1 is the first
        exists = (document > 0) & (document < len(bounds) - 1)
        begin = bounds[(document - 1).clamp_min(0)]
        end = bounds[document.clamp_max(len(bounds) - 1)].where(exists, 0)
        end = torch.minimum(end, token + 1) if causal else end
        return _of_intervals(begin[None], end[None], None, seqlen, block_size, edges=2, jumps=2)

    @staticmethod
    def prefix_lm(prefix: Tensor, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int] = (128, 128)) -> BlockMask:
        """Causal, but that all see the keys of a prefix (Raffel et al. 2020).

        Args:
            prefix: integer (batch|1), how many keys, of each batch entry or of all.
            seqlen_q, seqlen_k: the lengths. The diagonal ends at the last query and key.
            block_size: (block_m, block_n), as for ``from_dense``.

        Returns:
            A ``BlockMask`` on the device of ``prefix``, for all heads.

        Raises:
            ValueError: prefix is of another dtype or shape, or a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        check_tensors(prefix=prefix)
        seqlen_q, seqlen_k = as_size("seqlen_q", seqlen_q), as_size("seqlen_k", seqlen_k)
        block_size = _as_block_size(block_size)
        if prefix.dim() != 1 or not _is_integer(prefix):
            raise ValueError(f"prefix must be integer (batch|1), got {prefix.dtype} {tuple(prefix.shape)}")
        position = torch.arange(seqlen_q, device=prefix.device)[None] + (seqlen_k - seqlen_q)
        end = torch.maximum(position + 1, prefix.long()[:, None])
        return _of_intervals(torch.zeros_like(end), end, None, seqlen_k, block_size, edges=1, jumps=1)

    @staticmethod
    def bidirectional_spans(spans: Tensor, seqlen: int, block_size: tuple[int, int] = (128, 128)) -> BlockMask:
        """Causal, but that tokens of a span, such as those of an image, see all of it.

        Args:
            spans: integer (num_spans, 2) or (batch, num_spans, 2): the first token of each and the one behind the last.
                They must not overlap; one that ends where it begins is none.
            seqlen: of the sequence, queries and keys.
            block_size: (block_m, block_n), as for ``from_dense``.

        Returns:
            A ``BlockMask`` on the device of ``spans``, for all heads.

        Raises:
            ValueError: spans is of another dtype or shape, or a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        check_tensors(spans=spans)
        seqlen, block_size = as_size("seqlen", seqlen), _as_block_size(block_size)
        if spans.dim() not in (2, 3) or spans.shape[-1] != 2 or not _is_integer(spans):
            raise ValueError(
                f"spans must be integer (num_spans, 2) or (batch, num_spans, 2), got {spans.dtype} {tuple(spans.shape)}"
            )
        spans = spans if spans.dim() == 3 else spans[None]
        token = torch.arange(seqlen, device=spans.device).expand(spans.shape[0], seqlen).contiguous()
        end = token + 1
        if spans.shape[1]:
            begins, ends = spans.long().unbind(-1)
            # Those that are none go behind all tokens.
            begins, order = begins.where(ends > begins, seqlen).sort(dim=1)
            ends = ends.gather(1, order)
            span = torch.searchsorted(begins.contiguous(), token, right=True) - 1
            end = torch.maximum(end, ends.gather(1, span.clamp_min(0)).where(span >= 0, 0))
        return _of_intervals(torch.zeros_like(end), end, None, seqlen, block_size, edges=1, jumps=2)

    @staticmethod
    def dilated(
        seqlen_q: int,
        seqlen_k: int,
        blocks: int,
        dilation: int,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """A window with gaps (Longformer, Beltagy et al. 2020), in blocks: row r sees columns r, r +- dilation, ..., of
        which there are ``blocks`` on each side. Row and column count from the first query and key.

        Args:
            seqlen_q, seqlen_k: the lengths.
            blocks: on each side.
            dilation: from one to the next; 1 leaves no gap.
            block_size: (block_m, block_n), as for ``from_dense``.
            causal: also nothing to the right of the diagonal that ends at the last query and key.
            device: of the result.

        Returns:
            A ``BlockMask`` for all batch entries and heads.

        Raises:
            ValueError: a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        blocks, dilation = as_size("blocks", blocks), as_integer("dilation", dilation)
        if dilation < 1:
            raise ValueError(f"dilation must be >= 1, got {dilation}")
        row, column = _block_numbers(seqlen_q, seqlen_k, block_size, device)
        distance = (row - column).abs()
        seen = (distance % dilation == 0) & (distance <= blocks * dilation)
        return _trimmed(seen, seqlen_q, seqlen_k, block_size, causal)

    @staticmethod
    def strided(
        seqlen_q: int,
        seqlen_k: int,
        local_blocks: int,
        stride: int,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """Neighbours, and every so many blocks of keys (Sparse Transformers, Child et al. 2019): row r sees the columns
        from r - local_blocks to r + local_blocks, and stride - 1, 2 stride - 1, ...

        Args:
            seqlen_q, seqlen_k: the lengths.
            local_blocks: on each side.
            stride: of the columns that all rows see.
            block_size, causal, device: as for ``dilated``.

        Returns:
            A ``BlockMask`` for all batch entries and heads.

        Raises:
            ValueError: a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        local_blocks, stride = as_size("local_blocks", local_blocks), as_integer("stride", stride)
        if stride < 1:
            raise ValueError(f"stride must be >= 1, got {stride}")
        row, column = _block_numbers(seqlen_q, seqlen_k, block_size, device)
        seen = ((row - column).abs() <= local_blocks) | (column % stride == stride - 1)
        return _trimmed(seen, seqlen_q, seqlen_k, block_size, causal)

    @staticmethod
    def random(
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
    ) -> BlockMask:
        """Random blocks, as many in each row (BigBird, Zaheer et al. 2020).

        Args:
            seqlen_q, seqlen_k: the lengths.
            blocks: in a row; all where there are fewer.
            batch, heads: 1 where the mask is the same for all.
            generator: whose random numbers; None: torch's own.
            block_size, causal, device: as for ``dilated``.

        Returns:
            A ``BlockMask``.

        Raises:
            ValueError: a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        blocks, batch, heads = as_size("blocks", blocks), as_size("batch", batch), as_size("heads", heads)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {describe(generator)}")
        row, column = _block_numbers(seqlen_q, seqlen_k, block_size, device)
        scores = torch.rand(batch, heads, len(row), column.shape[1], generator=generator, device=device)
        return _trimmed(_highest(scores, blocks), seqlen_q, seqlen_k, block_size, causal)

    @staticmethod
    def top_k(
        q: Tensor,
        k: Tensor,
        blocks: int,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
    ) -> BlockMask:
        """The blocks of keys that fit best to each block of queries, by the product of their means.

        Args:
            q: (batch, seqlen_q, heads_q, head_dim).
            k: (batch, seqlen_k, heads_kv, head_dim), heads_kv divides heads_q.
            blocks: in a row; all where there are fewer.
            block_size: (block_m, block_n), as for ``from_dense``.
            causal: also nothing to the right of the diagonal that ends at the last query and key; blocks behind it are
                not chosen, and the one that it ends in always is.

        Returns:
            A ``BlockMask`` for each batch entry and query head. It has no gradient.

        Raises:
            ValueError: q or k is of another shape, or a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        check_tensors(q=q, k=k)
        blocks, causal = as_size("blocks", blocks), as_flag("causal", causal)
        if q.dim() != 4 or k.dim() != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
            raise ValueError(
                "q and k must be (batch, seqlen, heads, head_dim) with one batch and head_dim, "
                f"got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
            raise ValueError(f"k must have heads that divide those of q, {q.shape[2]}, got {k.shape[2]}")
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        row, column = _block_numbers(seqlen_q, seqlen_k, block_size, q.device)
        with torch.no_grad():
            means = _pooled(q, block_size[0]), _pooled(k, block_size[1]).repeat_interleave(q.shape[2] // k.shape[2], 2)
            scores = torch.einsum("bqhd,bkhd->bhqk", *means)
            if causal:
                last = (
                    ((row + 1) * block_size[0]).clamp_max(seqlen_q) - 1 + seqlen_k - seqlen_q
                )  # key of the last query
                diagonal = last // block_size[1]
                scores = scores.masked_fill(column > diagonal, -torch.inf).masked_fill(column == diagonal, torch.inf)
            seen = _highest(scores, blocks)
        return _trimmed(seen, seqlen_q, seqlen_k, block_size, causal)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex())


def _block_numbers(
    seqlen_q: int, seqlen_k: int, block_size: tuple[int, int], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Rows (rows, 1) and columns (1, columns) of blocks."""
    block_m, block_n = _as_block_size(block_size)
    seqlen_q, seqlen_k = as_size("seqlen_q", seqlen_q), as_size("seqlen_k", seqlen_k)
    check_device(device)
    rows, columns = block_lists.ceil_div(seqlen_q, block_m), block_lists.ceil_div(seqlen_k, block_n)
    return torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None]


def _trimmed(blocks: Tensor, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int], causal: bool) -> BlockMask:
    mask = BlockMask.from_blocks(blocks, seqlen_q, seqlen_k, block_size)
    if not as_flag("causal", causal):
        return mask
    return mask & BlockMask.causal(seqlen_q, seqlen_k, block_size, device=blocks.device)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Which of the last dimension are the `count` highest, but for -inf."""
    best = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (scores > -torch.inf)


def _pooled(tokens: Tensor, block: int) -> Tensor:
    """Means of blocks of tokens: float (batch, blocks, heads, head_dim)."""
    seqlen = tokens.shape[1]
    padded = torch.nn.functional.pad(tokens.float(), (0, 0, 0, 0, 0, -seqlen % block)).unflatten(1, (-1, block))
    blocks = torch.arange(padded.shape[1], device=tokens.device)
    return padded.sum(2) / (seqlen - blocks * block).clamp(1, block)[:, None, None]


def _of_lists(lists: block_lists.Lists, seqlen_q: int, seqlen_k: int) -> BlockMask:
    return BlockMask(*lists, seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def _no_bitmaps(block_size: tuple[int, int], like: Tensor) -> Tensor:
    return torch.zeros(0, block_size[0], block_size[1] // 32, dtype=torch.int32, device=like.device)


def _of_intervals(
    begin: Tensor,
    end: Tensor,
    before: Tensor | None,
    seqlen_k: int,
    block_size: tuple[int, int],
    edges: int,
    jumps: int = 0,
) -> BlockMask:
    """Queries see the keys [begin, end) and [0, before), int64 (batch, seqlen_q) each, for all heads.

    Args:
        edges: how many of these move by a key a query at most, or not at all.
        jumps: how often one moves further, within a row of blocks.
    """
    begin, end = begin.clamp(0, seqlen_k), end.clamp(0, seqlen_k)
    if before is not None:  # where both touch, they become one
        before = before.clamp(0, seqlen_k)
        touch = before >= begin
        begin, end = begin.where(~touch, 0), torch.where(touch, torch.maximum(before, end), end)
        before = before.where(~touch, 0)
    # A block with an edge and the one behind it; an edge moves through so many blocks and one.
    most_bitmaps = edges * (block_lists.ceil_div(block_size[0], block_size[1]) + 2) + 2 * jumps
    intervals = block_lists.Intervals(begin, end, before)
    lists = block_lists.from_intervals(intervals, seqlen_k, block_size, max(most_bitmaps, 1))
    return _of_lists(lists, begin.shape[1], seqlen_k)


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


def _fill_up(blocks: Tensor, block_m: int) -> Tensor:
    """bool (n, rows <= block_m, block_n) with rows of False up to block_m."""
    return torch.nn.functional.pad(blocks, (0, 0, 0, block_m - blocks.shape[1]))
