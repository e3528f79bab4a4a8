"""Builders of block masks whose edges move by a key a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flash_ext.argument_checks import as_flag, as_size, check_device, check_window
from flash_ext.masks.intervals import FAR, Blocks, Edges, lists_of_edges
from flash_ext.masks.lists import Lists, ceil_div
from flash_ext.masks.mask import Mask, as_blocks

if TYPE_CHECKING:
    from typing_extensions import Self


class Window(NamedTuple):
    """A query at position p sees the keys from p - left to p + right and the first num_global ones, but, where it is
    causal, none behind p. Otherwise the tokens at the first num_global positions see all keys."""

    left: int | None  # None: unlimited
    right: int | None
    num_global: int
    is_causal: bool


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
    changes = _changes(window, offset, blocks, device)
    return lists_of_edges(_edges(window, offset, blocks, device), changes, blocks, _room(window, offset, blocks))


def _edges(window: Window, offset: int, blocks: Blocks, device: torch.device | str) -> Edges:
    begin = None if window.left is None else blocks.positions(offset - window.left, device)
    end = None if window.right is None else blocks.positions(offset + window.right + 1, device)
    if window.num_global > 0:
        begin, end, before = _with_global(window, offset, blocks, begin, end)
        if before is not None:
            return Edges([edge for edge in (before, begin, end) if edge is not None], sees_first=True)
    edges = [edge for edge in (begin, end) if edge is not None]
    return Edges(edges or [torch.full_like(blocks.positions(0, device), FAR)], sees_first=begin is None)


def _with_global(
    window: Window, offset: int, blocks: Blocks, begin: Tensor | None, end: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Edges (begin, end) beside the first keys, and the edge behind those, if there is a gap in between."""
    count = window.num_global
    if end is not None and not window.is_causal:
        # Those at the first positions see all.
        position = blocks.positions(offset, end.device)
        end = end.masked_fill((position >= 0) & (position < count), FAR)
    if begin is None:  # the window has the first keys, but where it ends before them
        return None, end if end is None or window.is_causal else end.clamp_(min=count), None
    begin = begin.clamp_(min=count)
    if end is None:
        return begin, None, torch.full_like(begin, count)
    before = end.clamp(max=count) if window.is_causal else torch.full_like(end, count)
    return begin, torch.maximum(begin, end), before


def _changes(window: Window, offset: int, blocks: Blocks, device: torch.device | str) -> Tensor:
    """int32 (1, rows, n): see ``lists_of_edges``."""
    left, right, count = window.left, window.right, window.num_global
    firsts = [-FAR] if left is None else [offset - left]
    firsts += [] if right is None else [offset + right + 1]
    # Behind the window there is nothing but what tokens see that see all.
    firsts += [FAR] if right is None or (count > 0 and not window.is_causal) else []
    changes = blocks.moving(firsts, device)
    if count == 0:
        return changes
    last = (count - 1) // blocks.block_n * blocks.block_n  # of the blocks of first keys
    first_keys = torch.arange(last, last + 2 * blocks.block_n, blocks.block_n, dtype=torch.int32, device=device)
    if last > 0:
        first_keys = torch.nn.functional.pad(first_keys, (1, 0))
    # The window of a query among them begins and ends before the last of them.
    return torch.cat([first_keys.expand(1, blocks.rows, -1), changes], 2).sort(-1).values


def _room(window: Window, offset: int, blocks: Blocks) -> int:
    """No fewer blocks than are visited."""
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
