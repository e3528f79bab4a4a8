"""The private names of torch that this library uses: each stands here once, with a test.

Nothing here imports what ``import torch`` does not: whoever has an object of one of these classes has its module too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch._functorch.utils import enable_single_level_autograd_function as enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.nn.attention import _registry
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map_only as tree_map_only

# ---- Classes by their full names ------------------------------------------------------------------------------------

CAUSAL_BIAS = "torch.nn.attention.bias.CausalBias"
DTENSOR = "torch.distributed.tensor.DTensor"
FLEX_BLOCK_MASK = "torch.nn.attention.flex_attention.BlockMask"
MASKED_TENSOR = "torch.masked.maskedtensor.core.MaskedTensor"
NESTED_TENSOR = "torch.nested._internal.nested_tensor.NestedTensor"

TRACERS = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")
"""Modules of the tensors that stand for others while somebody traces."""


def is_instance(value: object, name: str) -> bool:
    """``isinstance`` of a class by its full name."""
    return any(full_name(cls) == name for cls in type(value).__mro__)


def full_name(cls: type) -> str:
    """With the module, but for Python's own: ``torch.Tensor``, ``int``."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


# ---- Who has to see a call ------------------------------------------------------------------------------------------

is_tracing = torch._C._is_tracing
"""Whether ``torch.jit.trace`` records."""

is_functorch_wrapped, is_batched = torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.is_batchedtensor
unwrapped = torch._C._functorch.get_unwrapped


def is_vmapped(x: Any) -> bool:
    """Whether a tensor stands for one for each sample of a vmap, at whatever level of torch.func."""
    while is_functorch_wrapped(x):
        if is_batched(x):
            return True
        x = unwrapped(x)
    return False


def is_proxy_tracing() -> bool:
    """Whether ``make_fx`` records."""
    key = torch._C._TorchDispatchModeKey.PROXY
    return (torch._C._get_dispatch_mode(key) or torch._ops._get_dispatch_mode_pre_dispatch(key)) is not None


def is_fake_mode() -> bool:
    """Whether a FakeTensorMode is active: it takes real tensors too, and makes fakes of what is computed."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


SingleLevelFunction = torch.autograd.function._SingleLevelFunction
"""What ``torch.autograd.Function`` derives from, and what runs below the transforms of torch.func."""

is_functorch_active = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func, vmap included, is active."""

num_dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many ``TorchDispatchMode`` there are."""

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
"""Of whatever device."""

any_requires_grad = torch._C._any_requires_grad
"""Whether one of these arguments is a tensor that requires a gradient."""

has_any_global_hook = _has_any_global_hook
"""Whether a hook is registered for all modules."""

without_torch_function = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` that does nothing."""


def is_forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken."""
    return forward_ad._current_level >= 0


set_forward_mode = forward_ad._set_fwd_grad_enabled
"""A context in which they are taken, or not."""


def script_instead(function: Any, other: Any) -> None:
    """Lets ``torch.jit.script`` compile ``other``, of the same name, where it meets ``function``; as
    ``script_if_tracing`` does."""
    vars(function)["__script_if_tracing_wrapper"] = True
    vars(function)["__original_fn"] = other


# ---- The dispatcher -------------------------------------------------------------------------------------------------

DispatchKey, DispatchKeySet = torch._C.DispatchKey, torch._C.DispatchKeySet

BelowAutograd = torch._C._AutoDispatchBelowAutograd
BelowInplaceOrView = torch._C._AutoDispatchBelowADInplaceOrView
"""Contexts in which a call begins behind these keys."""

KEYS_BELOW_AUTOGRAD = torch._C._after_autograd_keyset
KEYS_BELOW_INPLACE_OR_VIEW = torch._C._after_ADInplaceOrView_keyset

WithoutKeys = torch._C._ExcludeDispatchKeyGuard
"""A context in which a set of keys is passed over."""

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operator, "namespace::name", has a kernel of its own for a key."""


def arguments_of(op: Any) -> Any:
    """Those of an operator's schema: each has a ``name``, and a ``default_value`` if it ``has_default_value()``."""
    return op._schema.arguments


def form_of(schema: Any) -> tuple[list[tuple[str, str]], list[str]]:
    """Of a schema, the names and types of its arguments, and the types of its results."""
    arguments = [(argument.name, str(argument.type)) for argument in schema.arguments]
    return arguments, [str(result.type) for result in schema.returns]


def schema_of(op: Any) -> Any:
    return op._schema


parse_schema = torch._C.parse_schema
"""A schema from its text."""


def handle_of(op: Any) -> Any:
    """The handle by which the dispatcher calls an operator: it has ``redispatch_boxed``."""
    return op._handle


def forget_dispatch(op: Any) -> None:
    """Clears what the Python dispatcher, which tracers use, has cached on an operator."""
    op._dispatch_cache.clear()


# ---- SDPA -----------------------------------------------------------------------------------------------------------

TORCH_SDPA = torch._C._nn.scaled_dot_product_attention
"""``F.scaled_dot_product_attention`` as long as nobody has put another function in its place."""

is_flash_sdp_enabled = torch._C._get_flash_sdp_enabled
is_efficient_sdp_enabled = torch._C._get_mem_efficient_sdp_enabled
is_cudnn_sdp_enabled = torch._C._get_cudnn_sdp_enabled

sdp_priority_order = torch._C._get_sdp_priority_order
"""Values of ``SDPBackend``, the one that is tried first first."""

SDP_CHOICE = torch.ops.aten._fused_sdp_choice.default
"""The operator that says which backend is taken."""


attention_registry = _registry
"""Torch's registry of implementations of its flash operators."""


def forget_attention_implementation() -> None:
    """For torch 2.10, whose registry has no function that restores torch's own."""
    _registry._FLASH_ATTENTION_ACTIVE = None


def in_context_parallel() -> bool:
    """Whether a ``context_parallel`` of torch.distributed is active: it puts a function of its own in the place of
    torch's. Somebody else's may stand there for good."""
    current = F.scaled_dot_product_attention
    return current is not TORCH_SDPA and str(getattr(current, "__module__", "")).startswith("torch.distributed.")


# ---- Linear layers and nested tensors -------------------------------------------------------------------------------

addmm_activation = torch._addmm_activation
"""(bias, x, weight, use_gelu) -> the activation, ReLU or the tanh form of GELU, of bias + x weight."""


def jagged_dim(x: Any) -> int:
    """Of a jagged nested tensor."""
    return int(x._ragged_idx)


def known_seqlens(x: Any) -> tuple[int | None, int | None]:
    """(the shortest, the longest) sequence of a jagged nested tensor, where they are known without waiting."""
    return x._maybe_min_seqlen, x._maybe_max_seqlen
