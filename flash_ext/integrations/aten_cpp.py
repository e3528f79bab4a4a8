"""The kernels in C++ of aten's fused attention operators (``csrc/api/aten_attention.h``), above those in Python.

A call of a Python kernel takes 15 microseconds of a host's time, one of these 2. They take the calls that need nothing
but views to become calls of our operators, and hand all others on to the kernel in Python. They are registered and
taken away by operators of our compiled libraries, each for its device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flash_ext.functional import torch_allows_tf32
from flash_ext.libraries import OPS
from flash_ext.python_operators import LIBRARY, as_result, no_exception, numbers
from flash_ext.torch_private import (
    form_of,
    has_kernel,
    parse_schema,
    schema_of,
)

# ---- Which operators ------------------------------------------------------------------------------------------------

_FLASH_RESULTS = (
    "Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
    "Tensor rng_state, Tensor unused, Tensor debug_attn_mask"
)

SCHEMAS = {
    "_scaled_dot_product_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
        f"bool return_debug_mask=False, *, float? scale=None) -> ({_FLASH_RESULTS})"
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
        "Tensor philox_offset, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor, Tensor)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor, Tensor, Tensor)"
    ),
    "_scaled_dot_product_efficient_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
        "bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_scaled_dot_product_efficient_attention_backward": (
        "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, "
        "Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, "
        "float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_scaled_dot_product_cudnn_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
        f"bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> ({_FLASH_RESULTS})"
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor philox_seed, "
        "Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
    ),
}


def libraries() -> list[str]:
    """The devices that have a compiled library in this process, as dispatch keys."""
    return [key for key in ("CPU", "CUDA") if has_kernel("flash_ext::attention_backward", key)]


def has_cpp_kernel(operator: str) -> bool:
    """Whether there is a kernel in C++ for aten's operator of that name as this torch has it."""
    if operator not in SCHEMAS:
        return False
    return is_as_known(operator, SCHEMAS[operator])


def is_as_known(operator: str, schema: str) -> bool:
    """Whether this torch has aten's operator of that name in the form that C++ was written for."""
    packet = getattr(torch.ops.aten, operator, None)
    return packet is not None and form_of(schema_of(packet.default)) == form_of(parse_schema(operator + schema))


# ---- In torch's dispatcher ------------------------------------------------------------------------------------------


def override(operator: str, key: str, kernel: Callable[..., Any]) -> None:
    """Puts the kernel in C++ in place for a device. ``kernel``, in Python, gets the calls that it does not take."""
    _make_callable_from_cpp(operator, key, kernel)
    in_library("override_aten", key, operator, key)


def restore() -> None:
    """Takes all kernels in C++ away."""
    for key in libraries():
        in_library("restore_aten", key)


def in_library(function: str, key: str, *args: str) -> Any:
    """Calls an operator that each of the compiled libraries has for itself."""
    return getattr(OPS, f"{function}_by_{key.lower()}")(*args)


# ---- From C++ to Python ---------------------------------------------------------------------------------------------

_python_kernels: dict[tuple[str, str], Callable[..., Any]] = {}  # by operator and dispatch key


@cache
def define_python_operators() -> None:
    """The operators by which C++ calls Python. They outlive a deactivation: another thread may be calling one."""
    LIBRARY.define("torch_settings(bool of_float32) -> int")
    LIBRARY.impl("torch_settings", _torch_settings, "CompositeExplicitAutograd")
    for operator in filter(has_cpp_kernel, SCHEMAS):
        arguments, results = SCHEMAS[operator].split(" -> ")
        tensors = ", ".join(["Tensor"] * (results.count(",") + 2))  # the last one is an exception
        LIBRARY.define(f"{operator}{arguments} -> ({tensors})")
        LIBRARY.impl(operator, torch.library.fallthrough_kernel, "Autograd")  # autograd has recorded the call already


def _torch_settings(of_float32: bool) -> int:
    """1 if algorithms must be deterministic, and 2 if products of float32 on CUDA may be those of TF32, where asked."""
    return torch.are_deterministic_algorithms_enabled() + 2 * (of_float32 and torch_allows_tf32())


def _make_callable_from_cpp(operator: str, key: str, kernel: Callable[..., Any]) -> None:
    """Makes ``kernel`` that of ``flash_ext_python``'s operator of the same name."""
    define_python_operators()
    place = (operator, key)
    is_known = place in _python_kernels
    _python_kernels[place] = kernel
    if not is_known:
        LIBRARY.impl(operator, partial(_call_from_cpp, place), key)


def _call_from_cpp(place: tuple[str, str], *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """The kernel's results and no exception, or anything and an exception."""
    try:
        results = _python_kernels[place](*args, **kwargs)
        return *(numbers(x) if isinstance(x, int) else x for x in results), no_exception()
    except BaseException as error:
        _, results = form_of(schema_of(getattr(torch.ops.aten, place[0]).default))
        return *(numbers(0) for _ in results), as_result(error)


# ---- What is counted ------------------------------------------------------------------------------------------------

_forgotten: Counter[str] = Counter()  # the libraries' own counts do not go back to 0; replaced, never changed


def calls() -> Counter[str]:
    """How many calls of each operator were computed without Python, since the start or ``forget_calls()``."""
    return _calls_since_start() - _forgotten


def forget_calls() -> None:
    """Begins to count at 0."""
    global _forgotten
    _forgotten = _calls_since_start()


def _calls_since_start() -> Counter[str]:
    return Counter({name: sum(in_library("aten_calls", key, name) for key in libraries()) for name in SCHEMAS})
