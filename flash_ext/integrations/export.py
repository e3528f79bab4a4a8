"""This library's operators in plain aten operators, for programs that leave torch: ONNX, other compilers.

``torch.export`` keeps ``flash_ext::attention_forward`` as one node. Who reads the program without this library wants
products, exponentials and sums in its place: ``exported.run_decompositions(decompositions())``. The score matrix is in
memory again then, and keys that nobody sees must hold finite numbers.

Not written out are pages and dropout, whose random bits no plain operator has: they are refused by name when the table
meets them. Backwards, and decoding that appends to its cache, stay as nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_ext.ops import DecodeOptions, ScoreOptions

_OPS = torch.ops.flash_ext
_NUM_OPTIONS = len(ScoreOptions._fields)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Of each operator that can be written in plain ones, the function that does.

    Covered are attention with all its options but dropout and block masks, on dense and packed sequences; its weights;
    decoding over a contiguous cache; ``merge``; the fused addition and layer norm of ``TransformerEncoderLayer``.

    Returns:
        {operator: function} for ``torch.export.ExportedProgram.run_decompositions`` and
        ``torch.fx.experimental.proxy_tensor.make_fx``. A new dict for each call, to be merged with other tables.

    Raises:
        Nothing of its own; the functions raise NotImplementedError for what they do not cover.
    """
    return {
        _OPS.attention_forward.default: _attention,
        _OPS.attention_forward_max_logit.default: _attention_max_logit,
        _OPS.attention_forward_plain.default: _attention,
        _OPS.attention_weights.default: _weights,
        _OPS.attention_decode.default: _decode,
        _OPS.merge.default: _merge,
        _OPS.add_layer_norm.default: _add_layer_norm,
    }


# ---- Operators ------------------------------------------------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = _attention_and_scores(q, k, v, *rest)
    return out, lse


def _attention_max_logit(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, scores = _attention_and_scores(q, k, v, *rest)
    options = ScoreOptions(*rest[:_NUM_OPTIONS])
    largest = _largest(scores, -1)
    if options.cu_seqlens_q is not None:
        sequence, _, lengths = _rows_of(q.shape[0], options.cu_seqlens_q, options.seqused_q)
        own = sequence == torch.arange(lengths.shape[0], device=q.device)[:, None]
        largest = torch.where(own[:, None], largest, -math.inf)
    return out, lse, _largest(largest, -1)


def _attention_and_scores(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The flag ``deterministic`` may stand behind the options: here everything is."""
    options = ScoreOptions(*rest[:_NUM_OPTIONS])
    _refuse_dropout(options.dropout_p)
    packed = options.cu_seqlens_q is not None
    q4, k4, v4 = (x.unsqueeze(0) if packed else x for x in (q, k, v))
    scores = _scores(q4, k4, options)
    out, lse = _softmax(scores, v4, options.sink)
    out = out.to(q.dtype)
    return (out.squeeze(0), lse.squeeze(0), scores) if packed else (out, lse, scores)


def _weights(q: Tensor, k: Tensor, lse: Tensor, dropout_mode: int, *rest: Any) -> Tensor:
    options = ScoreOptions(*rest)
    if dropout_mode != 0:
        _refuse_dropout(options.dropout_p)
    if options.cu_seqlens_q is not None:
        raise NotImplementedError(
            "flash_ext: cu_seqlens_q of attention_weights has no decomposition: export it of padded sequences"
        )
    lse = lse.unsqueeze(-1)
    return _probabilities(_hide(_scores(q, k, options), lse > -math.inf), lse).to(q.dtype)


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    options = DecodeOptions(*rest)
    _refuse_cache(options)
    if options.cache_batch_idx is not None:
        k_cache, v_cache = (x.index_select(0, options.cache_batch_idx) for x in (k_cache, v_cache))
    positions = _dense_positions(q, k_cache, None, options.cache_seqlens, top_left=False)
    if options.cache_leftpad is not None:
        positions = positions.where(positions.j >= _by_batch(options.cache_leftpad))
    scores = _raw_scores(q, k_cache, options, positions)
    out, lse = _softmax(scores, v_cache, options.sink)
    return out.to(q.dtype), lse


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    lse = _log_sum_exp(lses, 0)
    shares = _probabilities(lses, lse).transpose(-1, -2).unsqueeze(-1)
    out = torch.where(shares > 0, shares * outs, torch.zeros_like(outs, dtype=shares.dtype)).sum(0)
    return out.to(outs.dtype), lse.squeeze(0)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, need_sum: bool
) -> tuple[Tensor, Tensor]:
    total = x + residual
    out = F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return (total if need_sum else x.new_empty(0)), out


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p > 0:
        raise NotImplementedError(
            f"flash_ext: dropout_p must be 0 in a decomposition, got {dropout_p}: export the model after model.eval()"
        )


_COVERED = {
    "softmax_scale",
    "window_left",
    "window_right",
    "top_left",
    "softcap",
    "sink",
    "alibi_slopes",
    "bias",
    "mask",
}
_COVERED |= {f"{name}_{side}" for name in ("cu_seqlens", "max_seqlen", "seqused") for side in "qk"}
# Dropout is refused before this is asked; products of the decomposition round as torch's setting says.
_COVERED |= {"dropout_p", "rng_state", "allow_tf32"}


def _refuse_others(options: ScoreOptions) -> None:
    """No option is ever ignored."""
    if options.block_offsets is not None:
        raise NotImplementedError(
            "flash_ext: block_mask has no decomposition: export with mask=block_mask.to_dense() in its place"
        )
    for name, value in zip(options._fields, options, strict=True):
        if name not in _COVERED and (isinstance(value, Tensor) or value != options._field_defaults[name]):
            raise NotImplementedError(f"flash_ext: {name} has no decomposition")


def _refuse_cache(options: DecodeOptions) -> None:
    ways_out = {
        "block_table": "gather the pages first, cache[block_table].flatten(1, 2)",
        "rotary_cos": "rotate q before the call",
        "cu_seqlens_q": "pad q to (batch, seqlen_q, heads, head_dim)",
    }
    for name, way_out in ways_out.items():
        if getattr(options, name) is not None:
            raise NotImplementedError(f"flash_ext: {name} of decode has no decomposition: {way_out}")


# ---- Which query sees which key -------------------------------------------------------------------------------------


class _Positions(NamedTuple):
    """Where queries and keys stand in their sequences. Tensors broadcast to (batch, 1, seqlen_q, seqlen_k)."""

    i: Tensor
    j: Tensor
    offset: Any  # what is added to i, so that the diagonal is at j = i
    visible: Tensor | None  # as far as lengths go
    sequence: Tensor | None  # (total_q), of packed queries

    def where(self, condition: Tensor) -> _Positions:
        return self._replace(visible=condition if self.visible is None else self.visible & condition)


def _by_batch(x: Tensor) -> Tensor:
    return x.long()[:, None, None, None]


def _dense_positions(q: Tensor, k: Tensor, used_q: Tensor | None, used_k: Tensor | None, top_left: bool) -> _Positions:
    i = torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)[None, :]
    length_q: Any = q.shape[1] if used_q is None else _by_batch(used_q)
    length_k: Any = k.shape[1] if used_k is None else _by_batch(used_k)
    positions = _Positions(i, j, 0 if top_left else length_k - length_q, None, None)
    if used_q is not None:
        positions = positions.where(i < length_q)
    return positions if used_k is None else positions.where(j < length_k)


def _packed_positions(q: Tensor, k: Tensor, options: ScoreOptions) -> _Positions:
    """q (1, total_q, ...), k (1, total_k, ...): a query sees keys of its own sequence."""
    of_q, i, lengths_q = _rows_of(q.shape[1], options.cu_seqlens_q, options.seqused_q)
    of_k, j, lengths_k = _rows_of(k.shape[1], options.cu_seqlens_k, options.seqused_k)
    length_q, length_k = lengths_q[of_q][:, None], lengths_k[of_q][:, None]
    offset = 0 if options.top_left else length_k - length_q
    same = (of_q[:, None] == of_k) & (i[:, None] < length_q) & (j < lengths_k[of_k])
    return _Positions(i[:, None], j[None, :], offset, same, of_q)


def _rows_of(total: Any, cu_seqlens: Tensor, used: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence and place in it of each row, the length of each sequence). Rows behind all sequences are taken for
    ones behind the end of the last."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    rows = torch.arange(total, device=cu_seqlens.device)
    sequence = (rows[:, None] >= ends).sum(1).clamp(max=starts.shape[0] - 1)
    return sequence, rows - starts[sequence], ends - starts if used is None else used.long()


# ---- Scores, softmax ------------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, options: ScoreOptions) -> Tensor:
    """(batch, heads_q, seqlen_q, seqlen_k), -inf where a key is not visible."""
    _refuse_others(options)
    if options.cu_seqlens_q is None:
        positions = _dense_positions(q, k, options.seqused_q, options.seqused_k, options.top_left)
    else:
        positions = _packed_positions(q, k, options)
    scores = _raw_scores(q, k, options, positions)
    if options.bias is not None:
        scores = scores + _of_positions(options.bias, positions).to(scores.dtype)
    return scores if options.mask is None else _hide(scores, _of_positions(options.mask, positions))


def _raw_scores(q: Tensor, k: Tensor, options: Any, positions: _Positions) -> Tensor:
    """By all options that decoding has too."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = _heads_first(k.to(dtype), q.shape[2])
    scores = (q.to(dtype) * options.softmax_scale).transpose(1, 2) @ keys.transpose(-1, -2)
    if options.softcap > 0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    i = positions.i + positions.offset
    if options.alibi_slopes is not None:
        scores = scores - _slopes(options.alibi_slopes, positions).to(dtype) * (i - positions.j).abs().to(dtype)
    if options.window_left >= 0:
        positions = positions.where(positions.j >= i - options.window_left)
    if options.window_right >= 0:
        positions = positions.where(positions.j <= i + options.window_right)
    return scores if positions.visible is None else _hide(scores, positions.visible)


def _hide(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -math.inf)


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """(batch, seqlen, heads_kv, head_dim) as (batch, heads, seqlen, head_dim), repeated for the heads of a group."""
    batch, seqlen, heads_kv, head_dim = x.shape
    x = x.transpose(1, 2)
    if heads_kv == heads:
        return x
    groups = x.unsqueeze(2).expand(batch, heads_kv, heads // heads_kv, seqlen, head_dim)
    return groups.reshape(batch, heads, seqlen, head_dim)


def _slopes(slopes: Tensor, positions: _Positions) -> Tensor:
    """(heads) or (batch, heads), as scores are."""
    if slopes.dim() == 1:
        return slopes[None, :, None, None]
    return slopes[:, :, None, None] if positions.sequence is None else slopes[positions.sequence].t()[None, :, :, None]


def _of_positions(x: Tensor, positions: _Positions) -> Tensor:
    """A bias or mask, (batch|1, heads|1, seqlen_q|1, seqlen_k|1); of packed sequences it counts from their starts."""
    if positions.sequence is None:
        return x
    sequence = positions.sequence[:, None] if x.shape[0] > 1 else torch.zeros_like(positions.sequence)[:, None]
    i = positions.i.clamp(max=x.shape[2] - 1)
    j = positions.j.clamp(max=x.shape[3] - 1)
    return x.movedim(1, -1)[sequence, i, j].movedim(-1, 0)[None]


def _softmax(scores: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out (batch, seqlen_q, heads_q, head_dim_v), lse). A query that sees nothing gets 0 and -inf."""
    lse = _log_sum_exp(scores, -1)
    if sink is not None:
        with_sink = torch.logaddexp(lse, sink.to(lse.dtype)[None, :, None, None])
        lse = torch.where(lse == -math.inf, lse, with_sink)
    out = _probabilities(scores, lse) @ _heads_first(v.to(scores.dtype), scores.shape[1])
    return out.transpose(1, 2), lse.squeeze(-1)


def _largest(x: Tensor, dim: int) -> Tensor:
    """-inf where there is none."""
    return x.sum(dim) - math.inf if x.shape[dim] == 0 else x.amax(dim)


def _log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """Keeps the dimension. -inf where all of x is, and where there is none."""
    if x.shape[dim] == 0:
        return x.sum(dim, keepdim=True) - math.inf
    largest = x.amax(dim, keepdim=True)
    finite = torch.where(largest == -math.inf, 0.0, largest)
    return finite + (x - finite).exp().sum(dim, keepdim=True).log()


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - torch.where(lse == -math.inf, 0.0, lse)).exp()
