"""What torch does not promise and this library has to know: each name of torch's stands here once, with a test.

Nothing here imports what ``import torch`` does not: whoever has an object of one of these classes has its module too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TORCH_SDPA = torch._C._nn.scaled_dot_product_attention
"""``F.scaled_dot_product_attention`` as long as nobody has put another function in its place."""

CAUSAL_BIAS = "torch.nn.attention.bias.CausalBias"
DTENSOR = "torch.distributed.tensor.DTensor"
FLEX_BLOCK_MASK = "torch.nn.attention.flex_attention.BlockMask"
MASKED_TENSOR = "torch.masked.maskedtensor.core.MaskedTensor"
NESTED_TENSOR = "torch.nested._internal.nested_tensor.NestedTensor"


def is_instance(value: object, name: str) -> bool:
    """``isinstance`` of a class by its full name."""
    return any(full_name(cls) == name for cls in type(value).__mro__)


def full_name(cls: type) -> str:
    """With the module, but for Python's own: ``torch.Tensor``, ``int``."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def in_context_parallel() -> bool:
    """Whether a ``context_parallel`` of torch.distributed is active: it puts a function of its own in the place of
    torch's. Somebody else's may stand there for good."""
    current = F.scaled_dot_product_attention
    return current is not TORCH_SDPA and str(getattr(current, "__module__", "")).startswith("torch.distributed.")
