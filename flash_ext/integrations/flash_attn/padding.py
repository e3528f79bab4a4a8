"""``flash_attn.bert_padding``: ``flash_ext``'s, and what else is imported from it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_ext.bert_padding import index_first_axis, pad_input, unpad_input

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with values (total, ...) in the rows at indices (total), 0 in the others."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(input's rows at indices, input)."""
    return index_first_axis(input, indices), input


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """``unpad_input`` of rows that hold several sequences one after another.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: integer (batch, seqlen): the lengths of a row's sequences, then zeros.

    Returns:
        (tokens (total, ...); indices int64 (total); cu_seqlens int32 (sequences + 1); the longest sequence).
    """
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths > 0]
    seqlen = attention_mask_in_length.shape[-1]
    used = attention_mask_in_length.sum(dim=-1, keepdim=True)
    is_token = torch.arange(seqlen, device=used.device) < used
    indices = is_token.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
