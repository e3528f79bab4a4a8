"""Whether values of a tensor may be read: not where that would wait for a device or stop whoever traces."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_ext.torch_private import is_fake_mode, is_proxy_tracing, is_tracing, is_vmapped


def can_read(x: Tensor) -> bool:
    """Whether the host can read values of ``x`` without waiting: not on a GPU, not of a fake or meta tensor, and not
    while a compiler, a tracer or vmap looks. Where it cannot, a bound must do."""
    if torch.compiler.is_compiling():
        return False  # first, because a compiler cannot look into what follows
    if x.device.type != "cpu" or type(x) not in (Tensor, Parameter):
        return False
    return not (is_tracing() or is_proxy_tracing() or is_fake_mode() or is_vmapped(x))
