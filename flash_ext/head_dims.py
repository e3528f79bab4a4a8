"""What the functions with other libraries' names do about head dims: they take any size that zeros can fill up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_ext.argument_checks import check_tensors

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8  # of the kernels


def check_head_dims(*groups: Mapping[str, Tensor]) -> None:
    """Raises unless the last dimensions are from 1 to 256 and equal within each group of named tensors.

    It must come before padding, which would make different sizes equal.
    """
    for group in groups:
        first, expected = "", 0
        for name, x in group.items():
            if type(x) is not Tensor or x.is_nested or x.layout is not torch.strided:
                check_tensors(**{name: x})
            shape = x.shape
            size = shape[-1] if shape else 0
            if not 1 <= size <= MAX_HEAD_DIM:
                raise RuntimeError(f"{name} must have a head_dim from 1 to {MAX_HEAD_DIM}, got shape {tuple(shape)}")
            if not first:
                first, expected = name, size
            if size != expected:
                raise RuntimeError(
                    f"{name} must have the head_dim of {first}: expected {expected} in the last dimension, "
                    f"got shape {tuple(shape)}"
                )


def pad_head_dim(x: Tensor) -> Tensor:
    """``x`` with zeros behind its last dimension up to the next size that kernels take, contiguous in that dimension.

    Scores do not change. F.pad alone would keep the memory order of what looks like channels_last.
    """
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    if missing:
        x = F.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def cut_head_dim(out: Tensor, head_dim: int) -> Tensor:
    """``out`` without what padding added. A slice of everything would still be another tensor to make."""
    return out if out.shape[-1] == head_dim else out[..., :head_dim]
