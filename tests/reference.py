"""The oracle: attention written as the contract reads, by plain PyTorch, with the N x N matrix in memory.

Everything is differentiable by autograd, runs in any dtype, and shares no code with the library. ``attention``
computes in the dtype of its inputs, so that called with fp32 (fp64) inputs it is the reference and called with the
original ones it is the "same mathematics in low precision" that the error bound is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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


def philox4x32_7(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Salmon et al. 2011, on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropped_of_256(p: float) -> int:
    """Of 256 weights, how many dropout drops on average: all or none only where p says so."""
    return int(p) * 256 if p in (0, 1) else min(max(int(p * 256 + 0.5), 1), 255)


def dropout_keeps(seed: int, offset: int, p: float, batch_head: int, i: int, j: int) -> bool:
    """Whether dropout keeps score (i, j) of a head; ``batch_head`` is batch * heads_q + head.

    The eight words of two calls have one bit each of the weight's number.
    """
    seed, offset = seed & (2**64 - 1), offset & (2**64 - 1)
    key = (seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32))
    keys, queries = j // 64 * 4 + j % 8 // 2, i // 16 * 8 + i % 8
    first, second = (philox4x32_7((keys, 2 * queries + n, batch_head, offset & 0xFFFFFFFF), key) for n in (0, 1))
    bit = i // 8 % 2 * 16 + j // 8 % 2 * 8 + 7 - j % 2 * 4 - j // 16 % 4
    number = sum((word >> bit & 1) << n for n, word in enumerate(first + second))
    return number >= dropped_of_256(p)


def dropout_keep(rng: Tensor, p: float, batch: int, heads_q: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """``dropout_keeps`` of every score at once, bool (batch, heads_q, seqlen_q, seqlen_k), on rng's device."""
    seed, offset = (int(x) for x in rng.tolist())
    word = 0xFFFFFFFF
    key_hi = ((seed >> 32) ^ (offset >> 32)) & word
    bh = torch.arange(batch * heads_q, device=rng.device).view(batch, heads_q, 1, 1)
    i = torch.arange(seqlen_q, device=rng.device)[:, None]
    j = torch.arange(seqlen_k, device=rng.device)[None, :]
    bit = i // 8 % 2 * 16 + j // 8 % 2 * 8 + 7 - j % 2 * 4 - j // 16 % 4
    number = torch.zeros(batch, heads_q, seqlen_q, seqlen_k, dtype=torch.int64, device=rng.device)
    for call in range(2):
        c0, c1, c2, c3 = j // 64 * 4 + j % 8 // 2, 2 * (i // 16 * 8 + i % 8) + call, bh, offset & word
        k0, k1 = seed & word, key_hi
        for _ in range(7):
            # The products wrap at 64 bits, which leaves both of their halves right.
            p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0, c1, c2, c3 = ((p1 >> 32) & word) ^ c1 ^ k0, p1 & word, ((p0 >> 32) & word) ^ c3 ^ k1, p0 & word
            k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
        for n, drawn in enumerate((c0, c1, c2, c3)):
            number |= (drawn >> bit & 1) << (4 * call + n)
    return number >= dropped_of_256(p)


def block_mask_tensors(see: Tensor, block_m: int, block_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(offsets, indices, bitmap_ids, bitmaps) of the visibility ``see``, bool (batch|1, heads|1, seqlen_q, seqlen_k).

    Blocks that see everything within the lengths have id -1; each of the others gets a bitmap of its own.
    """
    batch, heads, seqlen_q, seqlen_k = see.shape
    rows, cols = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    offsets, indices, ids, bitmaps = [0], [], [], []
    for row in range(batch * heads * rows):
        bh, m = divmod(row, rows)
        strip = see.reshape(batch * heads, seqlen_q, seqlen_k)[bh, m * block_m : (m + 1) * block_m]
        for n in range(cols):
            block = strip[:, n * block_n : (n + 1) * block_n]
            if not block.any():
                continue
            indices.append(n)
            ids.append(-1 if block.all() else len(bitmaps))
            if not block.all():
                bits = torch.zeros(block_m, block_n, dtype=torch.int64)
                bits[: block.shape[0], : block.shape[1]] = block
                words = (bits.view(block_m, block_n // 32, 32) << torch.arange(32)).sum(-1)
                bitmaps.append(torch.where(words >= 2**31, words - 2**32, words))
        offsets.append(len(indices))
    starts = torch.tensor(offsets)
    per_head = torch.stack([starts[bh * rows : (bh + 1) * rows + 1] for bh in range(batch * heads)])
    packed = torch.stack(bitmaps) if bitmaps else torch.zeros(0, block_m, block_n // 32)

    def int32(t: Tensor) -> Tensor:
        return t.to(see.device, torch.int32)

    return (
        int32(per_head.view(batch, heads, rows + 1)),
        int32(torch.tensor(indices)),
        int32(torch.tensor(ids)),
        int32(packed),
    )


def block_mask_visible(tensors: tuple[Tensor, Tensor, Tensor, Tensor], seqlen_q: int, seqlen_k: int) -> Tensor:
    """What a block mask shows, bool (batch|1, heads|1, seqlen_q, seqlen_k)."""
    offsets, indices, ids, bitmaps = (t.cpu() for t in tensors)
    batch, heads, rows = offsets.shape[0], offsets.shape[1], offsets.shape[2] - 1
    block_m, block_n = bitmaps.shape[1], bitmaps.shape[2] * 32
    see = torch.zeros(batch, heads, rows * block_m, -(-seqlen_k // block_n) * block_n, dtype=torch.bool)
    bits = (bitmaps[..., None] >> torch.arange(32)) & 1
    for b in range(batch):
        for h in range(heads):
            for m in range(rows):
                for at in range(int(offsets[b, h, m]), int(offsets[b, h, m + 1])):
                    n, bitmap = int(indices[at]), int(ids[at])
                    block = True if bitmap < 0 else bits[bitmap].reshape(block_m, block_n).bool()
                    see[b, h, m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n] = block
    return see[:, :, :seqlen_q, :seqlen_k].to(tensors[0].device)


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


def scores(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(scores, visibility), each (batch, heads_q, seqlen_q, seqlen_k); a score that is not visible is -inf."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    scale = options.softmax_scale if options.softmax_scale is not None else 1.0 / math.sqrt(head_dim)
    see = visible(seqlen_q, seqlen_k, options, q.device)[None, None]
    if options.mask is not None:
        see = see & options.mask
    see = see.expand(batch, heads_q, seqlen_q, seqlen_k)

    k = drop_unseen(k, see).repeat_interleave(heads_q // heads_kv, dim=2)
    s = product("bihd,bjhd->bhij", q * scale, k)
    if options.softcap > 0:
        s = options.softcap * torch.tanh(s / options.softcap)
    if options.alibi_slopes is not None:
        offset = 0 if options.top_left else seqlen_k - seqlen_q
        i = torch.arange(seqlen_q, device=q.device)[:, None] + offset
        distance = (i - torch.arange(seqlen_k, device=q.device)[None, :]).abs()
        slopes = options.alibi_slopes.expand(batch, heads_q)[:, :, None, None].to(s.dtype)
        s = s - slopes * distance
    if options.bias is not None:
        s = s + options.bias.to(s.dtype)
    return torch.where(see, s, -math.inf), see


def product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """``torch.einsum``. Of float16, a CPU adds up in float32 and rounds once.

    Done in two steps, this takes a fiftieth of the time there.
    """
    if a.dtype == torch.float16 and a.device.type == "cpu":
        return torch.einsum(equation, a.float(), b.float()).to(a.dtype)
    return torch.einsum(equation, a, b)


def drop_unseen(kv: Tensor, see: Tensor) -> Tensor:
    """``kv`` with 0 in the rows that nobody sees: those must not even be multiplied, as 0 * NaN is NaN."""
    batch, seqlen_k, heads_kv, _ = kv.shape
    seen = see.reshape(batch, heads_kv, see.shape[1] // heads_kv * see.shape[2], seqlen_k).any(2)
    return torch.where(seen.transpose(1, 2)[..., None], kv, 0)


def probabilities(s: Tensor, see: Tensor, lse: Tensor) -> Tensor:
    """exp(s - lse), 0 where nothing is visible."""
    finite_lse = torch.where(torch.isneginf(lse), 0, lse)
    p = torch.exp(torch.where(see, s, 0) - finite_lse[..., None])
    return torch.where(see & ~torch.isneginf(s) & ~torch.isneginf(lse)[..., None], p, 0)


def drop(p: Tensor, options: Options, signed: bool = False) -> Tensor:
    """Dropout of the probabilities; ``signed`` negates what is dropped and scales nothing."""
    if options.keep is None:
        return p
    if signed:
        return torch.where(options.keep, p, -p)
    kept = 256 - dropped_of_256(options.dropout_p)
    return torch.where(options.keep, p, 0) * (256 / kept if kept else 0.0)


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options = Options()) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) of dense attention; q (b, sq, hq, d), k (b, sk, hk, d), v (b, sk, hk, dv).

    ``weights`` are after dropout. Rows that see nothing give out 0, lse -inf (with a sink too), and zero gradients;
    masked keys may hold NaN.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    s, see = scores(q, k, options)
    nothing = torch.isneginf(s).all(-1)
    terms = torch.where(nothing[..., None], 0, s)
    if options.sink is not None:
        sink = options.sink.to(s.dtype)[None, :, None, None].expand(batch, heads_q, seqlen_q, 1)
        terms = torch.cat([terms, sink], dim=-1)
    lse = torch.where(nothing, -math.inf, torch.logsumexp(terms, dim=-1))
    weights = drop(probabilities(s, see, lse), options)
    v = drop_unseen(v, see).repeat_interleave(heads_q // v.shape[2], dim=2)
    return product("bhij,bjhd->bihd", weights, v), lse, weights


def attention_weights(q: Tensor, k: Tensor, lse: Tensor, options: Options = Options(), signed: bool = False) -> Tensor:
    """The weights recomputed from an lse that is an input of its own."""
    s, see = scores(q, k, options)
    return drop(probabilities(s, see, lse), options, signed)


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
    for rows_q, rows_k, local in sequences(cu_seqlens_q, cu_seqlens_k, options, seqused_q, seqused_k, q.device):
        o, row_lse, _ = attention(q[rows_q][None], k[rows_k][None], v[rows_k][None], local)
        out = out.index_copy(0, rows_q, o[0].to(out.dtype))
        lse = lse.index_copy(1, rows_q, row_lse[0].to(lse.dtype))
    return out, lse


def sequences(
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    options: Options,
    seqused_q: list[int] | None,
    seqused_k: list[int] | None,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor, Options]]:
    """(rows of its queries, rows of its keys, options cut to its lengths) of each sequence that has queries."""
    for b in range(len(cu_seqlens_q) - 1):
        len_q = seqused_q[b] if seqused_q is not None else cu_seqlens_q[b + 1] - cu_seqlens_q[b]
        len_k = seqused_k[b] if seqused_k is not None else cu_seqlens_k[b + 1] - cu_seqlens_k[b]
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
        rows_q = torch.arange(cu_seqlens_q[b], cu_seqlens_q[b] + len_q, device=device)
        rows_k = torch.arange(cu_seqlens_k[b], cu_seqlens_k[b] + len_k, device=device)
        yield rows_q, rows_k, local


def max_logit(q: Tensor, k: Tensor, options: Options = Options()) -> Tensor:
    """The largest visible score of each head of each batch entry, (b, hq); -inf where there is none."""
    s, _ = scores(q, k, options)
    return torch.cat([s.flatten(2), s.new_full((*s.shape[:2], 1), -math.inf)], dim=-1).amax(-1)


def varlen_max_logit(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    options: Options = Options(),
    seqused_q: list[int] | None = None,
    seqused_k: list[int] | None = None,
) -> Tensor:
    """The same of packed sequences, (sequences, hq)."""
    largest = q.new_full((len(cu_seqlens_q) - 1, q.shape[1]), -math.inf)
    lengths = torch.tensor(cu_seqlens_q).diff() if seqused_q is None else torch.tensor(seqused_q)
    with_queries = [b for b, length in enumerate(lengths.tolist()) if length > 0]
    found = sequences(cu_seqlens_q, cu_seqlens_k, options, seqused_q, seqused_k, q.device)
    for b, (rows_q, rows_k, local) in zip(with_queries, found, strict=True):
        largest[b] = max_logit(q[rows_q][None], k[rows_k][None], local)[0]
    return largest


def largest_weights(q: Tensor, k: Tensor, lse: Tensor, options: Options = Options()) -> Tensor:
    """The largest weight of each row before dropout, (batch, heads_q, seqlen_q); 0 where nothing is visible."""
    if k.shape[1] == 0:
        return torch.zeros_like(lse)
    largest, _ = scores(q, k, options)[0].max(-1)
    return torch.where(torch.isneginf(lse), 0, torch.exp(largest - lse))


def varlen_largest_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    options: Options = Options(),
    seqused_q: list[int] | None = None,
    seqused_k: list[int] | None = None,
) -> Tensor:
    """The same of packed sequences, (hq, total_q)."""
    largest = torch.zeros_like(lse)
    for rows_q, rows_k, local in sequences(cu_seqlens_q, cu_seqlens_k, options, seqused_q, seqused_k, q.device):
        largest[:, rows_q] = largest_weights(q[rows_q][None], k[rows_k][None], lse[:, rows_q][None], local)[0]
    return largest


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges partial results over disjoint keys; outs (n, b, s, h, d), lses (n, b, h, s)."""
    nothing = torch.isneginf(lses).all(0)
    finite = torch.logsumexp(torch.where(nothing, 0, lses), dim=0)
    share = torch.exp(torch.where(torch.isneginf(lses), 0, lses) - finite)
    share = torch.where(torch.isneginf(lses), 0, share)
    out = (share.transpose(-1, -2)[..., None] * outs).sum(0)
    return out, torch.where(nothing, -math.inf, finite)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (Su et al. 2021) of the first 2 * cos.shape[1] dimensions of x (seqlen, heads, head_dim).

    ``interleaved`` pairs neighbours (GPT-J); otherwise the two halves are paired (GPT-NeoX).
    """
    half = cos.shape[1]
    c, s = cos[positions][:, None].to(x.dtype), sin[positions][:, None].to(x.dtype)
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        return torch.cat([torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2), rest], dim=-1)
    a, b = rotated[..., :half], rotated[..., half:]
    return torch.cat([a * c - b * s, a * s + b * c, rest], dim=-1)
