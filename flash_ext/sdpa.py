"""``torch.nn.functional.scaled_dot_product_attention``, computed by ``flash_ext.attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext import nested
from flash_ext.argument_checks import as_flag, as_number, check_optional_tensors, errors_name
from flash_ext.functional import attention
from flash_ext.head_dims import check_head_dims, cut_head_dim, pad_head_dim, scale_of
from flash_ext.integrations import aten_fused
from flash_ext.torch_private import CAUSAL_BIAS, in_context_parallel, is_any_autocast_enabled, is_instance

_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "bias": "attn_mask", "mask": "attn_mask"}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's function, with its signature and semantics; E and Ev may be any size up to 256.

    Differences: a query that sees no key gives 0, where torch's result depends on the backend. attn_mask may have any
    floating dtype. attn_mask together with is_causal raises on every device, as torch documents; some of torch's
    backends combine the two instead.

    Args:
        query: (..., heads, L, E), (heads, L, E) or (L, E); or, with key and value likewise, a jagged nested tensor
            (batch, heads, jagged L, E), where attn_mask counts from the start of each sequence.
        key: (..., heads, S, E). Dimensions before the last two broadcast.
        value: (..., heads, S, Ev).
        attn_mask: bool (True = visible) or floating (added to the scores, differentiable), broadcasts to
            (..., heads, L, S); or a ``torch.nn.attention.bias.CausalBias`` for L and S, which is as fast as is_causal.
        dropout_p: applied whenever it is > 0, also in evaluation; rounded to a multiple of 1/256 (see
            ``flash_ext.attention``).
        is_causal: key j is visible to query i where j <= i, also when L != S.
        scale: default 1 / sqrt(E).
        enable_gqa: query's heads may be a multiple of key's and value's.

    Returns:
        (..., heads, L, Ev) in query's dtype; in memory in the order of query, or as (..., L, heads, Ev).

    Raises:
        RuntimeError: attn_mask is given together with is_causal, or arguments do not fit together.
        TypeError: an argument has a type that is not allowed.
    """
    if not type(is_causal) is type(enable_gqa) is bool:
        is_causal, enable_gqa = as_flag("is_causal", is_causal), as_flag("enable_gqa", enable_gqa)
    if type(dropout_p) is not float:
        dropout_p = as_number("dropout_p", dropout_p)
    if scale is not None and type(scale) is not float:
        scale = as_number("scale", scale, "multiply query by it, which gives it its gradient too")
    if isinstance(query, Tensor) and query.is_nested:
        return _attend_to_nested(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not is_any_autocast_enabled() and not in_context_parallel():
        fused = aten_fused.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if fused is not None:
            return fused
    _check(query, key, value, attn_mask, is_causal)
    if query.dim() == 2:
        query, key, value = query[None], key[None], value[None]
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    lead = _broadcast("dimensions before the heads", query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_to_rows(x, lead) for x in _match_heads(query, key, value, enable_gqa))
    visible = bias = None
    top_left = True
    if attn_mask is not None:
        if type(attn_mask) is not Tensor and is_instance(attn_mask, CAUSAL_BIAS):
            # A CausalBias stands for a rule. The values of this tensor have no meaning.
            is_causal, top_left = True, _starts_at_top_left(attn_mask, q.shape[1], k.shape[1])
        else:
            visible, bias = _split_mask(attn_mask, lead, (*lead, q.shape[2], q.shape[1], k.shape[1]))
    out = _attend(
        q,
        k,
        v,
        causal=is_causal,
        top_left=top_left,
        softmax_scale=scale_of(query, scale),
        mask=visible,
        bias=bias,
        dropout_p=dropout_p,
    )
    out = cut_head_dim(out, value.shape[-1]).transpose(1, 2)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[1:])


@errors_name(**_NAMES)
def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


def _attend_to_nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention of (batch, heads, jagged seqlen, head_dim). Their values are (heads, total, head_dim)."""
    shape = "(batch, heads, jagged seqlen, head_dim)"
    query_rows, key_rows, value_rows = nested.values(2, shape, query=query, key=key, value=value)
    check_head_dims({"query": query_rows, "key": key_rows}, {"value": value_rows})
    options: dict[str, Any] = {}
    if attn_mask is not None:
        _check_mask(attn_mask, is_causal)
        options = _mask_of_nested(attn_mask, query, key)
    rows = (pad_head_dim(x).transpose(0, 1) for x in _match_heads(query_rows, key_rows, value_rows, enable_gqa))
    options |= _lengths_of_nested(query, key, value)
    scaled = scale_of(query_rows, scale)
    out = _attend(*rows, causal=is_causal, top_left=True, softmax_scale=scaled, dropout_p=dropout_p, **options)
    return nested.like(query, cut_head_dim(out, value_rows.shape[-1]), 1).transpose(1, 2)


_lengths_of_nested = errors_name(**_NAMES)(nested.lengths)


def _mask_of_nested(attn_mask: Tensor, query: Tensor, key: Tensor) -> dict[str, Any]:
    if is_instance(attn_mask, CAUSAL_BIAS):
        raise TypeError(
            "attn_mask must be a Tensor or None with nested tensors, got a CausalBias: is_causal=True means "
            "causal_upper_left of each sequence"
        )
    sizes = zip(attn_mask.shape[-2:], (nested.longest(query), nested.longest(key)), strict=True)
    if attn_mask.dim() > 4 or any(size != 1 and longest is not None and size < longest for size, longest in sizes):
        raise RuntimeError(
            f"attn_mask must broadcast to (batch, heads, longest L, longest S), got shape {tuple(attn_mask.shape)}"
        )
    name = "mask" if attn_mask.dtype == torch.bool else "bias"
    return {name: attn_mask[(None,) * (4 - attn_mask.dim())]}


def _check(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
    check_head_dims({"query": query, "key": key}, {"value": value})
    dims = query.dim(), key.dim(), value.dim()
    fewest = min(dims)
    if fewest < 2 or (fewest == 2 and max(dims) > 2):
        raise RuntimeError(f"query, key and value must be (L, E), or all have at least 3 dimensions, got {dims}")
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"value must have as many rows as key: expected {key.shape[-2]} in the second dimension from last, "
            f"got shape {tuple(value.shape)}"
        )
    if attn_mask is not None:
        _check_mask(attn_mask, is_causal)


def _check_mask(attn_mask: Tensor, is_causal: bool) -> None:
    if is_causal:
        raise RuntimeError("attn_mask must be None with is_causal=True")
    if type(attn_mask) is not Tensor or attn_mask.is_nested or attn_mask.layout is not torch.strided:
        if is_instance(attn_mask, CAUSAL_BIAS):
            return
        check_optional_tensors(attn_mask=attn_mask)
    if not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise RuntimeError(f"attn_mask must be bool or floating, got {attn_mask.dtype}")
    if attn_mask.dim() < 2:
        raise RuntimeError(f"attn_mask must broadcast to (..., L, S), got shape {tuple(attn_mask.shape)}")


def _starts_at_top_left(causal_bias: Any, num_queries: int, num_keys: int) -> bool:
    """Whether the diagonal starts at the top left, not the bottom right. Raises if it is made for other lengths."""
    made_for = (causal_bias.seq_len_q, causal_bias.seq_len_kv)
    if made_for != (num_queries, num_keys):
        raise RuntimeError(
            f"attn_mask must be made for the lengths of query and key, {(num_queries, num_keys)}, "
            f"got a CausalBias for {made_for}"
        )
    return bool(causal_bias.variant.name == "UPPER_LEFT")


def _match_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value as ``attention`` takes them: key and value have equally many heads, which divide query's."""
    heads_q, heads_k, heads_v = query.shape[-3], key.shape[-3], value.shape[-3]
    if enable_gqa and (heads_q % max(heads_k, 1) != 0 or heads_q % max(heads_v, 1) != 0):
        raise RuntimeError(
            f"with enable_gqa the heads of key and value must divide query's, got {heads_q}, {heads_k} and {heads_v}"
        )
    if heads_k == heads_v and (enable_gqa or heads_k in (1, heads_q)):
        return query, key, value
    if enable_gqa:
        key, value = (x.repeat_interleave(heads_q // x.shape[-3], dim=-3) for x in (key, value))
        return query, key, value
    heads = _broadcast("heads (without enable_gqa)", (heads_q,), (heads_k,), (heads_v,))[0]
    q, k, v = (x.expand(*x.shape[:-3], heads, *x.shape[-2:]) for x in (query, key, value))
    return q, k, v


def _broadcast(what: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    if shapes[1:] == shapes[:1] * (len(shapes) - 1):  # torch.broadcast_shapes costs more than the rest of this file
        return shapes[0]
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        given = ", ".join(str(tuple(shape)) for shape in shapes)
        raise RuntimeError(f"the {what} of query, key and value must broadcast, got {given}") from None


def _to_rows(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(..., heads, L, E) as (batch, L, heads, E), with E padded."""
    x = pad_head_dim(x)
    if x.shape[:-3] != lead:
        x = x.expand(*lead, *x.shape[-3:])
    return _flatten_batch(x, len(lead)).transpose(1, 2)


def _split_mask(
    attn_mask: Tensor, lead: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias) for ``attention``, (batch|1, heads|1, L|1, S|1). ``shape``: (..., heads, L, S) of all scores."""
    missing = len(lead) + 3 - attn_mask.dim()
    if missing < 0:
        raise RuntimeError(
            f"attn_mask must broadcast to {len(lead) + 3} dimensions, (..., heads, L, S), got {attn_mask.dim()}"
        )
    scores = attn_mask[(None,) * missing]
    if any(size not in (1, full) for size, full in zip(scores.shape, shape, strict=True)):
        raise RuntimeError(
            f"attn_mask must broadcast to (..., heads, L, S) = {shape}, got shape {tuple(attn_mask.shape)}"
        )
    if any(size != 1 for size in scores.shape[: len(lead)]):
        scores = scores.expand(*lead, *scores.shape[-3:])
    scores = _flatten_batch(scores, len(lead))
    return (scores, None) if scores.dtype == torch.bool else (None, scores)


def _flatten_batch(x: Tensor, num_lead: int) -> Tensor:
    return x if num_lead == 1 else x[None] if num_lead == 0 else x.flatten(0, num_lead - 1)
