"""``MultiheadAttention``: torch's module with attention that never writes the score matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_ext import packing
from flash_ext.argument_checks import as_flag, as_number, check_optional_tensors, check_tensors
from flash_ext.functional import attention, attention_weights, draw_rng_state
from flash_ext.fx_leaf import proxy_of_call
from flash_ext.head_dims import MAX_HEAD_DIM, cut_head_dim, pad_head_dim

Linear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""(x, weight, bias) -> ``F.linear`` of them, perhaps in memory that is there already."""


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` (Vaswani et al. 2017, section 3.2.2), computed by ``flash_ext.attention``.

    Constructor, attributes, initialisation, ``state_dict`` and semantics are those of ``nn.MultiheadAttention``, with
    these differences:

    - A query that may see no key gives zeros (before the output projection) and zero gradients, where torch gives NaN.
    - A float ``attn_mask`` or ``key_padding_mask`` may have any floating dtype, whatever the query's; the two masks may
      be of different kinds (bool and float) without a warning.
    - The ``is_causal`` hint is used beside a ``key_padding_mask`` too, if query and key are equally long. The causal
      rule then replaces ``attn_mask``, which is not read.
    - Dropout uses the library's own generator (seeded by torch's), not ``F.dropout``; the probability is rounded to a
      multiple of 1/256.
    - Nested tensors are accepted for self-attention in training as well, and computed without padding; ``is_causal``
      then needs no ``attn_mask`` and is the causal rule of each sequence.
    - The constructor refuses flags that are no bool and a ``dropout`` that is no number from 0 to 1.
    - ``torch.jit.script`` is not supported.

    Memory beyond inputs and outputs is linear in the sequence length, except with ``need_weights=True`` (the weights
    are quadratic) and with two float masks at once (their sum is stored).

    Raises:
        ValueError: from the constructor, if ``embed_dim / num_heads`` exceeds 256, or ``dropout`` is not in [0, 1].
        TypeError: from the constructor, if a flag is no bool, or ``dropout`` no number.
        AssertionError, RuntimeError: as ``nn.MultiheadAttention``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        flags = dict(bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, batch_first=batch_first)
        for name, flag in flags.items():
            as_flag(name, flag)
        dropout = as_number("dropout", dropout)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be in [0, 1], got {dropout}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        if obstacle := obstacle_of_head_dim(self):
            raise ValueError(f"embed_dim / num_heads: {obstacle}")
        refuse_to_be_bypassed(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends; arguments, shapes and results as in ``nn.MultiheadAttention.forward``.

        Args:
            query: (L, N, embed_dim), with ``batch_first`` (N, L, embed_dim), unbatched (L, embed_dim).
            key: (S, N, kdim), (N, S, kdim) or (S, kdim).
            value: (S, N, vdim), (N, S, vdim) or (S, vdim).
            key_padding_mask: (N, S), unbatched (S); bool (True = ignore the key) or floating (added to the scores).
            need_weights: also return the attention weights, after dropout; they are recomputed from the log-sum-exp.
            attn_mask: (L, S) or (N * num_heads, L, S); bool (True = may not attend) or floating (added to the scores,
                with gradient).
            average_attn_weights: return the mean over heads, (N, L, S), instead of (N, num_heads, L, S).
            is_causal: a hint that ``attn_mask``, which must be given, is the causal mask; with nested tensors, which
                have no ``attn_mask``, the causal rule itself.

        Returns:
            The output in the layout of ``query``, and the weights or None. The weights of nested tensors are dense: L
            and S are the length of the longest sequence, and what lies behind a shorter one is 0.

        Raises:
            AssertionError, RuntimeError: as ``nn.MultiheadAttention`` with the same arguments.
            TypeError: a tensor of a class that is not supported, or a flag that is not a bool.
        """
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            if (node := proxy_of_call(self, query, key, value, *options)) is not None:
                return node
            check_tensors(query=query, key=key, value=value)
        if not type(need_weights) is type(average_attn_weights) is type(is_causal) is bool:
            need_weights = as_flag("need_weights", need_weights)
            average_attn_weights = as_flag("average_attn_weights", average_attn_weights)
            is_causal = as_flag("is_causal", is_causal)
        if query.is_nested or key.is_nested or value.is_nested:
            alone = query is key and key is value and key_padding_mask is None and attn_mask is None
            if not alone or self.bias_k is not None or self.add_zero_attn:
                raise AssertionError(
                    "MultiheadAttention does not support NestedTensor outside of its fast path, self-attention: one "
                    "tensor as query, key and value, no masks, no add_bias_kv, no add_zero_attn."
                )
            out, weights = self._forward_nested(query, need_weights, is_causal)
            return out, weights.mean(dim=1) if weights is not None and average_attn_weights else weights

        out, weights = self._attend_batch(query, key, value, key_padding_mask, need_weights, attn_mask, is_causal)
        is_batched = query.dim() == 3
        out = self._from_batch(self._project_out(out), is_batched).contiguous()
        if weights is not None:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if is_batched else weights[0]
        return out, weights

    def _attend_batch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
        linear: Linear = F.linear,
    ) -> tuple[Tensor, Tensor | None]:
        """What ``forward`` projects and returns, of batches that are padded and not nested.

        Returns:
            The heads, (batch, seqlen_q, num_heads, head_dim) whatever the layout of the inputs, and the weights of
            each head, (batch, num_heads, seqlen_q, seqlen_k), or None.
        """
        self._check_inputs(query, key, value, key_padding_mask, attn_mask, is_causal)
        is_batched = query.dim() == 3
        q, k, v = (self._to_batch(x) for x in self._project(query, key, value, linear))
        if key_padding_mask is not None and not is_batched:
            key_padding_mask = key_padding_mask[None]

        causal = is_causal and not need_weights and self._may_believe_causal(q, k, key_padding_mask)
        if causal:
            attn_mask = None
        self._check_mask_shapes(key_padding_mask, attn_mask, q, k)
        k, v, key_padding_mask, attn_mask = self._append_keys(k, v, key_padding_mask, attn_mask)
        k, v, mask, bias = self._mask_and_bias(k, v, key_padding_mask, attn_mask)
        return self._attend(q, k, v, need_weights, causal=causal, top_left=causal, mask=mask, bias=bias)

    def _attend_packed(
        self, rows: Tensor, spans: dict[str, Any], causal: bool, need_weights: bool = False, linear: Linear = F.linear
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of packed sequences, (total, embed_dim). ``spans``: cu_seqlens and what goes with them.

        Returns:
            The heads, (total, num_heads, head_dim), which are not projected yet, and the weights or None.
        """
        q, k, v = self._project(rows, rows, rows, linear)
        return self._attend(q, k, v, need_weights, causal=causal, top_left=causal, **spans)

    def _forward_nested(self, x: Tensor, need_weights: bool, causal: bool) -> tuple[Tensor, Tensor | None]:
        """Self-attention of each sequence of a nested tensor, packed. Weights are padded by zeros, as torch's are."""
        if x.size(0) == 0:
            return x, torch.zeros(0, self.num_heads, 0, 0, dtype=x.dtype, device=x.device) if need_weights else None
        rows, spans, like_x = packing.pack(x)
        if need_weights:
            spans = packing.with_longest(spans)
        out, weights = self._attend_packed(rows, spans, causal, need_weights)
        return like_x(self._project_out(out)), weights

    def _project_out(self, heads: Tensor) -> Tensor:
        """(..., embed_dim) of (..., num_heads, head_dim)."""
        return F.linear(heads.flatten(-2), self.out_proj.weight, self.out_proj.bias)

    def _project(self, query: Tensor, key: Tensor, value: Tensor, linear: Linear = F.linear) -> list[Tensor]:
        """q, k and v in the layout of the inputs, (..., num_heads, head_dim); ``linear`` makes them of one input."""
        # One product of what has one input; its parts are views, which the kernels read as they lie.
        packed, bias = self.in_proj_weight, self.in_proj_bias
        head_shape = (self.num_heads, self.head_dim)
        if packed is not None and query is key and key is value:
            return list(torch.unflatten(linear(query, packed, bias), -1, (3, *head_shape)).unbind(-3))
        if packed is not None and key is value:
            of_query, of_key = slice(None, self.embed_dim), slice(self.embed_dim, None)
            q = F.linear(query, packed[of_query], None if bias is None else bias[of_query])
            kv = F.linear(key, packed[of_key], None if bias is None else bias[of_key])
            return [torch.unflatten(q, -1, head_shape), *torch.unflatten(kv, -1, (2, *head_shape)).unbind(-3)]
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if packed is None else packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        projections = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return [torch.unflatten(x, -1, head_shape) for x in projections]

    def _to_batch(self, x: Tensor) -> Tensor:
        """(batch, seqlen, heads, head_dim) of a projection in the layout of the inputs."""
        if x.dim() == 3:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _from_batch(self, x: Tensor, is_batched: bool) -> Tensor:
        """The layout of the inputs of (batch, seqlen, embed_dim)."""
        if not is_batched:
            return x[0]
        return x if self.batch_first else x.transpose(0, 1)

    def _may_believe_causal(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None) -> bool:
        """Whether the causal rule gives what torch would compute from a causal ``attn_mask``.

        Without padding torch itself drops the mask. Beside padding torch adds the mask. In that mask appended keys are
        visible, and if lengths differ the hint does not say where its diagonal lies.
        """
        appends_keys = self.bias_k is not None or self.add_zero_attn
        return key_padding_mask is None or (q.shape[1] == k.shape[1] and not appends_keys)

    def _append_keys(
        self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Appends ``bias_k``/``bias_v`` and the zero key; both are visible whatever the masks say."""
        seqlen_k = k.shape[1]
        if self.bias_k is not None and self.bias_v is not None:
            shape = (k.shape[0], 1, self.num_heads, self.head_dim)
            k = torch.cat([k, self.bias_k.view(1, 1, *shape[2:]).expand(shape).to(k.dtype)], dim=1)
            v = torch.cat([v, self.bias_v.view(1, 1, *shape[2:]).expand(shape).to(v.dtype)], dim=1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
        num_appended = k.shape[1] - seqlen_k
        if num_appended > 0:
            key_padding_mask = None if key_padding_mask is None else F.pad(key_padding_mask, (0, num_appended))
            attn_mask = None if attn_mask is None else F.pad(attn_mask, (0, num_appended))
        return k, v, key_padding_mask, attn_mask

    def _mask_and_bias(
        self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """k, v, and torch's two masks as one ``mask`` (True = visible) and one ``bias`` that broadcast.

        ``attention`` takes one of each. With two bool masks, the padding becomes a bias of -inf, (batch, 1, 1,
        seqlen_k), because their union would be quadratic. The padded keys and values become zeros, so
        that a NaN there has no influence.
        """
        padding = key_padding_mask
        if padding is not None and attn_mask is not None and padding.dtype == attn_mask.dtype == torch.bool:
            k, v = (x.masked_fill(padding[:, :, None, None], 0) for x in (k, v))
            padding = torch.zeros_like(padding, dtype=torch.float32).masked_fill(padding, -torch.inf)
        if padding is not None:
            padding = padding[:, None, None, :]
        if attn_mask is not None:
            of_heads = (k.shape[0], self.num_heads)
            attn_mask = torch.unflatten(attn_mask, 0, of_heads) if attn_mask.dim() == 3 else attn_mask[None, None]
        given = [m for m in (attn_mask, padding) if m is not None]
        hidden = [m for m in given if m.dtype == torch.bool]
        biases = [m for m in given if m.dtype != torch.bool]
        return k, v, ~hidden[0] if hidden else None, sum(biases[1:], start=biases[0]) if biases else None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, need_weights: bool, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(out, weights) with the options of ``attention``; head dims of any size up to the largest."""
        options["softmax_scale"] = self.head_dim**-0.5
        if self.training and self.dropout != 0:
            options["dropout_p"] = self.dropout
            options["rng_state"] = draw_rng_state(q.device)
        q, k, v = pad_head_dim(q), pad_head_dim(k), pad_head_dim(v)
        out, lse = attention(q, k, v, return_lse=True, **options)
        out = cut_head_dim(out, self.head_dim)
        if not need_weights:
            return out, None
        weights = attention_weights(q, k, lse, **options)
        # Torch's weights come from softmax, which autocast runs in float32 on CUDA only.
        widen = q.is_cuda and torch.is_autocast_enabled("cuda")
        return out, weights.float() if widen else weights

    def _check_inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        """Raises what ``nn.MultiheadAttention`` raises, before anything is computed: its messages are part of its
        interface, and torch's tests look for them. Raises TypeError for classes of tensors that it would misread."""
        if not type(query) is type(key) is type(value) is Tensor:
            check_tensors(query=query, key=key, value=value)
        if key_padding_mask is not None or attn_mask is not None:
            check_optional_tensors(key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        if type(is_causal) is not bool:
            as_flag("is_causal", is_causal)
        num_dims = query.dim()
        if num_dims not in (2, 3):
            raise AssertionError(
                f"query should be unbatched 2D or batched 3D tensor but received {num_dims}-D query tensor"
            )
        kind = "batched" if num_dims == 3 else "unbatched"
        expected = f"For {kind} ({num_dims}-D) `query`, expected"
        if key.dim() != num_dims or value.dim() != num_dims:
            raise AssertionError(
                f"{expected} `key` and `value` to be {num_dims}-D "
                f"but found {key.dim()}-D and {value.dim()}-D tensors respectively"
            )
        if key_padding_mask is not None and key_padding_mask.dim() != num_dims - 1:
            raise AssertionError(
                f"{expected} `key_padding_mask` to be `None` or {num_dims - 1}-D "
                f"but found {key_padding_mask.dim()}-D tensor instead"
            )
        if attn_mask is not None and attn_mask.dim() not in (2, 3):
            raise AssertionError(
                f"{expected} `attn_mask` to be `None`, 2-D or 3-D but found {attn_mask.dim()}-D tensor instead"
            )
        if num_dims == 2 and attn_mask is not None and attn_mask.dim() == 3:
            shape = (self.num_heads, query.shape[0], key.shape[0])
            if attn_mask.shape != shape:
                raise AssertionError(f"Expected `attn_mask` shape to be {shape} but got {tuple(attn_mask.shape)}")
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise AssertionError(f"only bool and floating types of {name} are supported, but got {mask.dtype}")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(f"was expecting embedding dimension of {self.embed_dim}, but got {query.shape[-1]}")
        if key.shape[:-1] != value.shape[:-1]:
            raise AssertionError(f"key shape {tuple(key.shape)} does not match value shape {tuple(value.shape)}")

    def _check_mask_shapes(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, q: Tensor, k: Tensor
    ) -> None:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        if key_padding_mask is not None and key_padding_mask.shape != (batch, seqlen_k):
            shape = tuple(key_padding_mask.shape)
            raise AssertionError(f"The shape of key_padding_mask is {shape}, but should be {(batch, seqlen_k)}.")
        if attn_mask is not None:
            leading = (batch * self.num_heads,) if attn_mask.dim() == 3 else ()
            expected = (*leading, seqlen_q, seqlen_k)
            if attn_mask.shape != expected:
                kind = f"{attn_mask.dim()}D attn_mask"
                raise RuntimeError(f"The shape of the {kind} is {tuple(attn_mask.shape)}, but should be {expected}.")


def refuse_to_be_bypassed(module: nn.MultiheadAttention) -> None:
    """Keeps ``nn.TransformerEncoderLayer`` from running its fused evaluation layer on the weights of ``module``.

    Torch calls the modules of a layer one by one as soon as one of them has a forward hook, whatever the hook does.
    """
    module.register_forward_pre_hook(_no_change)


def _no_change(module: nn.Module, args: tuple[Any, ...]) -> None:
    pass


def is_hooked(module: nn.Module) -> bool:
    """Whether the module has a hook other than the one above, which sees and changes nothing."""
    if module._forward_hooks:
        return True
    return bool(module._forward_pre_hooks) and any(
        hook is not _no_change for hook in module._forward_pre_hooks.values()
    )


def obstacle_of_head_dim(module: nn.MultiheadAttention) -> str:
    if module.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {module.head_dim}, at most {MAX_HEAD_DIM} is supported"
    return ""
