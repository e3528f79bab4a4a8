"""``flash_attn_2_cuda``, the compiled module of flash-attn 2.8, which its interface also calls ``flash_attn_gpu``: the
functions that xFormers calls, by position. None is recorded by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext import head_dims
from flash_ext.argument_checks import check_tensors
from flash_ext.flash_attn_interface import Integer
from flash_ext.integrations.flash_attn import interface_2
from flash_ext.integrations.flash_attn.passes import check_shape, score_options


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None,
    alibi_slopes_: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_: torch.Generator | None,
) -> list[Tensor]:
    """[out, softmax_lse, S_dmask, rng_state] of (batch, seqlen, heads, headdim). Writes into out_, if it is there."""
    _refuse_generator(gen_)
    _check_out(out_, q, v)
    out, *rest = interface_2._flash_attn_forward(
        q,
        k,
        v,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes_,
        return_softmax,
    )
    return [_written(out_, out), *rest]


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k_: Tensor | None,
    block_table_: Tensor | None,
    alibi_slopes_: Tensor | None,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_: torch.Generator | None,
) -> list[Tensor]:
    """The same of packed sequences. zero_tensors: every row is written anyway."""
    _refuse_generator(gen_)
    _check_out(out_, q, v)
    out, *rest = interface_2._flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes_,
        return_softmax,
        block_table_,
        leftpad_k_,
        seqused_k,
        zero_tensors,
    )
    return [_written(out_, out), *rest]


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq_: Tensor | None,
    dk_: Tensor | None,
    dv_: Tensor | None,
    alibi_slopes_: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_: torch.Generator | None,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """[dq, dk, dv, softmax_d]: the gradients are dq_, dk_ and dv_ where these are there."""
    _refuse_generator(gen_)
    dq, dk, dv = _made(dq_, q), _made(dk_, k), _made(dv_, v)
    softmax_d = interface_2._flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes_,
        deterministic,
        rng_state,
    )
    return [dq, dk, dv, softmax_d]


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq_: Tensor | None,
    dk_: Tensor | None,
    dv_: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes_: Tensor | None,
    max_seqlen_q: Integer,
    max_seqlen_k: Integer,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_: torch.Generator | None,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """The same of packed sequences."""
    _refuse_generator(gen_)
    dq, dk, dv = _made(dq_, q), _made(dk_, k), _made(dv_, v)
    softmax_d = interface_2._flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        p_dropout,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes_,
        deterministic,
        rng_state,
        zero_tensors,
    )
    return [dq, dk, dv, softmax_d]


def fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k_: Tensor | None,
    v_: Tensor | None,
    seqlens_k_: Tensor | None,
    rotary_cos_: Tensor | None,
    rotary_sin_: Tensor | None,
    cache_batch_idx_: Tensor | None,
    leftpad_k_: Tensor | None,
    block_table_: Tensor | None,
    alibi_slopes_: Tensor | None,
    out_: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """[out, softmax_lse] of ``flash_attn_with_kvcache``."""
    options = score_options(q, softmax_scale, is_causal, (window_size_left, window_size_right), softcap, alibi_slopes_)
    _check_out(out_, q, vcache)
    with torch.no_grad():
        out, lse = head_dims.decode(
            q,
            kcache,
            vcache,
            k=k_,
            v=v_,
            cache_seqlens=seqlens_k_,
            rotary_cos=rotary_cos_,
            rotary_sin=rotary_sin_,
            cache_batch_idx=cache_batch_idx_,
            cache_leftpad=leftpad_k_,
            block_table=block_table_,
            rotary_interleaved=is_rotary_interleaved,
            num_splits=num_splits,
            **options,
        )
    return [_written(out_, out), lse]


def _refuse_generator(generator: torch.Generator | None) -> None:
    if generator is not None:
        raise NotImplementedError(
            "flash_ext: gen_ must be None: dropout draws from torch's own generator, which torch.manual_seed sets"
        )


def _check_out(out_: Tensor | None, q: Tensor, v: Tensor) -> None:
    if out_ is not None:
        check_tensors(q=q, v=v)
        check_shape("out_", out_, (*q.shape[:-1], v.shape[-1]))


def _written(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _made(gradient: Tensor | None, x: Tensor) -> Tensor:
    return torch.empty_like(x) if gradient is None else gradient
