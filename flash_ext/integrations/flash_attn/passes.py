"""The forward and the backward on their own, as code calls them that merges and differentiates by itself.

Neither is recorded by autograd. Queries that see nothing have lse -inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext import head_dims
from flash_ext.argument_checks import as_flag, as_number, check_optional_tensors, check_tensors
from flash_ext.eager import call
from flash_ext.flash_attn_interface import read_window
from flash_ext.functional import checked_score_options, draw_rng_state
from flash_ext.head_dims import check_head_dims, cut_head_dim, pad_head_dim, scale_of
from flash_ext.ops import ScoreOptions

_BACKWARD = torch.ops.flash_ext.attention_backward.default


def score_options(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float | None,
    alibi_slopes: Tensor | None = None,
) -> dict[str, Any]:
    """Options of ``flash_ext.attention``.

    The default scale is that of q before padding; a softcap of None is off, as one of 0. Sides of the window may be
    tensors of one integer.
    """
    check_tensors(q=q)
    return dict(
        softmax_scale=scale_of(q, softmax_scale),
        causal=causal,
        window_size=read_window(window),
        softcap=0.0 if softcap is None else as_number("softcap", softcap),
        alibi_slopes=alibi_slopes,
    )


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, return_softmax: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask, rng_state).

    S_dmask is empty unless it is asked for and something is dropped; rng_state is int64 (2), what the backward has to
    be given to drop the same.
    """
    dropout_p, return_softmax = as_number("dropout_p", dropout_p), as_flag("return_softmax", return_softmax)
    with torch.no_grad():
        rng_state = draw_rng_state(q.device) if dropout_p > 0 else q.new_zeros(2, dtype=torch.int64)
        if dropout_p != 0:
            options = options | dict(dropout_p=dropout_p, rng_state=rng_state)
        out, lse = head_dims.attend(q, k, v, options)
        with_weights = return_softmax and dropout_p > 0
        weights = head_dims.weights(q, k, lse, options) if with_weights else q.new_empty(0)
        return out, lse, weights, rng_state


def backward_pass(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    dropout_p: float,
    deterministic: bool,
    rng_state: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Writes dq, dk and dv into ``gradients``, those that are there, and returns the rows of dout * out, summed.

    ``out`` and ``softmax_lse`` may be those of attention to more keys than k: the gradients are then its share.
    """
    check_tensors(dout=dout, out=out, softmax_lse=softmax_lse)
    check_head_dims({"q": q, "k": k}, {"v": v, "out": out, "dout": dout})
    for name, gradient, x in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        check_shape(name, gradient, x.shape)
    dropout_p, deterministic = as_number("dropout_p", dropout_p), as_flag("deterministic", deterministic)
    with torch.no_grad():
        if dropout_p != 0:
            if rng_state is None:
                raise ValueError("rng_state must be that of the forward with a dropout_p, got None")
            options = options | dict(dropout_p=dropout_p, rng_state=rng_state)
        padded_q, padded_k, padded_v, padded_out, padded_dout = (pad_head_dim(x) for x in (q, k, v, out, dout))
        scores = ScoreOptions(*checked_score_options(padded_q, padded_k, **options))
        needed = [x is not None for x in gradients]
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        made = call(
            _BACKWARD,
            padded_dout,
            None,
            padded_q,
            padded_k,
            padded_v,
            padded_out,
            softmax_lse.contiguous(),
            deterministic,
            *needed,
            False,
            False,
            *scores,
        )
        for gradient, result, x in zip(gradients, made, (q, k, v), strict=False):
            if gradient is not None:
                gradient.copy_(cut_head_dim(result, x.shape[-1]))
        return (dout * out).sum(-1, dtype=torch.float32).transpose(-1, -2).contiguous()


def check_shape(name: str, buffer: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises where a result of that shape cannot be written into ``buffer``: copying would broadcast it."""
    check_optional_tensors(**{name: buffer})
    if buffer is not None and tuple(buffer.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(buffer.shape)}")
