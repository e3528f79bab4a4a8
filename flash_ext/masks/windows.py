"""Builders of block masks whose edges move by a key a query."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flash_ext.argument_checks import as_flag, as_size, check_device, check_window
from flash_ext.masks.intervals import Blocks, Room, Window, lists_of_intervals
from flash_ext.masks.lists import Lists, ceil_div
from flash_ext.masks.mask import Mask, as_blocks

if TYPE_CHECKING:
    from typing_extensions import Self


class WindowBuilders(Mask):
    @classmethod
    def causal(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        block_size: tuple[int, int] = (128, 128),
        *,
        top_left: bool = False,
        device: torch.device | str = "cpu",
    ) -> Self:
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
        return cls.sliding_window(seqlen_q, seqlen_k, (-1, 0), block_size=block_size, top_left=top_left, device=device)

    @classmethod
    def sliding_window(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window_size: tuple[int, int],
        num_global: int = 0,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
        top_left: bool = False,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The window of ``attention``, and some tokens at the start that see all and are seen by all (Longformer,
        Beltagy et al. 2020; with ``causal`` or a right window of 0: the attention sinks of StreamingLLM, Xiao et al.
        2023).

        Args:
            window_size: (left, right), as for ``attention``; -1 = unlimited.
            num_global: of those tokens. A query that the diagonal puts before the first key is none of them.
            causal: also nothing to the right of the diagonal.

        The others: as for ``causal``.

        Returns:
            A ``BlockMask`` for all batch entries and heads.

        Raises:
            ValueError: a number that is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        left, right = check_window(window_size)
        if left < -1 or right < -1:
            raise ValueError(f"window_size must be (left, right), each >= -1 (-1 = unlimited), got {window_size!r}")
        blocks = as_blocks(seqlen_q, seqlen_k, block_size)
        num_global = min(as_size("num_global", num_global), blocks.seqlen_k)
        top_left, causal = as_flag("top_left", top_left), as_flag("causal", causal) or right == 0
        check_device(device)
        offset = 0 if top_left else blocks.seqlen_k - blocks.seqlen_q
        # An edge that no query has within the keys is none.
        most = blocks.seqlen_q + blocks.seqlen_k
        to_left = left if 0 <= left < most else None
        to_right = 0 if causal else right if 0 <= right < most else None
        window = Window(to_left, to_right, num_global, causal)
        return cls._of_lists(lists_of_window(window, offset, blocks, device), blocks.seqlen_q, blocks.seqlen_k)


def lists_of_causal(blocks: Blocks, device: torch.device | str) -> Lists:
    """With the diagonal ending at the last query and key."""
    return lists_of_window(Window(None, 0, 0, True), blocks.seqlen_k - blocks.seqlen_q, blocks, device)


def lists_of_window(window: Window, offset: int, blocks: Blocks, device: torch.device | str) -> Lists:
    """Query i is at position i + offset."""
    no_bounds = torch.empty(0, dtype=torch.int32, device=device)
    room = Room(_most_blocks(window, offset, blocks), _most_bitmaps(window, blocks))
    return lists_of_intervals("window", no_bounds, window, offset, blocks, room)


def _most_blocks(window: Window, offset: int, blocks: Blocks) -> int:
    """A bound on the blocks that are visited."""
    most = blocks.rows * blocks.columns
    room = most
    if window.left is not None and window.right is not None:
        room = blocks.most_between(window.left + window.right + 1)
        room += blocks.rows * ceil_div(window.num_global, blocks.block_n)
    if window.num_global > 0 and not window.is_causal:
        room += (ceil_div(window.num_global, blocks.block_m) + 1) * blocks.columns
    elif window.right is not None:
        room = min(room, blocks.most_below(offset + window.right + 1))
    return min(room, most)


def _most_bitmaps(window: Window, blocks: Blocks) -> int:
    """A bound on the bitmaps of a row: one for each column that an edge of the window crosses, and one for the column
    that the first keys end in."""
    edges = (window.left is not None) + (window.right is not None)
    if window.num_global > 0 and not window.is_causal:
        # Other rows see in part what tokens see in full that see all: between two edges all is alike.
        return edges * (blocks.crossed + 1) + 3
    return max(edges * blocks.crossed + (window.num_global > 0), 1)
