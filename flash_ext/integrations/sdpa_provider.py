"""``torch.nn.functional.scaled_dot_product_attention`` (SDPA), and what is built on it, computed by this library.

``activate()`` registers kernels in torch's dispatcher. The model's code does not change. A call that a kernel does
not support goes on to torch's own kernel, which is kept beside ours. Two layers are overridden. (One model library is
served beside them: torchvision's Swin writes its attention out, and ``torchvision_swin`` makes calls of SDPA of it.)

**aten's fused operators** (kernels in ``aten_attention``): flash, efficient, cuDNN and the CPU's flash, each with its
backward, and the operators on packed sequences (``aten_packed_attention``) that nested tensors and
``torch.nn.attention.varlen`` call.

- torch's own rules choose the operator, so ``sdpa_kernel(...)``, the switches of ``torch.backends.cuda`` and the
  priority order keep their meaning.
- Graphs and handlers see the operators they know: DTensor, ``context_parallel``, selective checkpointing, FLOP
  counters, Inductor. torch's autograd formulas and meta functions stay in force.
- Compiled and exported programs look a kernel up when they run: they use ours while it is active.
- The common calls of the fused operators are computed in C++, and what C++ does not take goes on to the kernels in
  Python (``aten_cpp``). So it is with SDPA: C++ finds out which calls are torch's own matter.

**SDPA itself** (``sdpa_routing``), at the autograd key, for calls that those operators cannot express:

- Calls that torch leaves to its unfused math because none of its backends takes them: on CPU dropout, a mask that
  needs a gradient, a head_dim of v that differs; anywhere 3 dimensions, broadcast batches, GQA with a mask. Where the
  user asked for math, by ``sdpa_kernel(SDPBackend.MATH)`` or by priority, torch's math runs.
- Dropout; ``aten_attention`` says why not through the operators. The seed comes from torch's generator of the device,
  but the weights that are dropped are not those that torch would drop.
- Boolean masks. torch turns them into additive ones; for cuDNN with -65504 instead of -inf, and then a query that
  sees no key gets a mean of values instead of 0.
- On CUDA, additive masks. torch pads them and expands them to every batch and head, so that the gradient of a shared
  bias is materialised per sample before it is summed. Under a ``TorchDispatchMode`` (compilers, selective
  checkpointing) masks take torch's way nevertheless, so that the mode sees aten's operator.

Most of these go to ``aten::_scaled_dot_product_fused_attention_overrideable``. torch keeps this operator for other
libraries and does not call it by itself on a CPU or CUDA: the kernel is ours, in C++, and the derivative is torch's,
in C++ too (``aten_fused``). It stays filled after ``deactivate()``, as a backward may come later. Calls that would
take copies, and those whose inputs broadcast, go by this library's operators in Python.

Rejected designs. ``_fused_sdp_choice``: SDPA reads a C++ dispatch stub, not the operator, so an override changes
nothing. ``_scaled_dot_product_attention_math``: its direct callers want the attention weights, its second result.
``F.scaled_dot_product_attention`` in Python: calls from C++, and whoever imported the function before, would miss it.
SDPA at the device's own key: tracers then no longer decompose it, and exported programs keep it whole.

torch's implementation also runs for tensor subclasses with a ``__torch_dispatch__``, under ``torch.func`` transforms,
in forward-mode AD, in ``torch.export`` and in ``torch.inference_mode`` (which skips the autograd key;
``torch.no_grad`` does not). Its fused operators are still overridden there. Second derivatives are not supported; ask
for math.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flash_ext.integrations import aten_cpp, torchvision_swin
from flash_ext.integrations.aten_calls import NotServed
from flash_ext.integrations.call_counts import CallCounts
from flash_ext.torch_private import (
    DispatchKey,
    DispatchKeySet,
    attention_registry,
    forget_attention_implementation,
    forget_dispatch,
    has_kernel,
    schema_of,
)

NAME = "flash_ext"  # in torch's registry of flash attention implementations

_served_in_python = CallCounts()
_passed_on = CallCounts()  # to torch's kernel
_reasons = CallCounts()  # the same, by "operator (why)"

# Of aten's operators, by device, the name of our kernel in aten_attention or, of those on packed sequences, in
# aten_packed_attention. Those that a torch lacks are left out. A CPU gets the packed ones too, which torch has for CUDA
# alone.
_PACKED = {
    "_flash_attention_forward": "packed_flash_forward",
    "_flash_attention_forward_no_dropout_inplace": "packed_flash_forward_into",
    "_flash_attention_backward": "packed_flash_backward",
    "_cudnn_attention_forward": "packed_cudnn_forward",
    "_cudnn_attention_backward": "packed_cudnn_backward",
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
    """Computes ``F.scaled_dot_product_attention`` and what is built on it by this library, from now on.

    This covers ``nn.MultiheadAttention``, ``nn.TransformerEncoderLayer`` and every model that calls torch's function,
    on CUDA and CPU, forward and backward: masks, biases with gradient, float32, dropout, GQA, a head_dim of v that
    differs. What is not supported runs by torch as before. ``sdpa_kernel(...)`` keeps its meaning: math is torch's,
    and so is dropout where it leaves one fused backend, whose random numbers somebody may count on.

    The same as ``torch.nn.attention.activate_flash_attention_impl("flash_ext")``; it replaces another implementation of
    that registry. A second call does nothing. Functions that ``torch.compile`` compiled before keep the operators they
    were compiled to; ``torch.compiler.reset()`` compiles them anew.

    Returns:
        Nothing. ``flash_ext.doctor()`` lists what is overridden and how many calls were served.

    Raises:
        RuntimeError: torch lacks an operator that is to be overridden; nothing is then.
    """
    with _changing:
        if not is_active():
            attention_registry.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Puts torch's own kernels back, bit for bit. Does nothing if they are in place.

    Returns:
        Nothing.

    Raises:
        Nothing of its own.
    """
    with _changing:
        if is_active():
            _restore()


@contextmanager
def activated() -> Iterator[None]:
    """``activate()`` for a ``with`` block. Afterwards the implementation that was active before is active again.

    It acts on the whole process, other threads included. Blocks of several threads may overlap: the last one to end
    restores what was active before the first. No thread may be in a call of torch's attention while the first block
    begins or the last one ends, as torch's dispatcher then changes kernels under it. The backward of a forward inside
    may run outside.

    Returns:
        A context manager, which yields nothing.

    Raises:
        RuntimeError: as ``activate``.
    """
    with _changing:
        block = _Block(attention_registry.current_flash_attention_impl())
        activate()
        _open_blocks.append(block)
    try:
        yield
    finally:
        with _changing:
            _leave(block)


@dataclass(eq=False)
class _Block:
    """An ``activated()`` that has not ended."""

    before: str | None  # what it restores in the end; NAME: nothing, as another block does


_open_blocks: list[_Block] = []  # in the order in which they began
_changing = threading.RLock()  # them, or what is active: two activations at a time would call each other's kernels


def _leave(block: _Block) -> None:
    at = _open_blocks.index(block)
    _open_blocks.pop(at)
    if block.before == NAME:
        return
    heir = next((other for other in _open_blocks[at:] if other.before == NAME), None)
    if heir is not None:
        heir.before = block.before
        return
    deactivate()
    if block.before is not None:
        attention_registry.activate_flash_attention_impl(block.before)


def is_active() -> bool:
    """Whether torch's kernels are overridden now."""
    return Activation.current is not None


# ---- What is counted ------------------------------------------------------------------------------------------------


def calls_served() -> Counter[str]:
    """How many calls of each operator this library computed, since the process started or ``forget_calls()``."""
    return _served_in_python.read() + aten_cpp.calls()


def calls_passed_on() -> Counter[str]:
    """How many calls of each operator went on to torch's kernel; of SDPA itself, those that torch computes by math."""
    return _passed_on.read()


def reasons_passed_on() -> Counter[str]:
    """The same by operator and reason, such as "_scaled_dot_product_efficient_attention (head_dim must be ...)"."""
    return _reasons.read()


def forget_calls() -> None:
    """Begins to count at 0."""
    aten_cpp.forget_calls()
    _served_in_python.clear()
    _passed_on.clear()
    _reasons.clear()


def _count_passed_on(operator: str, reason: NotServed) -> None:
    _passed_on.add(operator)
    _reasons.add(f"{operator} ({reason})")


# ---- In torch's dispatcher ------------------------------------------------------------------------------------------


class Activation:
    """Our kernels in torch's dispatcher, until ``remove()``. A handle as torch's registry wants it."""

    current: Activation | None = None

    def __init__(self) -> None:
        self.overridden: list[tuple[str, str]] = []  # (operator, dispatch key)
        self._library = torch.library.Library("aten", "IMPL")
        try:
            for key in KERNELS:
                if key in aten_cpp.libraries():
                    self._override(key)
                elif torch.cuda.is_available():
                    warnings.warn("flash_ext has no CUDA kernels in this build: torch's stay in place", stacklevel=4)
        except BaseException:
            self._restore()
            raise
        self._forget_dispatch()
        _tag_caches(True)
        torchvision_swin.install()
        Activation.current = self

    def remove(self) -> None:
        if Activation.current is not self:
            return
        self._restore()
        self._forget_dispatch()
        _tag_caches(False)
        torchvision_swin.restore()
        Activation.current = None

    def _restore(self) -> None:
        aten_cpp.restore()
        self._library._destroy()

    def _override(self, key: str) -> None:
        from flash_ext.integrations import aten_attention, aten_packed_attention

        kernels = {**vars(aten_attention), **vars(aten_packed_attention)}

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for operator, kernel in KERNELS[key].items():
                if hasattr(torch.ops.aten, operator):
                    run = _with_torchs(operator, key, kernels[kernel])
                    self._put(operator, key, run)
                    # Above it and not in its place: torch warns once of overriding, and only Python can be silenced.
                    if aten_cpp.has_cpp_kernel(operator):
                        aten_cpp.override(operator, key, run)
            # Not at the device's own key: tracers do not decompose what has a kernel there.
            self._put(_SDPA, f"Autograd{key}", _routed(key))

    def _put(self, operator: str, key: str, kernel: Callable[..., Any]) -> None:
        self._library.impl(operator, kernel, key)
        self.overridden.append((operator, key))

    def _forget_dispatch(self) -> None:
        """Clears what the Python dispatcher, which tracers use, has cached on each operator."""
        for operator, _ in self.overridden:
            forget_dispatch(getattr(torch.ops.aten, operator).default)


def _with_torchs(operator: str, key: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Our kernel, with torch's as fallback."""
    qualified = f"aten::{operator}"
    torch_kernel = None
    if has_kernel(qualified, key):
        torch_kernel = torch.library.get_kernel(qualified, key).call_boxed
    keys = DispatchKeySet(DispatchKey.__members__[key])

    num_results = len(schema_of(getattr(torch.ops.aten, operator).default).returns)

    def run(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] is None:  # the gradient of out: nothing depends on the inputs
            return (None,) * num_results
        results = kernel(*args, **kwargs)
        if type(results) is not NotServed:
            _served_in_python.add(operator)
            return results
        if torch_kernel is None:
            raise NotImplementedError(
                f"{qualified}: torch has no {key} kernel, and flash_ext does not support the call: {results}"
            )
        by_torch = torch_kernel(keys, *args, **kwargs)  # a call that is wrong raises here, and is not counted
        _count_passed_on(operator, results)
        return by_torch

    return run


def _routed(device_key: str) -> Callable[..., Any]:
    """The kernel of SDPA, with torch's composition as fallback."""
    from flash_ext.integrations.sdpa_routing import is_torchs, serve

    autograd_key = DispatchKey.__members__[f"Autograd{device_key}"]
    torch_kernel = torch.library.get_kernel(f"aten::{_SDPA}", autograd_key).call_boxed
    keys = DispatchKeySet(autograd_key)
    device_type = device_key.lower()

    def run(*args: Any, **kwargs: Any) -> Any:
        """The arguments as they come: to name eight of them takes longer than the decision."""
        if is_torchs(device_type, *args):
            return torch_kernel(keys, *args, **kwargs)
        out = serve(device_type, *args, **kwargs)
        if out is NotImplemented:
            return torch_kernel(keys, *args, **kwargs)
        if type(out) is NotServed:
            by_torch = torch_kernel(keys, *args, **kwargs)
            _count_passed_on(_SDPA, out)
            return by_torch
        _served_in_python.add(_SDPA)
        return out

    return run


def _tag_caches(active: bool) -> None:
    """Keeps torch's compile caches on disk apart. Their key is the graph before SDPA is lowered, which is the same with
    and without us, while the compiled code is not."""
    config = torch.compiler.config
    tag = f"+{NAME}"
    plain = config.cache_key_tag.replace(tag, "")
    config.cache_key_tag = plain + tag if active else plain


# ---- In torch's registry --------------------------------------------------------------------------------------------


def _restore() -> None:
    # Torch 2.10 activates another one without removing ours.
    if attention_registry.current_flash_attention_impl() != NAME:
        if Activation.current is not None:
            Activation.current.remove()
    elif hasattr(attention_registry, "restore_flash_attention_impl"):
        attention_registry.restore_flash_attention_impl()
    else:  # torch 2.10 has no function for it
        assert Activation.current is not None
        Activation.current.remove()
        forget_attention_implementation()


def register() -> None:
    """Enters ``flash_ext`` in torch's registry, without activating it."""
    attention_registry.register_flash_attention_impl(NAME, register_fn=Activation)
