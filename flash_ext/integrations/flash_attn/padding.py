"""``flash_attn.bert_padding``: ``flash_ext``'s, and what else is imported from it."""

from __future__ import annotations

from torch import Tensor

from flash_ext.argument_checks import as_size, check_tensors
from flash_ext.bert_padding import (
    check_indices,
    index_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

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
    check_tensors(values=values, indices=indices)
    check_indices(indices)
    rows = values.new_zeros(as_size("first_axis_dim", first_axis_dim), *values.shape[1:])
    return rows.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(input's rows at indices, input)."""
    return index_first_axis(input, indices), input
