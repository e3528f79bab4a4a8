"""flash-attn's way between padded batches and packed sequences. Differentiable; the mask is read by the host."""

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
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    seqused = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() > 0 else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, seqused


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The reverse of ``unpad_input``: (total, ...) to (batch, seqlen, ...), 0 where there is no token."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` of ``input`` (rows, ...)."""
    return input.index_select(0, indices)
