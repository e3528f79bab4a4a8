"""The compiled operators, ``torch.ops.flash_ext.*``, made known to the rest of PyTorch.

Their schemas stand in ``csrc/api/ops.cpp``. Here each gets its fake (shapes for tracing), its derivative, its autocast
rule and its vmap rule, all registered with the dispatcher, so that the raw operators have them too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flash_ext import _vmap
from flash_ext._build_info import require_torch


def _load_libraries() -> None:
    """The CUDA library goes only into a torch that has CUDA: it needs symbols that no other has."""
    require_torch(torch.__version__)
    folder = Path(__file__).parent / "lib"
    names = ["libflash_ext_cpu.so"]
    if torch.version.cuda is not None and (folder / "libflash_ext_cuda.so").exists():
        names.append("libflash_ext_cuda.so")
    for name in names:
        try:
            torch.ops.load_library(str(folder / name))
        except OSError as error:
            raise ImportError(
                f"flash_ext: {folder / name} does not load under torch {torch.__version__} "
                f"(CUDA {torch.version.cuda}): {error.__cause__ or error}. Build flash_ext again against this torch."
            ) from error


_load_libraries()
_OPS = torch.ops.flash_ext
_LIBRARY = torch.library.Library("flash_ext", "FRAGMENT")  # what is registered lives as long as this object


class ScoreOptions(NamedTuple):
    """What attention operators share, in the order of their schemas: SCORE_TENSORS, then SCORE_SCALARS."""

    bias: Tensor | None
    sink: Tensor | None
    mask: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    block_offsets: Tensor | None
    block_indices: Tensor | None
    block_bitmap_ids: Tensor | None
    block_bitmaps: Tensor | None
    rng_state: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    softcap: float
    window_left: int
    window_right: int
    top_left: bool
    dropout_p: float
    allow_tf32: bool


class DecodeOptions(NamedTuple):
    """What decoding operators share, in the order of their schemas: DECODE_TENSORS, then DECODE_SCALARS."""

    cache_seqlens: Tensor | None
    cache_leftpad: Tensor | None
    cache_batch_idx: Tensor | None
    block_table: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int
    softmax_scale: float
    softcap: float
    window_left: int
    window_right: int
    rotary_interleaved: bool
    num_splits: int
    batch_invariant: bool
    allow_tf32: bool


_NUM_OPTIONS = len(ScoreOptions._fields)
_NUM_TENSORS = ScoreOptions._fields.index("rng_state") + 1


# ---- Calling --------------------------------------------------------------------------------------------------------


def call(op: Any, *args: Any) -> Any:
    """``op(*args)``, past the autograd layer where nothing asks for it: that saves half of a small call's overhead."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or _differentiates(args):
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _differentiates(args: tuple[Any, ...]) -> bool:
    forward_mode = forward_ad._current_level >= 0
    return forward_mode or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))


# ---- Fakes ----------------------------------------------------------------------------------------------------------


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a fake. As meta tensors run it too, it must see to devices: one of them would hide all the others."""
    arguments = [argument.name for argument in getattr(_OPS, name).default._schema.arguments]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def fake(*args: Any) -> Any:
            tensors = [(name, t) for name, t in zip(arguments, args, strict=False) if isinstance(t, Tensor)]
            first, expected = tensors[0][0], tensors[0][1].device
            for argument, t in tensors:
                if t.device != expected:
                    raise RuntimeError(
                        f"flash_ext: {argument} must be on the device of {first}, {expected}, got {t.device}"
                    )
            return function(*args)

        torch.library.register_fake(f"flash_ext::{name}", fake, lib=_LIBRARY)
        return function

    return register


def _fake_out(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _fake_lse(q: Tensor) -> Tensor:
    *batch, rows, heads, _ = q.shape
    if q.dim() == 3:
        batch = []
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*batch, heads, rows), dtype=dtype)


def _fake_gradient(like: Tensor | None, needed: bool, otherwise: Tensor) -> Tensor:
    return like.new_empty(like.shape) if needed and like is not None else otherwise.new_empty(0)


@_fake("attention_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _fake_out(q, v), _fake_lse(q)


@_fake("attention_backward")
def _(grad_out: Any, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    options, needed = ScoreOptions(*rest[2 : 2 + _NUM_OPTIONS]), rest[-5:]
    wanted = zip((q, k, v, options.bias, options.sink), needed, (q, k, v, q, q), strict=True)
    return tuple(_fake_gradient(*gradient) for gradient in wanted)


@_fake("attention_weights")
def _(q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    options = ScoreOptions(*rest[:_NUM_OPTIONS])
    if options.cu_seqlens_q is None:
        return q.new_empty((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    batch = options.cu_seqlens_q.shape[0] - 1
    return q.new_empty((batch, q.shape[1], options.max_seqlen_q, options.max_seqlen_k))


@_fake("attention_weights_backward")
def _(grad_weights: Tensor, q: Tensor, k: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bias, needed = rest[0], rest[-4:]
    wanted = zip((q, k, lse, bias), needed, (q, k, lse, q), strict=True)
    return tuple(_fake_gradient(*gradient) for gradient in wanted)


@_fake("attention_decode")
@_fake("attention_decode_append")
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake_out(q, v_cache), _fake_lse(q)


@_fake("attention_check")
@_fake("attention_decode_check")
def _(*args: Any) -> None:
    return None


@_fake("merge")
def _(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


@_fake("merge_backward")
def _(
    grad_out: Tensor | None, grad_lse: Tensor | None, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape), lses.new_empty(lses.shape)


@_fake("dropout_mask")
def _(rng: Tensor, dropout_p: float, batch: int, heads_q: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    return rng.new_empty((batch, heads_q, seqlen_q, seqlen_k), dtype=torch.bool)


# ---- Autograd -------------------------------------------------------------------------------------------------------


def _register_autograd(
    name: str, setup_context: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]
) -> None:
    """``torch.library.register_autograd``, but for ``torch.func`` too, whose ``grad`` that one refuses.

    The dispatcher calls the kernel once per level of ``torch.func``. Lower levels differentiate as well, so their
    modes, which ``torch.autograd.Function`` turns off inside of forward, are turned on again.
    """
    op = getattr(_OPS, name).default

    def below_autograd(keyset: Any, args: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                output = below_autograd(keyset, args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, *backward(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise NotImplementedError(f"flash_ext::{name} has no forward-mode derivative (jvp)")

    Derivative.__name__ = f"Derivative_of_{name}"
    apply = super(torch.autograd.Function, Derivative).apply  # Function.apply itself refuses to run below torch.func

    def kernel(keyset: Any, *args: Any) -> Any:
        if not _differentiates(args):
            return below_autograd(keyset, args)
        with enable_single_level_autograd_function():
            return apply(keyset, *args)

    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _refuse_alibi_gradient(ctx)
    ctx.save_for_backward(*inputs[: 3 + _NUM_TENSORS], *output)
    # The dispatcher leaves out a last argument, here deterministic, that has its default value.
    ctx.scalars = (*inputs[3 + _NUM_TENSORS :], False)[: _NUM_OPTIONS - _NUM_TENSORS + 1]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, *options, out, lse = ctx.saved_tensors
    wants_q, wants_k, wants_v, wants_bias, wants_sink = ctx.needs_input_grad[1:6]
    none = (None,) * (_NUM_OPTIONS - 1)  # options beyond bias and sink, and deterministic
    if grad_out is None and grad_lse is None:
        return (None,) * 5 + none
    needed = wants_q, wants_k, wants_v and grad_out is not None, wants_bias, wants_sink
    gradients = call(
        _OPS.attention_backward.default, grad_out, grad_lse, q, k, v, out, lse, *options, *ctx.scalars, *needed
    )
    return _only(needed, gradients) + none


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _refuse_alibi_gradient(ctx)
    ctx.save_for_backward(*inputs[: 3 + _NUM_TENSORS])
    ctx.scalars = inputs[3 + _NUM_TENSORS :]


def _weights_backward(ctx: Any, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[1:5]
    gradients = call(_OPS.attention_weights_backward.default, grad_weights, *ctx.saved_tensors, *ctx.scalars, *needed)
    return _only(needed, gradients) + (None,) * _NUM_OPTIONS  # options beyond bias, and dropout_mode


def _save_merge(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _merge_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return None, None
    gradients = call(_OPS.merge_backward.default, grad_out, grad_lse, *ctx.saved_tensors)
    return _only(ctx.needs_input_grad[1:], gradients)


def _only(needed: tuple[bool, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return tuple(gradient if wanted else None for wanted, gradient in zip(needed, gradients, strict=True))


def _refuse_alibi_gradient(ctx: Any) -> None:
    if ctx.needs_input_grad[1 + 3 + ScoreOptions._fields.index("alibi_slopes")]:
        raise RuntimeError("flash_ext: alibi_slopes has no gradient: expected a tensor that does not require one")


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_backward(name: str, reason: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"flash_ext::{name} has no derivative: {reason}")

    return backward


def _refuse_append(keyset: Any, *args: Any) -> Any:
    if _differentiates(args):
        raise RuntimeError(
            "flash_ext::attention_decode_append writes into the cache and has no derivative: "
            "call it under torch.no_grad(), or with tensors that do not require a gradient"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return _OPS.attention_decode_append.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _count_append(keyset: Any, *args: Any) -> Any:
    """Tells autograd that the caches are no longer what they were, should it have saved them."""
    torch.autograd.graph.increment_version(args[1:3])
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _OPS.attention_decode_append.default.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)


_TWICE = "attention can be differentiated once"
_register_autograd("attention_forward", _save_forward, _backward)
_register_autograd("attention_weights", _save_weights, _weights_backward)
_register_autograd("merge", _save_merge, _merge_backward)
for _name, _reason in {
    "attention_backward": _TWICE,
    "attention_weights_backward": _TWICE,
    "merge_backward": "merging can be differentiated once",
    "attention_decode": "attention over a cache is for inference, flash_ext.attention is differentiable",
}.items():
    _register_autograd(_name, _save_nothing, _refuse_backward(_name, _reason))
_LIBRARY.impl("attention_decode_append", _refuse_append, "Autograd", with_keyset=True)
_LIBRARY.impl("attention_decode_append", _count_append, "ADInplaceOrView", with_keyset=True)


# ---- Autocast -------------------------------------------------------------------------------------------------------


def _autocast_first(count: int) -> Callable[[list[Any], str], None]:
    """Casts q, k and v (q and k) as torch casts what it multiplies: not float64, and nothing of another device."""

    def cast(args: list[Any], device_type: str) -> None:
        dtype = torch.get_autocast_dtype(device_type)
        for i, t in enumerate(args[:count]):
            if t.is_floating_point() and t.dtype != torch.float64 and t.device.type == device_type:
                args[i] = t.to(dtype)

    return cast


def _follow_cache(*positions: int) -> Callable[[list[Any], str], None]:
    """A cache keeps its dtype, and what meets it takes that: casting a cache costs more than attending to it."""

    def cast(args: list[Any], device_type: str) -> None:
        for i in positions:
            if args[i] is not None:
                args[i] = args[i].to(args[1].dtype)

    return cast


def _register_autocast(name: str, cast: Callable[[list[Any], str], None]) -> None:
    op = getattr(_OPS, name).default

    def register(device_type: str, key: str) -> None:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def kernel(*args: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                changed = list(args)
                cast(changed, device_type)
                return op(*changed)

        _LIBRARY.impl(name, kernel, key)

    register("cpu", "AutocastCPU")
    register("cuda", "AutocastCUDA")


_register_autocast("attention_forward", _autocast_first(3))
_register_autocast("attention_weights", _autocast_first(2))
_register_autocast("attention_check", _autocast_first(3))
_register_autocast("attention_decode_check", _follow_cache(0))
_register_autocast("attention_decode", _follow_cache(0))
_register_autocast("attention_decode_append", _follow_cache(0, 3, 4, 9, 10))  # q, k, v, rotary_cos, rotary_sin


# ---- vmap -----------------------------------------------------------------------------------------------------------


def _fold_attention(name: str, num_leading: int, num_unfoldable: int = 0) -> None:
    """vmap by the batch dimension; the last ``num_unfoldable`` arguments must be False for that."""
    op = getattr(_OPS, name).default
    end = num_leading + _NUM_OPTIONS

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        options, dims = ScoreOptions(*args[num_leading:end]), ScoreOptions(*in_dims[num_leading:end])
        if not _vmap.can_fold(options, dims) or any(args[len(args) - num_unfoldable :]):
            return _vmap.loop(op, info, in_dims, args)
        n = info.batch_size
        leading: list[Any] = [_vmap.fold(t, dim, n) for t, dim in zip(args[:num_leading], in_dims, strict=False)]
        batch = leading[-1].shape[0] // n
        results = op(*leading, *_vmap.fold_options(options, dims, n, batch), *args[end:])
        return _vmap.unfold(results, n, batch)

    torch.library.register_vmap(f"flash_ext::{name}", rule, lib=_LIBRARY)


def _loop_over(name: str, written: slice = slice(0)) -> None:
    """vmap by one call per sample; arguments that are written to must differ between the samples."""
    op = getattr(_OPS, name).default

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        if None in in_dims[written]:
            raise RuntimeError(f"vmap of flash_ext::{name}: k_cache and v_cache are written to and must be vmapped too")
        return _vmap.loop(op, info, in_dims, args)

    torch.library.register_vmap(f"flash_ext::{name}", rule, lib=_LIBRARY)


_fold_attention("attention_forward", 3)
_fold_attention("attention_backward", 7, num_unfoldable=2)  # need_dbias and need_dsink: they sum over the batch
_fold_attention("attention_weights", 3)
_fold_attention("attention_weights_backward", 4, num_unfoldable=1)  # need_dbias
_loop_over("attention_decode_append", written=slice(1, 3))
for _name in ("attention_decode", "merge", "merge_backward", "dropout_mask"):
    _loop_over(_name)
