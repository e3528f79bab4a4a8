"""The compiled operators, ``torch.ops.flash_ext.*``, made known to the rest of PyTorch.

Their schemas stand in ``csrc/api/ops.cpp``. Here each gets its fake (shapes for tracing), its derivative, its autocast
rule and its vmap rule, all registered with the dispatcher, so that the raw operators have them too.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flash_ext import (
    _vmap,
    fake_checks,
    python_operators,  # noqa: F401  what the libraries call
)
from flash_ext.eager import call, recorders
from flash_ext.libraries import OPS
from flash_ext.torch_private import (
    KEYS_BELOW_AUTOGRAD,
    KEYS_BELOW_INPLACE_OR_VIEW,
    BelowAutograd,
    BelowInplaceOrView,
    DispatchKey,
    DispatchKeySet,
    SingleLevelFunction,
    WithoutKeys,
    any_requires_grad,
    arguments_of,
    enable_single_level_autograd_function,
    is_forward_mode,
    set_forward_mode,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_FORWARD, _PLAIN = OPS.attention_forward.default, OPS.attention_forward_plain.default
_LIBRARY = torch.library.Library("flash_ext", "FRAGMENT")  # what is registered lives as long as this object


def _options_of(name: str, op: Any) -> Any:
    """A named tuple of what ``op`` takes from softmax_scale on, in the order and with the defaults of its schema."""
    arguments = arguments_of(op)
    first = [argument.name for argument in arguments].index("softmax_scale")
    names = [argument.name for argument in arguments[first:]]
    defaults = [argument.default_value for argument in arguments[first + 1 :]]
    return namedtuple(name, names, defaults=defaults, module=__name__)


if TYPE_CHECKING:

    class _Options(tuple[Any, ...]):
        _fields: ClassVar[tuple[str, ...]]

        def __new__(cls, softmax_scale: float, *args: Any, **kwargs: Any) -> Self: ...
        def __getattr__(self, name: str) -> Any: ...
        def _replace(self, **changes: Any) -> Self: ...

    class ScoreOptions(_Options): ...

    class DecodeOptions(_Options): ...

else:
    # What attention operators share, and what decoding operators do.
    ScoreOptions = _options_of("ScoreOptions", OPS.attention_check.default)
    DecodeOptions = _options_of("DecodeOptions", OPS.attention_decode_check.default)


_NUM_OPTIONS = len(ScoreOptions._fields)
_BIAS, _SINK, _ALIBI_SLOPES = (ScoreOptions._fields.index(name) for name in ("bias", "sink", "alibi_slopes"))


def _differentiates(args: tuple[Any, ...]) -> bool:
    return is_forward_mode() or (torch.is_grad_enabled() and any_requires_grad(*args))


# ---- Fakes ----------------------------------------------------------------------------------------------------------


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a fake. It checks devices, because meta tensors run it too and one would hide the others' devices."""
    arguments = [argument.name for argument in arguments_of(getattr(OPS, name).default)]

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


def _scores(options: Sequence[Any]) -> ScoreOptions:
    """Of what comes after the tensors; the forwards have an option more, deterministic."""
    return ScoreOptions(*options[:_NUM_OPTIONS])


@_fake("attention_forward")
@_fake("attention_forward_plain")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    fake_checks.check_attention(q, k, v, _scores(options))
    return _fake_out(q, v), _fake_lse(q)


@_fake("attention_forward_max_logit")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(options)
    fake_checks.check_attention(q, k, v, scores)
    lse, cu_seqlens_q = _fake_lse(q), scores.cu_seqlens_q
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    return _fake_out(q, v), lse, lse.new_empty((batch, q.shape[-2]))


@_fake("attention_backward")
def _(grad_out: Any, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needed, options = rest[3:8], ScoreOptions(*rest[8:])  # after out, lse and deterministic
    wanted = zip((q, k, v, options.bias, options.sink), needed, (q, k, v, q, q), strict=True)
    return tuple(_fake_gradient(*gradient) for gradient in wanted)


@_fake("attention_weights")
def _(q: Tensor, k: Tensor, lse: Tensor, dropout_mode: int, *rest: Any) -> Tensor:
    options = ScoreOptions(*rest)
    fake_checks.check_attention(q, k, None, options)
    if options.cu_seqlens_q is None:
        return q.new_empty((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    batch = options.cu_seqlens_q.shape[0] - 1
    return q.new_empty((batch, q.shape[1], options.max_seqlen_q, options.max_seqlen_k))


@_fake("attention_weights_backward")
def _(grad_weights: Tensor, q: Tensor, k: Tensor, lse: Tensor, dropout_mode: int, *rest: Any) -> tuple[Tensor, ...]:
    needed, options = rest[:4], ScoreOptions(*rest[4:])
    wanted = zip((q, k, lse, options.bias), needed, (q, k, lse, q), strict=True)
    return tuple(_fake_gradient(*gradient) for gradient in wanted)


@_fake("attention_decode")
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    fake_checks.check_decode(q, k_cache, v_cache, DecodeOptions(*options))
    return _fake_out(q, v_cache), _fake_lse(q)


@_fake("attention_decode_append")
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    fake_checks.check_decode(q, k_cache, v_cache, DecodeOptions(*options), (k, v))
    return _fake_out(q, v_cache), _fake_lse(q)


@_fake("attention_check")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> None:
    fake_checks.check_attention(q, k, v, ScoreOptions(*options))


@_fake("attention_decode_check")
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any) -> None:
    fake_checks.check_decode(q, k_cache, v_cache, DecodeOptions(*options))


@_fake("merge")
def _(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


@_fake("merge_backward")
def _(
    grad_out: Tensor | None, grad_lse: Tensor | None, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape), lses.new_empty(lses.shape)


@_fake("add_layer_norm")
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, need_sum: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if need_sum else (0,)), x.new_empty(x.shape)


@_fake("dropout_mask")
def _(rng: Tensor, dropout_p: float, batch: int, heads_q: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    return rng.new_empty((batch, heads_q, seqlen_q, seqlen_k), dtype=torch.bool)


@_fake("interval_block_lists")
def _(
    bounds: Tensor,
    rule: str,
    seqlen_q: int,
    seqlen_k: int,
    block_m: int,
    block_n: int,
    offset: int,
    window_left: int,
    window_right: int,
    num_global: int,
    causal: bool,
    max_blocks: int,
    max_bitmaps: int,
) -> tuple[Tensor, ...]:
    batch = bounds.shape[0] if rule in ("prefix", "spans") else 1
    rows = (seqlen_q + block_m - 1) // block_m
    return _fake_block_lists(
        bounds, (batch, 1, rows + 1), max_blocks, (batch * rows * max_bitmaps, block_m, block_n // 32)
    )


@_fake("block_lists_transposed")
def _(
    offsets: Tensor, indices: Tensor, bitmap_ids: Tensor, bitmaps: Tensor, columns: int, max_blocks: int
) -> tuple[Tensor, ...]:
    count, block_m, words = bitmaps.shape
    return _fake_block_lists(offsets, (*offsets.shape[:2], columns + 1), max_blocks, (count, 32 * words, block_m // 32))


def _fake_block_lists(like: Tensor, offsets: Any, max_blocks: int, bitmaps: Any) -> tuple[Tensor, ...]:
    shapes = (offsets, (max_blocks,), (max_blocks,), bitmaps)
    return tuple(like.new_empty(shape, dtype=torch.int32) for shape in shapes)


# ---- Autograd -------------------------------------------------------------------------------------------------------


def _register_autograd(
    name: str, setup_context: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]
) -> None:
    """``torch.library.register_autograd``, but for ``torch.func`` too, whose ``grad`` that one refuses.

    The dispatcher calls the kernel once per level of ``torch.func``. Lower levels differentiate as well, so their
    modes, which ``torch.autograd.Function`` turns off inside of forward, are turned on again.
    """
    op = getattr(OPS, name).default

    def redispatch(keyset: Any, *args: Any) -> Any:
        with BelowAutograd():
            return op.redispatch(keyset & KEYS_BELOW_AUTOGRAD, *args)

    def redispatch_with_lower_levels(keyset: Any, *args: Any) -> Any:
        with torch.enable_grad(), set_forward_mode(True):
            return redispatch(keyset, *args)

    class Derivative(SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, compute: Callable[..., Any], how: Any, *args: Any) -> Any:
            output = compute(how, *args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, None, *backward(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise NotImplementedError(f"flash_ext::{name} has no forward-mode derivative (jvp)")

    Derivative.__name__ = f"Derivative_of_{name}"
    record = Derivative.apply  # type: ignore[attr-defined]  # Function.apply refuses to run below torch.func

    def kernel(keyset: Any, *args: Any) -> Any:
        if not _differentiates(args):
            return redispatch(keyset, *args)
        with enable_single_level_autograd_function():
            return record(redispatch_with_lower_levels, keyset, *args)

    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
    recorders[op] = record


def _needs(ctx: Any) -> tuple[bool, ...]:
    """Of each argument that came, whether it needs a gradient. Behind them, nothing does."""
    return (*ctx.needs_input_grad[2:], *(False,) * _NUM_OPTIONS)


def _save(ctx: Any, inputs: tuple[Any, ...], *outputs: Tensor) -> None:
    ctx.save_for_backward(*outputs, *(value if isinstance(value, Tensor) else None for value in inputs))
    ctx.inputs = tuple(None if isinstance(value, Tensor) else value for value in inputs)
    ctx.set_materialize_grads(False)


def _saved(ctx: Any) -> tuple[tuple[Tensor, ...], list[Any]]:
    """The saved (outputs, inputs)."""
    saved = ctx.saved_tensors
    num_outputs = len(saved) - len(ctx.inputs)
    tensors = saved[num_outputs:]
    return saved[:num_outputs], [v if t is None else t for t, v in zip(tensors, ctx.inputs, strict=True)]


def _gradients(ctx: Any, of: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """A gradient for each argument that came, by position."""
    return tuple(of.get(position) for position in range(len(ctx.inputs)))


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _refuse_alibi_gradient(ctx, 3)
    _save(ctx, inputs, *output)


def _save_forward_max_logit(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse, max_logit = output
    ctx.mark_non_differentiable(max_logit)
    _save_forward(ctx, inputs, (out, lse))


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _grad_max_logit: None = None
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return _gradients(ctx, {})
    outputs, (q, k, v, *rest) = _saved(ctx)
    options, deterministic = rest[:_NUM_OPTIONS], len(rest) > _NUM_OPTIONS and rest[-1]
    needs, positions = _needs(ctx), (0, 1, 2, 3 + _BIAS, 3 + _SINK)
    needed = [needs[position] for position in positions]
    needed[2] = needed[2] and grad_out is not None
    gradients = call(
        OPS.attention_backward.default, grad_out, grad_lse, q, k, v, *outputs, deterministic, *needed, *options
    )
    return _gradients(ctx, _only(needed, positions, gradients))


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _refuse_alibi_gradient(ctx, 4)
    _save(ctx, inputs)


def _weights_backward(ctx: Any, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_weights is None:
        return _gradients(ctx, {})
    _, (q, k, lse, dropout_mode, *options) = _saved(ctx)
    needs, positions = _needs(ctx), (0, 1, 2, 4 + _BIAS)
    needed = [needs[position] for position in positions]
    gradients = call(OPS.attention_weights_backward.default, grad_weights, q, k, lse, dropout_mode, *needed, *options)
    return _gradients(ctx, _only(needed, positions, gradients))


def _save_merge(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs, *output)


def _merge_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return _gradients(ctx, {})
    outputs, inputs = _saved(ctx)
    gradients = call(OPS.merge_backward.default, grad_out, grad_lse, *inputs, *outputs)
    return _gradients(ctx, _only(_needs(ctx), (0, 1), gradients))


def _only(needed: Sequence[bool], positions: Sequence[int], gradients: Sequence[Tensor]) -> dict[int, Tensor]:
    """The gradients that are needed, by position."""
    found = zip(needed, positions, gradients, strict=False)
    return {position: gradient for wanted, position, gradient in found if wanted}


def _refuse_alibi_gradient(ctx: Any, num_leading: int) -> None:
    if _needs(ctx)[num_leading + _ALIBI_SLOPES]:
        raise RuntimeError("flash_ext: alibi_slopes has no gradient: expected a tensor that does not require one")


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_backward(name: str, reason: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"flash_ext::{name} has no derivative: {reason}")

    return backward


def _differentiate_plain(keyset: Any, *args: Any) -> Any:
    """The derivative is attention_forward's: callers of this library are below autograd here, or there already."""
    if _differentiates(args):
        return _FORWARD(*args)
    with BelowAutograd():
        return _PLAIN.redispatch(keyset & KEYS_BELOW_AUTOGRAD, *args)


def _refuse_append(keyset: Any, *args: Any) -> Any:
    if _differentiates(args):
        raise RuntimeError(
            "flash_ext::attention_decode_append writes into the cache and has no derivative: "
            "call it under torch.no_grad(), or with tensors that do not require a gradient"
        )
    with BelowAutograd():
        return OPS.attention_decode_append.default.redispatch(keyset & KEYS_BELOW_AUTOGRAD, *args)


def _count_append(keyset: Any, *args: Any) -> Any:
    """Tells autograd that the caches are no longer what they were, should it have saved them."""
    torch.autograd.graph.increment_version(args[1:3])
    with BelowInplaceOrView():
        return OPS.attention_decode_append.default.redispatch(keyset & KEYS_BELOW_INPLACE_OR_VIEW, *args)


_TWICE = (
    "attention can be differentiated once. For more there is torch's math: F.scaled_dot_product_attention within "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)
_register_autograd("attention_forward", _save_forward, _backward)
_register_autograd("attention_forward_max_logit", _save_forward_max_logit, _backward)
_register_autograd("attention_weights", _save_weights, _weights_backward)
_register_autograd("merge", _save_merge, _merge_backward)
for _name, _reason in {
    "attention_backward": _TWICE,
    "attention_weights_backward": _TWICE,
    "merge_backward": "merging can be differentiated once",
    "add_layer_norm": "it is for evaluation, torch's addition and layer_norm are differentiable",
    "attention_decode": "attention over a cache or pages (block_table) is for inference, "
    "flash_ext.attention is differentiable",
}.items():
    _register_autograd(_name, _save_nothing, _refuse_backward(_name, _reason))
_LIBRARY.impl("attention_forward_plain", _differentiate_plain, "Autograd", with_keyset=True)
_LIBRARY.impl("attention_decode_append", _refuse_append, "Autograd", with_keyset=True)
_LIBRARY.impl("attention_decode_append", _count_append, "ADInplaceOrView", with_keyset=True)


# ---- Autocast -------------------------------------------------------------------------------------------------------


def autocast_first(count: int) -> Callable[[list[Any], str], None]:
    """Casts q, k and v (q and k) as torch's products cast their inputs: not float64, and nothing on another device."""

    def cast(args: list[Any], device_type: str) -> None:
        dtype = torch.get_autocast_dtype(device_type)
        for i, t in enumerate(args[:count]):
            if t is not None and t.is_floating_point() and t.dtype != torch.float64 and t.device.type == device_type:
                args[i] = t.to(dtype)

    return cast


def _follow_cache(*positions: int) -> Callable[[list[Any], str], None]:
    """Casts the other tensors to the cache's dtype: casting a cache costs more than attending to it."""

    def cast(args: list[Any], device_type: str) -> None:
        for i in positions:
            if i < len(args) and args[i] is not None:
                args[i] = args[i].to(args[1].dtype)

    return cast


def _register_autocast(name: str, cast: Callable[[list[Any], str], None]) -> None:
    op = getattr(OPS, name).default

    def register(device_type: str, key: str) -> None:
        keys = DispatchKeySet(getattr(DispatchKey, key))

        def kernel(*args: Any) -> Any:
            with WithoutKeys(keys):
                changed = list(args)
                cast(changed, device_type)
                return op(*changed)

        _LIBRARY.impl(name, kernel, key)

    register("cpu", "AutocastCPU")
    register("cuda", "AutocastCUDA")


_register_autocast("attention_forward", autocast_first(3))
_register_autocast("attention_forward_max_logit", autocast_first(3))
_register_autocast("attention_forward_plain", autocast_first(3))
_register_autocast("attention_weights", autocast_first(2))
_register_autocast("attention_check", autocast_first(3))
_register_autocast("attention_describe", autocast_first(3))
_register_autocast("attention_decode_check", _follow_cache(0))
_register_autocast("attention_decode_describe", _follow_cache(0))
_register_autocast("attention_decode", _follow_cache(0))
_ROTARY = (5 + DecodeOptions._fields.index(name) for name in ("rotary_cos", "rotary_sin"))
_register_autocast("attention_decode_append", _follow_cache(0, 3, 4, *_ROTARY))  # q, k, v


# ---- vmap -----------------------------------------------------------------------------------------------------------


def _fold_attention(name: str, num_tensors: int, num_flags: int = 0, num_unfoldable: int = 0) -> None:
    """vmap by the batch dimension, of (tensors, flags, options); the last ``num_unfoldable`` flags must be False."""
    op = getattr(OPS, name).default
    begin = num_tensors + num_flags
    end = begin + _NUM_OPTIONS

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        options, dims = ScoreOptions(*args[begin:end]), ScoreOptions(*in_dims[begin:end])
        if not _vmap.can_fold(options, dims) or any(args[begin - num_unfoldable : begin]):
            return _vmap.loop(op, info, in_dims, args)
        n = info.batch_size
        if n == 0:
            _vmap.loop(op, info, in_dims, args)  # checks the sizes of a sample, of which 0 times any are alike
        tensors: list[Any] = [_vmap.fold(t, dim, n) for t, dim in zip(args[:num_tensors], in_dims, strict=False)]
        batch = _vmap.batch_of(args[num_tensors - 1], in_dims[num_tensors - 1])
        flags, given = args[num_tensors:begin], len(args[begin:end])
        results = op(*tensors, *flags, *_vmap.fold_options(options, dims, n, batch)[:given], *args[end:])
        return _vmap.unfold(results, n, batch)

    torch.library.register_vmap(f"flash_ext::{name}", rule, lib=_LIBRARY)


def _loop_over(name: str, written: slice = slice(0)) -> None:
    """vmap by one call per sample; arguments that are written to must differ between the samples."""
    op = getattr(OPS, name).default

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        if None in in_dims[written]:
            raise RuntimeError(f"vmap of flash_ext::{name}: k_cache and v_cache are written to and must be vmapped too")
        return _vmap.loop(op, info, in_dims, args)

    torch.library.register_vmap(f"flash_ext::{name}", rule, lib=_LIBRARY)


_fold_attention("attention_forward", 3)
_fold_attention("attention_forward_max_logit", 3)
_fold_attention("attention_forward_plain", 3)
# What sums over the batch cannot be folded: need_dbias and need_dsink.
_fold_attention("attention_backward", 7, num_flags=6, num_unfoldable=2)
_fold_attention("attention_weights", 3, num_flags=1)
_fold_attention("attention_weights_backward", 4, num_flags=5, num_unfoldable=1)
_loop_over("attention_decode_append", written=slice(1, 3))
for _name in (
    "add_layer_norm",
    "attention_decode",
    "merge",
    "merge_backward",
    "dropout_mask",
    "interval_block_lists",
    "block_lists_transposed",
):
    _loop_over(_name)
