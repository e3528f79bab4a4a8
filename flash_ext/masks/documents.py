"""Builders of block masks whose edges follow what the tokens are: documents, prefixes, spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_ext.argument_checks import as_flag, as_size, check_tensors
from flash_ext.masks.dense import lists_of_mask_mod
from flash_ext.masks.intervals import Blocks, Room, Window, lists_of_intervals
from flash_ext.masks.lists import Lists
from flash_ext.masks.mask import Mask, as_block_size, as_blocks, is_integer
from flash_ext.tracing import can_read

if TYPE_CHECKING:
    from typing_extensions import Self


class DocumentBuilders(Mask):
    @classmethod
    def document(
        cls,
        ids_q: Tensor,
        ids_k: Tensor | None = None,
        block_size: tuple[int, int] = (128, 128),
        *,
        causal: bool = False,
    ) -> Self:
        """Queries see the keys of their own document. The host waits for a GPU.

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
        _check_document_ids(ids_q, ids_k)
        documents_q, documents_k = torch.atleast_2d(ids_q), torch.atleast_2d(ids_k)
        (batch, seqlen_q), seqlen_k = documents_q.shape, documents_k.shape[1]

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = (documents_q[b, i] == documents_k[b, j]) & (documents_q[b, i] >= 0)
            return same & (j <= i + seqlen_k - seqlen_q) if causal else same

        blocks = Blocks(seqlen_q, seqlen_k, *as_block_size(block_size))
        return cls._of_lists(lists_of_mask_mod(visible, blocks, (batch, 1), ids_q.device), seqlen_q, seqlen_k)

    @classmethod
    def documents(
        cls, cu_seqlens: Tensor, seqlen: int, block_size: tuple[int, int] = (128, 128), *, causal: bool = False
    ) -> Self:
        """Documents that stand one after the other in a sequence: tokens see those of their own.

        Args:
            cu_seqlens: int32 or int64 (documents + 1), where they begin, ascending, and where the last one ends. Tokens
                behind that see nothing and are seen by nobody. Its values are checked on a CPU.
            seqlen: of the sequence, queries and keys.
            block_size: (block_m, block_n), as for ``from_dense``.
            causal: also nothing behind themselves.

        Returns:
            A ``BlockMask`` on the device of ``cu_seqlens``, for all batch entries and heads.

        Raises:
            ValueError: cu_seqlens is of another dtype or shape or does not ascend within the sequence, or a number that
                is not allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        check_tensors(cu_seqlens=cu_seqlens)
        causal, seqlen, block_size = as_flag("causal", causal), as_size("seqlen", seqlen), as_block_size(block_size)
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
            raise ValueError(
                f"cu_seqlens must be int32 or int64 (documents + 1), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            )
        _check_boundaries(cu_seqlens, seqlen)
        return cls._of_lists(
            lists_of_documents(cu_seqlens, Blocks(seqlen, seqlen, *block_size), causal), seqlen, seqlen
        )

    @classmethod
    def prefix_lm(cls, prefix: Tensor, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int] = (128, 128)) -> Self:
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
        blocks = as_blocks(seqlen_q, seqlen_k, block_size)
        if prefix.dim() != 1 or not is_integer(prefix):
            raise ValueError(f"prefix must be integer (batch|1), got {prefix.dtype} {tuple(prefix.shape)}")
        offset = blocks.seqlen_k - blocks.seqlen_q
        room = Room(len(prefix) * blocks.rows * blocks.columns, blocks.crossed)
        lists = lists_of_intervals("prefix", prefix, Window(right=0), offset, blocks, room)
        return cls._of_lists(lists, blocks.seqlen_q, blocks.seqlen_k)

    @classmethod
    def bidirectional_spans(cls, spans: Tensor, seqlen: int, block_size: tuple[int, int] = (128, 128)) -> Self:
        """Causal, but that tokens of a span, such as those of an image, see all of it.

        Args:
            spans: integer (num_spans, 2) or (batch, num_spans, 2): the first token of each and the one after the last.
                They must not overlap, which is checked on a CPU; one that ends where it begins is none.
            seqlen: of the sequence, queries and keys.
            block_size: (block_m, block_n), as for ``from_dense``.

        Returns:
            A ``BlockMask`` on the device of ``spans``, for all heads.

        Raises:
            ValueError: spans is of another dtype or shape, spans overlap or leave the sequence, or a number that is not
                allowed.
            TypeError: an argument is of a type that it cannot have.
        """
        check_tensors(spans=spans)
        seqlen, block_size = as_size("seqlen", seqlen), as_block_size(block_size)
        if spans.dim() not in (2, 3) or spans.shape[-1] != 2 or not is_integer(spans):
            raise ValueError(
                f"spans must be integer (num_spans, 2) or (batch, num_spans, 2), got {spans.dtype} {tuple(spans.shape)}"
            )
        spans = spans if spans.dim() == 3 else spans[None]
        _check_spans(spans, seqlen)
        return cls._of_lists(lists_of_spans(spans, Blocks(seqlen, seqlen, *block_size)), seqlen, seqlen)


def lists_of_documents(cu_seqlens: Tensor, blocks: Blocks, causal: bool) -> Lists:
    # Columns that documents of the row's first and last queries begin and end in, and what lies in between.
    room = (
        Room(blocks.most_below(1), blocks.crossed + 2)
        if causal
        else Room(blocks.rows * blocks.columns, blocks.crossed + 4)
    )
    return lists_of_intervals("documents", cu_seqlens, Window(right=0 if causal else None), 0, blocks, room)


def lists_of_spans(spans: Tensor, blocks: Blocks) -> Lists:
    # Columns that the last query's span ends in, and what lies before that.
    room = Room(len(spans) * blocks.rows * blocks.columns, blocks.crossed + 2)
    return lists_of_intervals("spans", spans, Window(right=0), 0, blocks, room)


def _check_boundaries(cu_seqlens: Tensor, seqlen: int) -> None:
    if not can_read(cu_seqlens):
        return
    if bool((cu_seqlens.diff() < 0).any()) or int(cu_seqlens[0]) < 0 or int(cu_seqlens[-1]) > seqlen:
        raise ValueError(
            f"cu_seqlens must ascend from 0 or above to at most seqlen = {seqlen}, got {_shown(cu_seqlens)}"
        )


def _check_spans(spans: Tensor, seqlen: int) -> None:
    """``spans`` is (batch, num_spans, 2)."""
    if not can_read(spans):
        return
    begin, end = spans.long().unbind(-1)
    empty = begin == end  # none, wherever it is: put last
    begin, order = begin.masked_fill(empty, seqlen).sort(dim=1)
    end = end.masked_fill(empty, seqlen).gather(1, order)
    # Each begins in the sequence, not before the one that comes before it has ended.
    wrong = (begin < 0) | (begin > end) | (end > seqlen)
    wrong[:, 1:] |= end[:, :-1] > begin[:, 1:]
    if bool(wrong.any()):
        i = int(wrong.any(dim=1).nonzero()[0])
        raise ValueError(
            f"spans must begin and end within 0 and seqlen = {seqlen} and not overlap, got {_shown(spans[i])} for "
            f"batch entry {i}"
        )


def _shown(values: Tensor) -> str:
    """The first of them."""
    most = 16
    return f"{values[:most].tolist()}" + (f" and {len(values) - most} more" if len(values) > most else "")


def _check_document_ids(ids_q: Tensor, ids_k: Tensor) -> None:
    for name, ids in (("ids_q", ids_q), ("ids_k", ids_k)):
        if not is_integer(ids):
            raise ValueError(f"{name} must be integer, got {ids.dtype}")
    if ids_k.device != ids_q.device:
        raise ValueError(f"ids_k must be on the device of ids_q, {ids_q.device}, got {ids_k.device}")
    if ids_q.dim() != ids_k.dim() or ids_q.dim() not in (1, 2) or ids_q.shape[:-1] != ids_k.shape[:-1]:
        raise ValueError(
            "ids_q and ids_k must be (seqlen) or (batch, seqlen) with the same batch, "
            f"got {tuple(ids_q.shape)} and {tuple(ids_k.shape)}"
        )
