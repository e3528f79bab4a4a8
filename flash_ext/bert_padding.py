"""The way of flash-attn 2.8 between padded batches and packed sequences. Differentiable; the host reads the mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_ext.argument_checks import as_size, check_tensors


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens that a padded batch holds.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integer, not 0 = a token.
        unused_mask: (batch, seqlen), not 0 = no token, but room is kept for it.

    Returns:
        (tokens (total, ...); indices int64 (total), their places in the flattened batch; cu_seqlens int32 (batch + 1);
        the longest sequence; seqused int32 (batch), how many of each are tokens).

    Raises:
        ValueError: a mask of another shape than (batch, seqlen), or neither bool nor integer.
        TypeError: an argument is no tensor.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
    tokens = attention_mask != 0  # which a sum of integers would not count: they may be 2 or -1, or add up to 0
    kept = tokens if unused_mask is None else tokens | (unused_mask != 0)
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    seqused = tokens.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_boundaries(lengths), seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs a batch whose rows hold several sequences each, one behind the other from the row's start.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: integer (batch, seqlen): the lengths of a row's sequences, and zeros. A row of
            2, 3, 0, 0, 0, 0 holds a sequence of two tokens, one of three, and one place of padding.

    Returns:
        (tokens (total, ...); indices int64 (total), their places in the flattened batch; cu_seqlens int32
        (num_sequences + 1); the longest sequence).

    Raises:
        ValueError: attention_mask_in_length has another shape than (batch, seqlen), is not integer, holds a negative
            number, or more tokens than a row has places.
        TypeError: an argument is no tensor.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    if attention_mask_in_length.dtype == torch.bool:
        raise ValueError("attention_mask_in_length must hold lengths, integers, got torch.bool")
    seqlen = hidden_states.shape[1]
    tokens = attention_mask_in_length.sum(dim=-1, keepdim=True)
    if bool((attention_mask_in_length < 0).any() | (tokens > seqlen).any()):
        raise ValueError(
            f"attention_mask_in_length must hold lengths >= 0 that add up to at most seqlen = {seqlen} in each row, "
            f"got rows of {tokens.flatten().tolist()} tokens"
        )
    is_token = torch.arange(seqlen, device=tokens.device) < tokens
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    packed, indices, _, _, _ = unpad_input(hidden_states, is_token)
    return packed, indices, *_boundaries(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The reverse of ``unpad_input``.

    Args:
        hidden_states: (total, ...), the tokens.
        indices: int64 or int32 (total), their places in the flattened batch, as ``unpad_input`` returns them.
        batch, seqlen: of the padded batch.

    Returns:
        (batch, seqlen, ...), 0 where there is no token.

    Raises:
        ValueError: indices is no list of as many integers as there are tokens, or batch or seqlen is negative.
        RuntimeError, IndexError: torch's own, where indices lie outside of the batch.
        TypeError: an argument is of a type that it cannot have.
    """
    check_tensors(hidden_states=hidden_states, indices=indices)
    check_indices(indices)
    batch, seqlen = as_size("batch", batch), as_size("seqlen", seqlen)
    if hidden_states.dim() < 1 or len(hidden_states) != len(indices):
        raise ValueError(
            f"indices must have one entry for each of hidden_states' tokens, got shapes {tuple(indices.shape)} and "
            f"{tuple(hidden_states.shape)}"
        )
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices.long(), hidden_states).unflatten(0, (batch, seqlen))


def _boundaries(lengths: Tensor) -> tuple[Tensor, int]:
    """cu_seqlens and the longest of sequences with these lengths."""
    longest = int(lengths.max()) if lengths.numel() > 0 else 0
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), longest


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_tensors(**{"hidden_states": hidden_states, name: mask})
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states must be (batch, seqlen, ...), got shape {tuple(hidden_states.shape)}")
    expected = tuple(hidden_states.shape[:2])
    if tuple(mask.shape) != expected or mask.is_floating_point() or mask.is_complex():
        raise ValueError(
            f"{name} must be bool or integer with the first two sizes of hidden_states, {expected}, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )


def check_indices(indices: Tensor) -> None:
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
        raise ValueError(f"indices must be int32 or int64 (total), got {indices.dtype} {tuple(indices.shape)}")


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Some rows of a tensor.

    Args:
        input: (rows, ...).
        indices: int32 or int64 (total).

    Returns:
        (total, ...), input's rows at indices.

    Raises:
        ValueError: indices is no list of integers, or input has no rows.
        RuntimeError, IndexError: torch's own, where indices lie outside of the rows.
        TypeError: an argument is no tensor.
    """
    check_tensors(input=input, indices=indices)
    check_indices(indices)
    if input.dim() < 1:
        raise ValueError("input must be (rows, ...), got shape ()")
    return input.index_select(0, indices)
