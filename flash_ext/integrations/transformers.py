"""An attention implementation for transformers: ``register()``, then ``attn_implementation="fext"``.

It serves every model that attends through transformers' ``AttentionInterface``, with what its other implementations
have between them: masks, position biases with their gradient, softcap, sinks, sliding windows, dropout, GQA without
repeating keys and values, padded and packed batches, float32, CPU and CUDA.
"""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from flash_ext.argument_checks import describe
from flash_ext.functional import attention, attention_weights, decode, draw_rng_state
from flash_ext.head_dims import cut_head_dim, pad_head_dim, scale_of

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.generation.continuous_batching import PagedAttentionCache
except ImportError as error:
    raise ImportError(
        "flash_ext.integrations.transformers needs transformers 5 or later: pip install -U transformers"
    ) from error

from flash_ext.integrations.transformers_masks import Visibility, VisibilityMask, make_mask

NAME = "fext"
_CACHE_TAKES_KWARGS = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters


def register(name: str = NAME) -> str:
    """Makes ``attn_implementation=name`` known to transformers.

    The name is not "flashext": transformers takes every name with "flash" in it for FlashAttention itself, looks for
    that package or a kernel of its hub, and raises. ``flash_ext.as_flash_attn()`` is the way to be taken for it.

    Args:
        name: another name, if you like.

    Returns:
        ``name``, to be given to ``from_pretrained``, ``from_config`` or ``set_attn_implementation``.

    Raises:
        ValueError: a name that transformers would take for something else.
        TypeError: no name.
    """
    _check_name(name)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    # Continuous batching of transformers before 5.20 asks for this one, and gives it no masks.
    AttentionInterface.register(f"paged|{name}", attention_forward)
    return name


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a str that is not empty, got {describe(name)}")
    reserved = {"eager": "its own implementation", "flash": "FlashAttention or a kernel of its hub"}
    reserved |= {"sdpa": "torch's SDPA", "flex_attention": "FlexAttention", "|": "a prefix", "/": "a kernel of its hub"}
    for part, taken_for in reserved.items():
        if part in name:
            raise ValueError(
                f"name must not contain {part!r}, which transformers takes for {taken_for}, got {name!r}; "
                f"the default is {NAME!r}"
            )


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    deterministic: bool | None = None,
    output_attentions: bool = False,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers' ``AttentionInterface`` calls it.

    Args:
        module: the attention module; ``is_causal`` and ``layer_idx`` are read from it.
        query: (batch, heads_q, q_length, head_dim).
        key, value: (batch, heads_kv, kv_length, head_dim).
        attention_mask: of ``make_mask``, or any that SDPA takes: bool (True = visible) or floating (added).
        dropout, scaling, softcap: as for ``flash_ext.attention``.
        is_causal: where there is no mask; None: as the module says.
        sliding_window: how many keys a query sees, its own included, at least 1; a mask has it already.
        s_aux: (heads_q), the sinks.
        position_bias: (batch|1, heads_q|1, q_length|1, kv_length|1), added to the scores. Differentiable.
        deterministic: as for ``flash_ext.attention``.
        output_attentions: also return the weights.
        cache: a cache of continuous batching, into which key and value go first.
        **kwargs: cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k (or max_seqlen_*) of packed sequences, and
            what continuous batching gives to its cache. Other names are not read: models hand over what is meant for
            others.

    Returns:
        (out (batch, q_length, heads_q, head_dim), weights (batch, heads_q, q_length, kv_length) or None).

    Raises:
        RuntimeError, ValueError, TypeError: as ``flash_ext.attention``.
        NotImplementedError: sinks of a form that it does not have, or weights or a position_bias with cu_seq_lens_*.
    """
    if kwargs.get("sinks") is not None:
        raise NotImplementedError(
            "flash_ext: sinks that differ between queries are not supported, only s_aux (heads): use "
            "attn_implementation='eager'"
        )
    options: dict[str, Any] = dict(softmax_scale=scale_of(query, scaling))
    if softcap is not None:
        options["softcap"] = softcap
    if s_aux is not None:
        options["sink"] = s_aux.flatten()
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if isinstance(cache, PagedAttentionCache):
        is_causal = True  # of requests that continue; what mask there is says the same
        attention_mask = None
        key, value, kwargs = _update_paged_cache(cache, module, key, value, dict(kwargs))
        if kwargs.get("k_cache") is not None:
            return _attend_to_blocks(query, key, value, sliding_window, kwargs, options), None
    q, k, v = (pad_head_dim(x.transpose(1, 2)) for x in (query, key, value))
    if q.shape[0] != k.shape[0]:
        batch = max(q.shape[0], k.shape[0])
        q, k, v = (x.expand(batch, *x.shape[1:]) for x in (q, k, v))
    options |= dict(dropout_p=dropout, deterministic=deterministic)

    whole_matrix = output_attentions or (position_bias is not None and _has_documents(attention_mask))
    if whole_matrix and isinstance(attention_mask, VisibilityMask):
        attention_mask = attention_mask.dense()
    lengths = _packed_lengths(kwargs, attention_mask)
    if lengths is not None:
        if output_attentions or position_bias is not None:
            raise NotImplementedError(
                "flash_ext: cu_seq_lens_q and cu_seq_lens_k without a mask are not supported with position_bias or "
                "output_attentions: give position_ids, of which transformers makes a mask, in their place"
            )
        options |= lengths | _window_of(attention_mask, is_causal, sliding_window)
        out = _attend_packed(q, k, v, options)
        return cut_head_dim(out, value.shape[-1]).contiguous(), None
    k, v, visible = _options_of_mask(q, k, v, attention_mask, is_causal, sliding_window)
    bias = _sum(position_bias, visible.pop("bias", None))
    if bias is not None:
        visible["bias"] = bias if bias.shape[-1] == 1 else bias[..., : k.shape[1]]
    options |= visible
    if output_attentions:
        return _attend_with_weights(q, k, v, value.shape[-1], options)
    out = _attend(q, k, v, options)
    return cut_head_dim(out, value.shape[-1]).contiguous(), None


# ---- Masks ----------------------------------------------------------------------------------------------------------


def _options_of_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, sliding_window: int | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(k, v, options of ``attention``) that show what the mask shows; keys behind all that is visible are cut off."""
    if isinstance(mask, VisibilityMask) and mask.visibility is None:
        mask = mask.dense()
    if isinstance(mask, VisibilityMask):
        assert mask.visibility is not None
        return _options_of_rules(q, k, v, mask.visibility, mask)
    if mask is not None:
        mask = _collapse(mask)
        return k, v, {"mask" if mask.dtype == torch.bool else "bias": mask}
    q_length = q.shape[1]
    window = _window_of(None, is_causal, sliding_window)
    if not is_causal:
        return k, v, window
    if q_length > 1 and k.shape[1] > q_length:  # a cache with room for more, of which the start is filled
        k, v = k[:, :q_length], v[:, :q_length]
    return k, v, window


def _options_of_rules(
    q: Tensor, k: Tensor, v: Tensor, rules: Visibility, mask: VisibilityMask
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    options: dict[str, Any] = {"window_size": (rules.left, rules.right)}
    q_length, kv_length = q.shape[1], k.shape[1]
    if tuple(mask.shape[2:]) != (q_length, kv_length):
        return k, v, {"mask": mask.dense()}  # which broadcasts, or is refused with its shape
    padding = rules.padding
    limited = rules.left >= 0 or rules.right >= 0
    if isinstance(rules.offset, Tensor):
        end = (rules.offset + q_length).to(torch.int32)
        options["seqused_k"] = end.expand(q.shape[0]).contiguous()
    elif limited and rules.offset + q_length != kv_length:
        if rules.right == 0 and rules.offset + q_length < kv_length:
            kv_length = rules.offset + q_length
            k, v = k[:, :kv_length], v[:, :kv_length]
            padding = None if padding is None else padding[:, :kv_length]
        elif rules.offset == 0:
            options["top_left"] = True
        else:
            return k, v, {"mask": mask.dense()}
    if padding is not None:
        options["mask"] = padding[:, None, None, :]
    return k, v, options


def _window_of(mask: Tensor | None, is_causal: bool, sliding_window: int | None) -> dict[str, Any]:
    if isinstance(mask, VisibilityMask) and mask.visibility is not None:
        return {"window_size": (mask.visibility.left, mask.visibility.right)}
    if sliding_window is not None and sliding_window < 1:  # transformers' own implementations differ on it
        raise ValueError(f"sliding_window must be None or at least 1, got {sliding_window}")
    left = -1 if sliding_window is None else sliding_window - 1
    return {"window_size": (left, 0 if is_causal else left)}


def _collapse(mask: Tensor) -> Tensor:
    """Without what ``expand`` repeats."""
    for dim, stride in enumerate(mask.stride()):
        if stride == 0 and dim < mask.dim() - 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a + b if a is not None and b is not None else a if b is None else b


# ---- Attention ------------------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    if q.shape[1] == 1 and _can_decode(q, k, v, options):
        return _decode(q, k, v, **options)
    out = attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


def _can_decode(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether the kernels for new tokens, which are not differentiable, have it all."""
    sink = options.get("sink")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v) if t is not None):
        return False
    if torch.is_grad_enabled() and sink is not None and sink.requires_grad:
        return False
    plain = options["dropout_p"] == 0 and options.get("mask") is None and options.get("bias") is None
    return plain and not options.get("top_left") and k.dtype == q.dtype == v.dtype


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float,
    deterministic: bool | None,
    seqused_k: Tensor | None = None,
    **options: Any,
) -> Tensor:
    out = decode(q, k, v, cache_seqlens=seqused_k, **options)
    assert isinstance(out, Tensor)
    return out


def _attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, head_dim: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if options["dropout_p"] > 0:
        options["rng_state"] = draw_rng_state(q.device)
    out, lse = attention(q, k, v, return_lse=True, **options)
    scores = {name: value for name, value in options.items() if name not in ("sink", "deterministic")}
    weights = attention_weights(q, k, lse, **scores)
    return cut_head_dim(out, head_dim).contiguous(), weights


# ---- Packed sequences and continuous batching -----------------------------------------------------------------------


def _packed_lengths(kwargs: dict[str, Any], mask: Tensor | None) -> dict[str, Any] | None:
    """cu_seqlens_* and max_seqlen_* of ``attention``, unless a mask says what belongs together."""
    rules = mask.visibility if isinstance(mask, VisibilityMask) else None
    if mask is not None and (rules is None or rules.padding is not None):
        return None
    cu_seqlens_q, cu_seqlens_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        lengths = dict(cu_seqlens_q=cu_seqlens_q.to(torch.int32), cu_seqlens_k=cu_seqlens_k.to(torch.int32))
        return lengths | {f"max_seqlen_{side}": _longest(kwargs, side) for side in "qk"}
    if rules is not None and rules.cu_seqlens is not None:
        return dict(cu_seqlens_q=rules.cu_seqlens, cu_seqlens_k=rules.cu_seqlens)
    return None


def _has_documents(mask: Tensor | None) -> bool:
    return isinstance(mask, VisibilityMask) and mask.visibility is not None and mask.visibility.documents is not None


def _longest(kwargs: dict[str, Any], side: str) -> int | None:
    """As given by one of two names; one that lies on a device is not waited for, kernels do without."""
    value = kwargs.get(f"max_length_{side}")
    value = kwargs.get(f"max_seqlen_{side}") if value is None else value
    return value if isinstance(value, int) else None


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    out = attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **options)
    assert isinstance(out, Tensor)
    return out.unflatten(0, q.shape[:2])


def _update_paged_cache(
    cache: Any, module: torch.nn.Module, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(key, value, kwargs) of this layer, with all keys and values that are visible, or blocks to append to."""
    layer: Any = module.layer_idx
    if _CACHE_TAKES_KWARGS:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
        return key, value, kwargs
    if kwargs.get("block_table") is not None:
        raise NotImplementedError(
            f"flash_ext: block_table of continuous batching needs transformers 5.20, got {transformers.__version__}: "
            "pip install -U transformers"
        )
    kind = "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
    for name in ("cu_seq_lens_k", "max_seqlen_k", "max_length_k"):
        if isinstance(kwargs.get(name), MutableMapping):
            kwargs[name] = kwargs[name][kind]
    indices = {name: kwargs[name] for name in ("read_index", "write_index")}
    key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, **indices)
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None], kwargs


def _attend_to_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sliding_window: int | None,
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """One new token of each request: (1, requests, heads_q, head_dim)."""
    q, k, v = (x.transpose(1, 2).reshape(-1, 1, x.shape[1], x.shape[-1]) for x in (query, key, value))
    cu_seqlens_k = kwargs["cu_seq_lens_k"]
    requests = q.shape[0]
    cached = (cu_seqlens_k[1 : requests + 1] - cu_seqlens_k[:requests] - 1).to(torch.int32)
    window = _window_of(None, True, sliding_window)
    blocks = kwargs["block_table"].clamp(min=0)  # -1 stands for a block that no request uses
    k_cache, v_cache = kwargs["k_cache"], kwargs["v_cache"]
    options = options | window | dict(cache_seqlens=cached, block_table=blocks)
    with torch.no_grad():
        out = decode(q, k_cache, v_cache, k=k, v=v, **options)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1).contiguous()
