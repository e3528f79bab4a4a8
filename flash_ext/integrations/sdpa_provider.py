"""``torch.nn.functional.scaled_dot_product_attention`` and all that stands on it, computed by this library.

``activate()`` puts kernels of this library where torch's dispatcher has its own; the model's code stays as it is.
What they do not support goes on to torch's kernel, which is kept beside them. Two layers are replaced, for two reasons.

**aten's fused operators** (``aten_attention``): flash, efficient, cuDNN and the CPU's flash with their backwards, and the
operators on packed sequences that nested tensors and ``torch.nn.attention.varlen`` call. torch decides by its own rules
which of them a call goes to, so ``sdpa_kernel(...)``, the switches of ``torch.backends.cuda`` and their order hold as
ever. Calls keep their names: DTensor's rules, ``context_parallel``, activation checkpointing by operator, FLOP counters
and compilers see the operators they know, and torch's own autograd formulas and meta functions stay in force. Compiled
and exported programs look kernels up when they run, and so find these, and torch's own again after ``deactivate()``.

**scaled_dot_product_attention itself** (``sdpa_routing``), for calls that the fused operators cannot carry:

- what torch would compute by its unfused math because no backend of its own takes it: dropout on a CPU, a mask that
  needs a gradient there, a v of another head_dim, broadcast batches, three dimensions, heads in groups with a mask. If
  math was asked for, by ``sdpa_kernel(SDPBackend.MATH)`` or by its place in the order, torch computes it.
- dropout, see ``aten_attention``. The random numbers come from torch's generators, but others than torch draws of them.
- bool masks, which torch would turn into numbers that are added (for cuDNN -65504 and not -inf, and then a query that
  sees nothing gets a mean of values), and on CUDA floating ones, which it would pad and repeat for each batch and head:
  the gradient of one bias for a whole batch would be made for each sample first. Where a ``TorchDispatchMode`` looks on,
  as in a compiler or selective checkpointing, masks go through torch's operators nevertheless.

Rejected: overriding ``_fused_sdp_choice`` has no effect, as torch asks a table behind it; overriding
``_scaled_dot_product_attention_math`` would give its direct callers, who want its second result, the attention weights,
something else; replacing the Python function misses calls from C++ and those who imported it before.

Tensor subclasses with a ``__torch_dispatch__`` of their own, transforms of ``torch.func``, forward-mode derivatives and
exporters get torch's implementation, whose fused operators then come here or not. So do calls under
``torch.inference_mode``, which pass by the key of autograd, where the function is replaced; under ``torch.no_grad`` they
do not. Second derivatives are not supported: where torch would have computed by math, ask for that.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.nn.attention import _registry

NAME = "flash_ext"  # in torch's registry of flash attention implementations

calls_served: Counter[str] = Counter()  # by operator, since the process started
calls_passed_on: Counter[str] = Counter()  # to torch's kernel

# Of aten's operators, by device, the name of our kernel in aten_attention. Those that a torch lacks are left out. A CPU
# gets the operators on packed sequences too, which torch has for CUDA alone.
_PACKED = {
    "_flash_attention_forward": "packed_flash_forward",
    "_flash_attention_forward_no_dropout_inplace": "packed_flash_forward_into",
    "_flash_attention_backward": "packed_flash_backward",
}
KERNELS = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": "cpu_forward",
        "_scaled_dot_product_flash_attention_for_cpu_backward": "cpu_backward",
        **_PACKED,
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": "flash_forward",
        "_scaled_dot_product_flash_attention_backward": "flash_backward",
        "_scaled_dot_product_efficient_attention": "efficient_forward",
        "_scaled_dot_product_efficient_attention_backward": "efficient_backward",
        "_scaled_dot_product_cudnn_attention": "cudnn_forward",
        "_scaled_dot_product_cudnn_attention_backward": "cudnn_backward",
        "_efficient_attention_forward": "packed_efficient_forward",
        "_efficient_attention_backward": "packed_efficient_backward",
        **_PACKED,
    },
}
_SDPA = "scaled_dot_product_attention"


# ---- What people call -----------------------------------------------------------------------------------------------


def activate() -> None:
    """From now on ``F.scaled_dot_product_attention`` and all that stands on it run by this library.

    That is ``nn.MultiheadAttention``, ``nn.TransformerEncoderLayer`` and every model that calls torch's function, on
    CUDA and on a CPU, forward and backward: masks, biases with gradient, float32, dropout, heads in groups, a v of
    another head_dim. What is not supported runs by torch as before. ``sdpa_kernel(...)`` holds: who restricts calls to
    math gets torch's math. Twice is as good as once. Another implementation in torch's registry of flash attention is
    replaced, as ``torch.nn.attention.activate_flash_attention_impl("flash_ext")``, which is the same, would do it.

    What ``torch.compile`` compiled before keeps the way that it was compiled for, where that was not one of torch's fused
    operators; ``torch.compiler.reset()`` compiles anew.
    """
    if not is_active():
        _registry.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Torch's own kernels are back. Without ``activate()`` before, nothing happens."""
    if is_active():
        _restore()


@contextmanager
def activated() -> Iterator[None]:
    """``activate()`` for the time of a ``with`` block; what was active before is active again afterwards.

    It holds for the whole process, other threads included. The backward of what ran inside may run outside.
    """
    before = _registry.current_flash_attention_impl()
    activate()
    try:
        yield
    finally:
        if before != NAME:
            deactivate()
            if before is not None:
                _registry.activate_flash_attention_impl(before)


def is_active() -> bool:
    """Whether torch's kernels are replaced now."""
    return Activation.current is not None


# ---- In torch's dispatcher ------------------------------------------------------------------------------------------


class Activation:
    """The kernels in place of torch's, until ``remove()``: a handle of torch's registry."""

    current: Activation | None = None

    def __init__(self) -> None:
        self.overridden: list[tuple[str, str]] = []  # (operator, dispatch key)
        self._library = torch.library.Library("aten", "IMPL")
        try:
            for key in ("CPU", "CUDA"):
                if torch._C._dispatch_has_kernel_for_dispatch_key("flash_ext::attention_backward", key):
                    self._override(key)
        except BaseException:
            self._library._destroy()
            raise
        self._forget_dispatch()
        _tag_caches(True)
        Activation.current = self

    def remove(self) -> None:
        if Activation.current is not self:
            return
        self._library._destroy()
        self._forget_dispatch()
        _tag_caches(False)
        Activation.current = None

    def _override(self, key: str) -> None:
        from flash_ext.integrations import aten_attention

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for operator, kernel in KERNELS[key].items():
                if hasattr(torch.ops.aten, operator):
                    self._put(operator, key, _with_torchs(operator, key, getattr(aten_attention, kernel)))
            # Not at the device's own key: what has a kernel there is no composition to torch's tracers any more, and
            # exported programs would keep it whole.
            self._put(_SDPA, f"Autograd{key}", _routed(key))

    def _put(self, operator: str, key: str, kernel: Callable[..., Any]) -> None:
        self._library.impl(operator, kernel, key)
        self.overridden.append((operator, key))

    def _forget_dispatch(self) -> None:
        """Tracers remember on each operator where it goes."""
        for operator, _ in self.overridden:
            getattr(torch.ops.aten, operator).default._dispatch_cache.clear()


def _with_torchs(operator: str, key: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Our kernel, and torch's for what it does not support."""
    qualified = f"aten::{operator}"
    torchs = None
    if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key):
        torchs = torch.library.get_kernel(qualified, key).call_boxed
    keys = DispatchKeySet(torch._C.DispatchKey.__members__[key])

    def run(*args: Any, **kwargs: Any) -> Any:
        results = kernel(*args, **kwargs)
        if results is not NotImplemented:
            calls_served[operator] += 1
            return results
        if torchs is None:
            raise NotImplementedError(
                f"{qualified}: torch has no {key} kernel, and flash_ext does not support these arguments"
            )
        calls_passed_on[operator] += 1
        return torchs(keys, *args, **kwargs)

    return run


def _routed(device_key: str) -> Callable[..., Any]:
    """The same for scaled_dot_product_attention."""
    from flash_ext.integrations.sdpa_routing import serve

    autograd_key = torch._C.DispatchKey.__members__[f"Autograd{device_key}"]
    torchs = torch.library.get_kernel(f"aten::{_SDPA}", autograd_key).call_boxed
    keys = DispatchKeySet(autograd_key)
    device_type = device_key.lower()

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        out = serve(device_type, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if out is NotImplemented:
            return torchs(keys, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        calls_served[_SDPA] += 1
        return out

    return run


def _tag_caches(active: bool) -> None:
    """What is compiled while active must not be found in torch's caches on disk by those who are not, and neither the
    other way round: the function that is compiled looks the same."""
    config = torch.compiler.config
    tag = f"+{NAME}"
    plain = config.cache_key_tag.replace(tag, "")
    config.cache_key_tag = plain + tag if active else plain


# ---- In torch's registry --------------------------------------------------------------------------------------------


def _restore() -> None:
    if _registry.current_flash_attention_impl() != NAME:  # another one took the name over, without asking us to leave
        if Activation.current is not None:
            Activation.current.remove()
    elif hasattr(_registry, "restore_flash_attention_impl"):
        _registry.restore_flash_attention_impl()
    else:  # torch 2.10 can only be told so
        assert Activation.current is not None
        Activation.current.remove()
        _registry._FLASH_ATTENTION_ACTIVE = None


def register() -> None:
    """Enters ``flash_ext`` in torch's registry, without activating it."""
    _registry.register_flash_attention_impl(NAME, register_fn=Activation)


register()
