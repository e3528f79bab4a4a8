"""The way of flash-attn 2.8 between padded batches and packed sequences. Differentiable; the host reads the mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens that a padded batch holds.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integer, 1 = a token.
        unused_mask: (batch, seqlen), 1 = no token, but room is kept for it.

    Returns:
        (tokens (total, ...); indices int64 (total), their places in the flattened batch; cu_seqlens int32 (batch + 1);
        the longest sequence; seqused int32 (batch), how many of each are tokens).

    Raises:
        ValueError: a mask of another shape than (batch, seqlen), or neither bool nor integer.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    seqused = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() > 0 else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, seqused


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The reverse of ``unpad_input``.

    Args:
        hidden_states: (total, ...), the tokens.
        indices: int64 (total), their places in the flattened batch, as ``unpad_input`` returns them.
        batch, seqlen: of the padded batch.

    Returns:
        (batch, seqlen, ...), 0 where there is no token.

    Raises:
        RuntimeError, IndexError: torch's own, where indices do not fit the tokens or lie outside of the batch.
    """
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    expected = tuple(hidden_states.shape[:2])
    if tuple(mask.shape) != expected or mask.is_floating_point() or mask.is_complex():
        raise ValueError(
            f"{name} must be bool or integer with the first two sizes of hidden_states, {expected}, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Some rows of a tensor.

    Args:
        input: (rows, ...).
        indices: int32 or int64 (total).

    Returns:
        (total, ...), input's rows at indices.

    Raises:
        RuntimeError, IndexError: torch's own, where indices lie outside of the rows.
    """
    return input.index_select(0, indices)
