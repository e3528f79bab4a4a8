"""The oracle: attention written as the contract reads, by plain PyTorch, with the N x N matrix in memory.

Everything is differentiable by autograd, runs in any dtype, and shares no code with the library. ``attention``
computes in the dtype of its inputs, so that called with fp32 (fp64) inputs it is the reference and called with the
original ones it is the "same mathematics in low precision" that the error bound is made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """Options of one call, named as in ``flash_ext.attention``. Masks and biases broadcast over (b, h, i, j)."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    top_left: bool = False
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # (heads_q) or (batch, heads_q)
    bias: Tensor | None = None
    mask: Tensor | None = None  # True = visible
    sink: Tensor | None = None  # (heads_q)
    keep: Tensor | None = None  # dropout: True = kept, (batch, heads_q, seqlen_q, seqlen_k)
    dropout_p: float = 0.0


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Salmon et al. 2011, on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_keeps(seed: int, offset: int, p: float, batch_head: int, i: int, j: int) -> bool:
    """Whether dropout keeps score (i, j) of a head; ``batch_head`` is batch * heads_q + head."""
    seed, offset = seed & (2**64 - 1), offset & (2**64 - 1)
    counter = ((j >> 5) * 8 + (j & 7), (i >> 4) * 8 + (i & 7), batch_head, offset & 0xFFFFFFFF)
    words = philox4x32_10(counter, (seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32)))
    bits = (words[(j >> 3) & 3] >> (16 * ((i >> 3) & 1))) & 0xFFFF
    return bits >= int(p * 65536.0 + 0.5)


def visible(seqlen_q: int, seqlen_k: int, options: Options, device: torch.device | None = None) -> Tensor:
    """The window rule, bool (seqlen_q, seqlen_k)."""
    offset = 0 if options.top_left else seqlen_k - seqlen_q
    i = torch.arange(seqlen_q, device=device)[:, None]
    j = torch.arange(seqlen_k, device=device)[None, :]
    left, right = options.window_size
    if options.causal:
        right = 0
    see = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        see &= j >= i + offset - left
    if right >= 0:
        see &= j <= i + offset + right
    return see


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options = Options()) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) of dense attention; q (b, sq, hq, d), k (b, sk, hk, d), v (b, sk, hk, dv).

    ``weights`` are after dropout. Rows that see nothing give out 0, lse -inf (with a sink too), and zero gradients;
    masked keys may hold NaN.
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    scale = options.softmax_scale if options.softmax_scale is not None else 1.0 / math.sqrt(head_dim)
    see = visible(seqlen_q, seqlen_k, options, q.device)[None, None]
    if options.mask is not None:
        see = see & options.mask
    see = see.expand(batch, heads_q, seqlen_q, seqlen_k)

    # A key that nobody sees must not even be multiplied: 0 * NaN is NaN.
    group = heads_q // heads_kv
    seen = see.reshape(batch, heads_kv, group * seqlen_q, seqlen_k).any(2).transpose(1, 2)[..., None]
    k = torch.where(seen, k, 0).repeat_interleave(group, dim=2)
    v = torch.where(seen, v, 0).repeat_interleave(group, dim=2)

    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k)
    if options.softcap > 0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        offset = 0 if options.top_left else seqlen_k - seqlen_q
        i = torch.arange(seqlen_q, device=q.device)[:, None] + offset
        distance = (i - torch.arange(seqlen_k, device=q.device)[None, :]).abs()
        slopes = options.alibi_slopes.expand(batch, heads_q)[:, :, None, None].to(scores.dtype)
        scores = scores - slopes * distance
    if options.bias is not None:
        scores = scores + options.bias.to(scores.dtype)
    scores = torch.where(see, scores, -math.inf)

    nothing = torch.isneginf(scores).all(-1)
    terms = torch.where(nothing[..., None], 0, scores)
    if options.sink is not None:
        sink = options.sink.to(scores.dtype)[None, :, None, None].expand(batch, heads_q, seqlen_q, 1)
        terms = torch.cat([terms, sink], dim=-1)
    lse = torch.where(nothing, -math.inf, torch.logsumexp(terms, dim=-1))
    finite_lse = torch.where(torch.isneginf(lse), 0, lse)
    weights = torch.exp(torch.where(see, scores, 0) - finite_lse[..., None])
    weights = torch.where(see & ~torch.isneginf(scores), weights, 0)
    if options.keep is not None:
        weights = torch.where(options.keep, weights / (1.0 - options.dropout_p), 0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    return out, lse, weights


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    options: Options = Options(),
    seqused_q: list[int] | None = None,
    seqused_k: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of packed sequences, one at a time: out (total_q, hq, dv), lse (hq, total_q).

    Rows in no sequence, or beyond ``seqused_q``, give out 0 and lse -inf. Options that carry a batch dimension are
    indexed by sequence and cut to its length.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
    for b in range(len(cu_seqlens_q) - 1):
        len_q = seqused_q[b] if seqused_q is not None else cu_seqlens_q[b + 1] - cu_seqlens_q[b]
        len_k = seqused_k[b] if seqused_k is not None else cu_seqlens_k[b + 1] - cu_seqlens_k[b]
        rows_q = torch.arange(cu_seqlens_q[b], cu_seqlens_q[b] + len_q, device=q.device)
        rows_k = torch.arange(cu_seqlens_k[b], cu_seqlens_k[b] + len_k, device=q.device)
        if len_q == 0:
            continue

        def cut(t: Tensor | None, b: int = b, len_q: int = len_q, len_k: int = len_k) -> Tensor | None:
            if t is None:
                return None
            t = t[b : b + 1] if t.shape[0] > 1 else t
            t = t[:, :, :len_q] if t.shape[2] > 1 else t
            return t[..., :len_k] if t.shape[3] > 1 else t

        slopes = options.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b : b + 1]
        local = replace(
            options, bias=cut(options.bias), mask=cut(options.mask), keep=cut(options.keep), alibi_slopes=slopes
        )
        o, row_lse, _ = attention(q[rows_q][None], k[rows_k][None], v[rows_k][None], local)
        out = out.index_copy(0, rows_q, o[0].to(out.dtype))
        lse = lse.index_copy(1, rows_q, row_lse[0].to(lse.dtype))
    return out, lse


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges partial results over disjoint keys; outs (n, b, s, h, d), lses (n, b, h, s)."""
    lse = torch.logsumexp(lses, dim=0)
    nothing = torch.isneginf(lses).all(0)
    finite = torch.where(nothing, 0, lse)
    share = torch.exp(torch.where(torch.isneginf(lses), 0, lses) - finite)
    share = torch.where(torch.isneginf(lses), 0, share)
    out = (share.transpose(-1, -2)[..., None] * outs).sum(0)
    return out, torch.where(nothing, -math.inf, lse)
