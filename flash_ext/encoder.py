"""``nn.TransformerEncoder`` and its layer in evaluation, which ``convert`` puts in the place of torch's.

Torch evaluates these modules by fused operators. Here is the same around our attention: few kernels, no copies, and a
padded batch packed once for all layers. What torch does not fuse (training, gradients, hooks, submodules that are not
torch's own any more) takes torch's Python forward, and so does ``torch.compile``, which fuses by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from flash_ext import packing
from flash_ext.eager import call
from flash_ext.fx_leaf import proxy_of_call
from flash_ext.modules import Linear, MultiheadAttention, is_hooked
from flash_ext.torch_private import (
    addmm_activation,
    any_requires_grad,
    has_any_global_hook,
    is_any_autocast_enabled,
    is_forward_mode,
    is_functorch_active,
    is_tracing,
)

_ADD_LAYER_NORM = torch.ops.flash_ext.add_layer_norm.default

# What makes up a layer beside its attention, as torch makes it.
PARTS = {
    "linear1": nn.Linear,
    "linear2": nn.Linear,
    "norm1": nn.LayerNorm,
    "norm2": nn.LayerNorm,
    "dropout": nn.Dropout,
    "dropout1": nn.Dropout,
    "dropout2": nn.Dropout,
}

# Elements of x. To look at the parameters, as ``_may_accumulate`` does, takes longer than it saves for fewer.
ACCUMULATE_FROM = 2**16


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer`` (Vaswani et al. 2017) whose ``self_attn`` is a ``flash_ext.MultiheadAttention``.

    In bfloat16 and float16 on CUDA the evaluation has GELU in its tanh form, as torch's fused one has.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As ``nn.TransformerEncoderLayer.forward``."""
        if not isinstance(src, Tensor):
            if (node := proxy_of_call(self, src, src_mask, src_key_padding_mask, is_causal)) is not None:
                return node
        masked = src_mask is not None or src_key_padding_mask is not None
        if not _can_evaluate(self, src) or (src.is_nested and masked):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        if src.is_nested:
            return _evaluate_nested([self], src, is_causal)
        return _evaluate(
            [self], src, lambda attn, x, linear: _attend(attn, x, linear, src_key_padding_mask, src_mask, is_causal)
        )

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = _linear_and_activation(x, self.linear1, self.activation)
        return F.linear(hidden, self.linear2.weight, self.linear2.bias)


class TransformerEncoder(nn.TransformerEncoder):
    """``nn.TransformerEncoder`` of such layers, none of which computes what is padding.

    Where torch goes over to nested tensors, the tokens of a padded batch are packed before the first layer, and padding
    is zeros behind the last one, as it is with torch. For that the host waits for the device once, as it does with
    torch. While a CUDA graph is captured it must not: each layer then gets the padding mask, and padding is not zeros.
    """

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As ``nn.TransformerEncoder.forward``."""
        if not isinstance(src, Tensor):
            if (node := proxy_of_call(self, src, mask, src_key_padding_mask, is_causal)) is not None:
                return node
        padding = src_key_padding_mask
        if torch.compiler.is_compiling() or mask is not None or (src.is_nested and padding is not None):
            return super().forward(src, mask, padding, is_causal)
        if padding is not None and _must_not_wait(src):
            return self._finish(self._run(src, padding, is_causal))
        if not all(_is_own(layer, TransformerEncoderLayer) and _can_evaluate(layer, src) for layer in self.layers):
            return super().forward(src, mask, padding, is_causal)
        if src.is_nested:
            return self._finish(_evaluate_nested(self.layers, src, bool(is_causal)))
        if is_causal or (padding is not None and not self._packs(src, padding)):
            return super().forward(src, mask, padding, is_causal)
        if padding is None:
            return self._finish(_evaluate(self.layers, src, _attend))
        tokens = _find_tokens(padding, getattr(self, "mask_check", True))
        if tokens is None:
            return self._finish(self._run(src, padding, is_causal))
        indices, spans = tokens
        if len(indices) == padding.numel():
            return self._finish(_evaluate(self.layers, src, _attend))
        rows = _evaluate_packed(self.layers, src.flatten(0, 1).index_select(0, indices), spans, causal=False)
        padded = rows.new_zeros(padding.numel(), rows.shape[-1]).index_copy_(0, indices, rows)
        return self._finish(padded.view(src.shape))

    def _packs(self, src: Tensor, padding: Tensor) -> bool:
        """Whether torch would make a nested tensor, as far as ``_can_evaluate`` does not say so already."""
        if not getattr(self, "use_nested_tensor", False) or not torch.backends.mha.get_fastpath_enabled():
            return False
        if torch.is_autocast_enabled() or has_torch_function((src, padding)):
            return False
        is_mask = padding.dtype == torch.bool or padding.is_floating_point()
        return src.dim() == 3 and is_mask and padding.shape == src.shape[:2]

    def _run(self, x: Tensor, padding: Tensor, is_causal: bool | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding, is_causal=bool(is_causal))
        return x

    def _finish(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


# ---- Layers one after another ----------------------------------------------------------------------------------------


Attend = Callable[[MultiheadAttention, Tensor, Linear], Tensor]
"""(self_attn, x, linear) -> the heads, (..., num_heads, head_dim), batch first; ``linear`` makes q, k and v of x."""


def _evaluate(layers: Iterable[Any], x: Tensor, attend: Attend) -> Tensor:
    """All layers of (..., embed_dim). But for ``attend``, all is for each token alone."""
    layers = list(layers)
    if _may_accumulate(layers, x):
        return _evaluate_accumulating(layers, x, attend)
    return _evaluate_fused(layers, x, attend)


def _evaluate_fused(layers: list[Any], x: Tensor, attend: Attend) -> Tensor:
    """An addition goes together with the normalisation of its result, where there is one, be it the next layer's."""
    normalised: Tensor | None = None  # x, by the norm that comes next
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if not layer.norm_first:
            _, x = _add_and_normalise(_attend_and_project(layer.self_attn, x, attend), x, layer.norm1, need_sum=False)
            _, x = _add_and_normalise(layer._feed_forward(x), x, layer.norm2, need_sum=False)
            continue
        if normalised is None:
            normalised = _normalise(x, layer.norm1)
        out = _attend_and_project(layer.self_attn, normalised, attend)
        x, normalised = _add_and_normalise(out, x, layer.norm2)
        out = layer._feed_forward(normalised)
        if following is not None and following.norm_first:
            x, normalised = _add_and_normalise(out, x, following.norm1)
        else:
            x, normalised = _add(out, x), None
    return x


def _evaluate_accumulating(layers: list[Any], src: Tensor, attend: Attend) -> Tensor:
    """For a CPU, where memory is what costs beside the products: what is added to x is added by its product."""
    linear = _linear_in_one_memory(layers, src)

    def add_attention(layer: Any, x: Tensor, normalised: Tensor) -> Tensor:
        heads = attend(layer.self_attn, normalised, linear)
        return _add_linear(x, heads.flatten(-2), layer.self_attn.out_proj, in_place=x is not src)

    def add_feed_forward(layer: Any, x: Tensor, normalised: Tensor) -> Tensor:
        hidden = _linear_and_activation(normalised, layer.linear1, layer.activation, linear)
        return _add_linear(x, hidden, layer.linear2, in_place=True)

    x = src
    for layer in layers:
        if layer.norm_first:
            x = add_attention(layer, x, _normalise(x, layer.norm1))
            x = add_feed_forward(layer, x, _normalise(x, layer.norm2))
        else:
            x = _normalise(add_attention(layer, x, x), layer.norm1)
            x = _normalise(add_feed_forward(layer, x, x), layer.norm2)
    return x


def _evaluate_packed(layers: Iterable[Any], x: Tensor, spans: dict[str, Any], causal: bool) -> Tensor:
    """All layers of (total, embed_dim); ``spans`` are the options of ``attention`` that say where sequences lie."""
    return _evaluate(layers, x, lambda attn, x, linear: attn._attend_packed(x, spans, causal, linear=linear)[0])


def _evaluate_nested(layers: Iterable[Any], src: Tensor, causal: bool) -> Tensor:
    if src.size(0) == 0:
        return src
    rows, spans, like_src = packing.pack(src)
    return like_src(_evaluate_packed(layers, rows, spans, causal))


def _attend(
    attn: MultiheadAttention,
    x: Tensor,
    linear: Linear,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The heads of padded batches, (batch, seqlen, num_heads, head_dim)."""
    return attn._attend_batch(x, x, x, padding, False, mask, is_causal, linear)[0]


def _attend_and_project(attn: MultiheadAttention, x: Tensor, attend: Attend) -> Tensor:
    """Self-attention in the layout of ``x``, but not necessarily contiguous."""
    heads = attend(attn, x, F.linear)
    out = attn._project_out(heads)
    return out if heads.dim() == 3 else attn._from_batch(out, x.dim() == 3)


def _find_tokens(padding: Tensor, must_be_left_aligned: bool) -> tuple[Tensor, dict[str, Any]] | None:
    """Which rows of the batch are tokens, int64 (total), and where their sequences lie once they are packed.

    None where torch would not take the mask, (batch, seqlen), bool or floating: there are tokens right of padding.
    """
    is_token = padding.logical_not()
    lengths = is_token.sum(1, dtype=torch.int32)
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    gaps = (is_token[:, 1:] & padding[:, :-1].bool()).any()
    total, num_gaps = torch.stack([cu_seqlens[-1], gaps]).tolist()  # the only time that the host waits
    if num_gaps and must_be_left_aligned:
        return None
    spans = {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": padding.shape[1],
        "max_seqlen_k": padding.shape[1],
    }
    return torch.nonzero_static(is_token.flatten(), size=total).flatten(), spans


def _must_not_wait(src: Tensor) -> bool:
    """Whether reading from the device would be an error, or become a constant of a trace."""
    return is_tracing() or (src.is_cuda and torch.cuda.is_current_stream_capturing())


# ---- When ----------------------------------------------------------------------------------------------------------


def _can_evaluate(layer: nn.TransformerEncoderLayer, src: Tensor) -> bool:
    """Whether the layer may be computed from its parameters, past its submodules, and nobody wants a gradient."""
    if layer.training or torch.compiler.is_compiling() or is_tracing() or has_any_global_hook():
        return False
    if is_functorch_active() or not (src.is_nested or type(src) in (Tensor, nn.Parameter)):
        return False
    parts = layer._modules
    if not all(_is_own(parts[name], kind) for name, kind in PARTS.items()):
        return False
    attn: Any = parts["self_attn"]
    if not _is_own(attn, MultiheadAttention) or attn.bias_k is not None or attn.add_zero_attn:
        return False
    return not torch.is_grad_enabled() or not any_requires_grad(src, *layer.parameters())


def _is_own(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether it is evaluated as its class says: no subclass (parametrized, quantized), no hook, no other forward."""
    return type(module) is kind and not (module.training or is_hooked(module) or "forward" in module.__dict__)


def _may_accumulate(layers: list[Any], x: Tensor) -> bool:
    """Whether the products of a CPU may be written to memory that is there, which is for plain tensors of one dtype."""
    if x.device.type != "cpu" or x.numel() < ACCUMULATE_FROM or not x.is_contiguous():
        return False
    if is_any_autocast_enabled() or is_forward_mode():
        return False
    if x.dim() == 3 and not all(layer.self_attn.batch_first for layer in layers):
        return False
    return all(
        type(p) in (nn.Parameter, Tensor) and p.dtype == x.dtype and p.layout is torch.strided
        for layer in layers
        for p in layer.parameters()
    )


# ---- What ----------------------------------------------------------------------------------------------------------


def _linear_in_one_memory(layers: list[Any], x: Tensor) -> Linear:
    """``F.linear`` of tensors as long as ``x`` by weights of ``layers``; a result is valid until the next call.

    So q, k and v and the hidden units of all layers share one memory: they are never needed at the same time. The C
    library returns tensors of this size to the system when they are freed, and to touch new memory costs a CPU a page
    fault every 4 KiB.
    """
    width = max(max(3 * layer.self_attn.embed_dim, layer.linear1.weight.shape[0]) for layer in layers)
    memory = x.new_empty(x.shape[:-1].numel() * width)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        out = memory[: len(rows) * len(weight)].view(len(rows), len(weight))
        if bias is None:
            torch.mm(rows, weight.t(), out=out)
        else:
            torch.addmm(bias, rows, weight.t(), out=out)
        return out.view(*x.shape[:-1], len(weight))

    return linear


def _add_linear(x: Tensor, rows: Tensor, linear: nn.Linear, in_place: bool) -> Tensor:
    """x + linear(rows), perhaps in the place of ``x``; the product accumulates on x and the bias."""
    if linear.bias is None:
        total = x if in_place else x.clone()
    else:
        total = x.add_(linear.bias) if in_place else x + linear.bias
    total.view(-1, total.shape[-1]).addmm_(rows.reshape(-1, rows.shape[-1]), linear.weight.t())
    return total


def _normalise(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _add(out: Tensor, x: Tensor) -> Tensor:
    """x + out, in the place of ``out``, which nobody else holds; but in the layout of ``x``."""
    return out.add_(x) if out.dtype == x.dtype and out.is_contiguous() else x + out


def _add_and_normalise(out: Tensor, x: Tensor, norm: nn.LayerNorm, need_sum: bool = True) -> tuple[Tensor, Tensor]:
    """(x + out, its layer norm); ``out`` belongs to nobody else. Without ``need_sum`` the sum may be anything."""
    if _is_one_kernel(out, x, norm):
        total, normalised = call(_ADD_LAYER_NORM, out, x, norm.weight, norm.bias, norm.eps, need_sum)
        return total, normalised
    total = _add(out, x)
    return total, _normalise(total, norm)


def _is_one_kernel(out: Tensor, x: Tensor, norm: nn.LayerNorm) -> bool:
    """Whether ``add_layer_norm`` takes them as they lie. On a CPU torch's two are as good."""
    if not x.is_cuda or norm.normalized_shape != x.shape[-1:]:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not (x.is_contiguous() and out.is_contiguous()):
        return False
    parameters = [p for p in (norm.weight, norm.bias) if p is not None]
    return out.dtype == x.dtype and all(p.dtype == x.dtype and _is_plain(p) for p in parameters)


def _linear_and_activation(
    x: Tensor, linear: nn.Linear, activation: Callable[[Tensor], Tensor], product: Linear = F.linear
) -> Tensor:
    weight, bias = linear.weight, linear.bias
    approximate = _approximation(activation)
    is_relu = activation is F.relu or _is_own_activation(activation, nn.ReLU)
    if x.is_cuda and bias is not None and (is_relu or _may_be_tanh(approximate, x.dtype)) and _is_plain(weight):
        # The product's epilogue adds the bias and activates.
        hidden = addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=not is_relu)
        return hidden.view(*x.shape[:-1], weight.shape[0])
    if is_relu:
        return product(x, weight, bias).relu_()
    if approximate is not None:
        return torch.ops.aten.gelu_(product(x, weight, bias), approximate=approximate)
    return activation(F.linear(x, weight, bias))  # which may keep what it is given


def _approximation(activation: Any) -> str | None:
    """Which form of GELU it is, "none" or "tanh"; None: another function."""
    if activation is F.gelu:
        return "none"
    return activation.approximate if _is_own_activation(activation, nn.GELU) else None


def _may_be_tanh(approximate: str | None, dtype: torch.dtype) -> bool:
    """The epilogue's GELU is the tanh form. 16 bits hardly tell; torch's fused evaluation takes it in all dtypes."""
    return approximate == "tanh" or (approximate == "none" and dtype in (torch.bfloat16, torch.float16))


def _is_plain(weight: Tensor) -> bool:
    """Whether a raw product may take it: no tensor subclass, no autocast that has to cast it first."""
    return type(weight) in (nn.Parameter, Tensor) and not is_any_autocast_enabled()


def _is_own_activation(activation: Any, kind: type[nn.Module]) -> bool:
    return type(activation) is kind and not (is_hooked(activation) or "forward" in activation.__dict__)
