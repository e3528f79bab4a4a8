"""Problems that hypothesis draws: any combination of shapes, layouts and options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import flash_ext
from tests import reference
from tests.decode_oracle import Decode, fill_unused_rows, make_decode, packed_queries, paged
from tests.oracle import FLOATS, Call, cumulative, dtypes_of, int32, make_call, random, random_rng

EDGES = sorted(tile + near for tile in (64, 128, 192, 256, 512, 1024) for near in (-1, 0, 1))
TILE = 128  # keys of the largest tiles but those of a few kernels
LONG = 320  # keys of long problems, mostly: two or three tiles
# 64 and 128 are head dims of every kernel; some kernels have these alone.
head_dims = st.one_of(st.sampled_from([64, 128]), st.integers(1, 32).map(lambda n: 8 * n))
sizes_of_window = st.one_of(st.just(-1), st.integers(0, 20), st.integers(0, 300))


def one_in(n: int) -> st.SearchStrategy[bool]:
    return st.integers(0, n - 1).map(lambda drawn: drawn == n - 1)


def lengths_up_to(longest: int, shortest: int = 0) -> st.SearchStrategy[int]:
    """Few rows, those around the ends of tiles, any."""
    edges = [n for n in EDGES if shortest <= n <= longest]
    few = st.integers(min(1, longest), max(shortest, min(9, longest)))  # empty ones are among the others
    anything = st.one_of(few, st.integers(shortest, longest))
    return st.one_of(anything, st.sampled_from(edges)) if edges else anything


def lengths_beyond_a_tile(longest: int) -> st.SearchStrategy[int]:
    """More rows than a tile has, half of the time around the ends of the next ones."""
    edges = [n for n in EDGES if TILE < n <= longest]
    return st.one_of(st.sampled_from(edges), st.integers(TILE + 1, longest))


def numbers_of_scores(most: int) -> st.SearchStrategy[int]:
    """A bound on the scores of a problem: one in four is large."""
    return st.sampled_from([most // 16] * 3 + [most])


@dataclass(frozen=True)
class Sizes:
    """Of a problem, drawn together: the number of scores decides how long it takes."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlens_q: st.SearchStrategy[int]
    seqlens_k: st.SearchStrategy[int]


def problem_sizes(scores: int, least: int = 0, most_batch: int = 5) -> st.SearchStrategy[Sizes]:
    """Of about so many scores. Half of the problems have more keys than a tile, and as many heads as there is room for;
    half have any number of heads, and sequences that fit.

    Args:
        least: batch entries, and rows of a sequence.
    """
    return st.one_of(sizes_of_few_heads(scores, least, most_batch), sizes_of_any_heads(scores, least, most_batch))


def batches(least: int, most: int) -> st.SearchStrategy[int]:
    """Seldom none: no kernel has anything to do then."""
    some = st.integers(1, most)
    return some if least else one_in(16).flatmap(lambda empty: st.just(0) if empty else some)


@st.composite
def sizes_of_few_heads(draw: st.DrawFn, scores: int, least: int, most_batch: int) -> Sizes:
    longest_k = draw(st.sampled_from([LONG, LONG, math.isqrt(scores)]))
    longest_q = draw(st.sampled_from([40, longest_k, longest_k]))
    pairs = max(1, scores // (longest_k * longest_q))
    group = draw(st.integers(1, min(16, pairs)))
    heads_kv = min(draw(st.sampled_from([1, 1, 2, 3])), pairs // group)
    batch = draw(batches(least, min(most_batch, pairs // (group * heads_kv))))
    return Sizes(batch, group * heads_kv, heads_kv, lengths_up_to(longest_q, least), lengths_beyond_a_tile(longest_k))


@st.composite
def sizes_of_any_heads(draw: st.DrawFn, scores: int, least: int, most_batch: int) -> Sizes:
    (heads_q, heads_kv), batch = draw(head_counts()), draw(batches(least, most_batch))
    seqlens = lengths_up_to(math.isqrt(draw(numbers_of_scores(scores)) // max(1, batch * heads_q)), least)
    return Sizes(batch, heads_q, heads_kv, seqlens, seqlens)


@st.composite
def sizes_of_grouped_heads(draw: st.DrawFn, scores: int) -> Sizes:
    """One batch entry, whose query heads share key heads: few tiles of keys, which CTAs of the backward share."""
    heads_kv = draw(st.sampled_from([1, 1, 2, 3]))
    heads_q = heads_kv * draw(st.integers(2, 16))
    seqlens = lengths_up_to(math.isqrt(scores // heads_q), 1)
    return Sizes(1, heads_q, heads_kv, seqlens, seqlens)


@st.composite
def both_head_dims(draw: st.DrawFn) -> tuple[int, int]:
    """(head_dim, head_dim_v), equal mostly: many kernels are for that."""
    head_dim = draw(head_dims)
    return head_dim, draw(head_dims) if draw(one_in(4)) else head_dim


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int]:
    """(heads_q, heads_kv), in groups of up to 16."""
    group, heads_kv = draw(st.one_of(st.just(1), st.integers(2, 16))), draw(st.sampled_from([1, 2, 3, 8]))
    return group * heads_kv, heads_kv


@st.composite
def other_strides(draw: st.DrawFn, t: Tensor) -> Tensor:
    """The same rows in another order, or as slices of longer ones."""
    if draw(st.booleans()):
        return t.transpose(0, -2).contiguous().transpose(0, -2)
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


@st.composite
def score_shaped(draw: st.DrawFn, t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A bias or mask, broadcast to ``shape``, in one of the layouts that it may have."""
    layout = draw(st.sampled_from(["contiguous", "stride 0", "transposed", "gaps"]))
    if layout == "stride 0":
        return t.expand(shape)
    if layout == "transposed":
        return t.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "gaps":
        return t.repeat_interleave(2, dim=3)[..., ::2]
    return t


@st.composite
def score_options(draw: st.DrawFn, shape: tuple[int, int, int, int], device: str) -> dict[str, Any]:
    """Options of a problem with (batch, heads_q, seqlen_q, seqlen_k) scores."""
    options: dict[str, Any] = {}
    heads_q = shape[1]

    def broadcast() -> tuple[int, ...]:
        return tuple(n if draw(st.booleans()) else 1 for n in shape)

    if draw(st.booleans()):
        options["causal"] = draw(st.booleans())
        options["top_left"] = draw(st.booleans())
        options["window_size"] = (draw(sizes_of_window), draw(sizes_of_window))
    if draw(st.booleans()):
        options["softmax_scale"] = draw(st.one_of(st.floats(0.01, 1), st.floats(-1, 1)))
    if draw(one_in(4)):
        options["softcap"] = draw(st.floats(0.5, 30))
    if draw(one_in(4)):
        options["alibi_slopes"] = torch.rand((shape[0], heads_q) if draw(st.booleans()) else (heads_q,), device=device)
    if draw(one_in(3)):
        bias = random(*broadcast(), dtype=draw(st.sampled_from(FLOATS)), device=device)
        bias.masked_fill_(torch.rand(bias.shape, device=device) < draw(st.sampled_from([0.0, 0.0, 0.3])), -torch.inf)
        options["bias"] = draw(score_shaped(bias, shape))
    if draw(one_in(3)):
        mask = torch.rand(broadcast(), device=device) < draw(st.sampled_from([0.0, 0.3, 0.8]))
        options["mask"] = draw(score_shaped(mask, shape))
    if draw(one_in(4)):
        options["sink"] = random(heads_q, dtype=draw(st.sampled_from(FLOATS)), device=device)
    if draw(one_in(4)):
        options |= {"dropout_p": draw(st.sampled_from([0.1, 0.5, 0.9])), "rng_state": random_rng(device)}
    return options


@st.composite
def attention_calls(
    draw: st.DrawFn, device: str, scores: int, sizes_up_to: Callable[[int], st.SearchStrategy[Sizes]] = problem_sizes
) -> tuple[Call, tuple[str, ...]]:
    """A call, dense or packed, of about ``scores`` at most, and the inputs that want gradients."""
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    sizes, (head_dim, head_dim_v) = draw(sizes_up_to(scores)), draw(both_head_dims())
    tensors: dict[str, Any] = dict(
        heads_q=sizes.heads_q, heads_kv=sizes.heads_kv, head_dim=head_dim, head_dim_v=head_dim_v,
        dtype=draw(st.sampled_from(dtypes_of(device))), device=device,
    )  # fmt: skip
    packed = sizes.batch > 0 and draw(st.booleans())
    call, shape = draw(packed_calls(sizes, tensors) if packed else dense_calls(sizes, tensors))
    call = call.with_options(**draw(score_options(shape, device)))
    if draw(one_in(4)):
        call = draw(with_block_mask(call, shape))
    if draw(st.booleans()):
        call.q, call.k, call.v = (draw(other_strides(t)) for t in (call.q, call.k, call.v))
    if (deterministic := draw(st.sampled_from([None, None, None, False, False, True]))) is not None:
        call.options["deterministic"] = deterministic
    wanted = tuple(name for name in call.inputs() if draw(st.booleans()))
    return draw(with_some_gradients(call)), wanted


@st.composite
def dense_calls(draw: st.DrawFn, sizes: Sizes, tensors: dict[str, Any]) -> tuple[Call, tuple[int, int, int, int]]:
    """A call without score options, and the shape of its scores."""
    batch, seqlen_q, seqlen_k = sizes.batch, draw(sizes.seqlens_q), draw(sizes.seqlens_k)
    call = make_call(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **tensors)
    starts_q, starts_k = ([b * n for b in range(batch)] for n in (seqlen_q, seqlen_k))
    call = draw(with_lengths_in_use(call, starts_q, starts_k, [seqlen_q] * batch, [seqlen_k] * batch))
    return call, (batch, sizes.heads_q, seqlen_q, seqlen_k)


@st.composite
def packed_calls(draw: st.DrawFn, sizes: Sizes, tensors: dict[str, Any]) -> tuple[Call, tuple[int, int, int, int]]:
    """The same of packed sequences, with rows of NaN behind them that belong to none."""
    device, batch = tensors["device"], sizes.batch
    lengths_q, lengths_k = (
        draw(st.lists(n, min_size=batch, max_size=batch)) for n in (sizes.seqlens_q, sizes.seqlens_k)
    )
    spare = draw(st.integers(0, 3))
    cu_seqlens_q, cu_seqlens_k = cumulative(lengths_q, device), cumulative(lengths_k, device)
    call = make_call(
        seqlen_q=sum(lengths_q) + spare, seqlen_k=sum(lengths_k) + spare, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k), **tensors,
    )  # fmt: skip
    for t, lengths in ((call.q, lengths_q), (call.k, lengths_k), (call.v, lengths_k)):
        t[sum(lengths) :] = torch.nan
    starts_q, starts_k = cu_seqlens_q.tolist()[:-1], cu_seqlens_k.tolist()[:-1]
    call = draw(with_lengths_in_use(call, starts_q, starts_k, lengths_q, lengths_k))
    return call, (batch, sizes.heads_q, max(lengths_q), max(lengths_k))


@st.composite
def with_lengths_in_use(
    draw: st.DrawFn, call: Call, starts_q: list[int], starts_k: list[int], lengths_q: list[int], lengths_k: list[int]
) -> Call:
    """With seqused_q and seqused_k, perhaps; rows that are not in use then hold NaN."""
    for name, starts, lengths, tensors in (
        ("seqused_q", starts_q, lengths_q, (call.q,)),
        ("seqused_k", starts_k, lengths_k, (call.k, call.v)),
    ):
        if not draw(one_in(4)):
            continue
        used = [draw(st.integers(0, n)) for n in lengths]
        for t in tensors:
            rows = t if call.varlen else t.flatten(0, 1)
            for start, length, n in zip(starts, lengths, used, strict=True):
                rows[start + n : start + length] = torch.nan
        call = call.with_options(**{name: int32(used, str(call.q.device))})
    return call


@st.composite
def with_block_mask(draw: st.DrawFn, call: Call, shape: tuple[int, int, int, int]) -> Call:
    if not all(shape):
        return call
    block_m, block_n = draw(st.sampled_from([16, 64, 128])), draw(st.sampled_from([32, 64, 128]))
    batch, heads = (n if draw(st.booleans()) else 1 for n in shape[:2])
    kind = torch.randint(0, 3, (batch, heads, -(-shape[2] // block_m), -(-shape[3] // block_n)))
    kind = kind.repeat_interleave(block_m, 2).repeat_interleave(block_n, 3)[:, :, : shape[2], : shape[3]]
    see = ((kind == 2) | ((kind == 1) & (torch.rand(kind.shape) < 0.5))).to(call.q.device)
    tensors = reference.block_mask_tensors(see, block_m, block_n)
    call = call.with_options(block_mask=flash_ext.BlockMask(*tensors, seqlen_q=shape[2], seqlen_k=shape[3]))
    call.block_visible = see
    return call


@st.composite
def with_some_gradients(draw: st.DrawFn, call: Call) -> Call:
    """Gradients of out, of lse, or of both."""
    call = call.with_random_gradients()
    kept = draw(st.sampled_from(["both", "both", "out", "lse"]))
    if kept == "out":
        call.grad_lse = None
    elif kept == "lse":
        call.grad_out = None
    return call


@st.composite
def weights_calls(draw: st.DrawFn, device: str, scores: int) -> Call:
    """A call whose weights are asked for: dense, and a sink is part of their lse."""
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(problem_sizes(scores, least=1, most_batch=3))
    shape = (sizes.batch, sizes.heads_q, draw(sizes.seqlens_q), draw(sizes.seqlens_k))
    dtype = draw(st.sampled_from(dtypes_of(device)))
    call = make_call(
        sizes.batch, *shape[2:], sizes.heads_q, sizes.heads_kv, draw(head_dims), dtype=dtype, device=device
    )
    options = draw(score_options(shape, device))
    if "bias" in options:
        options["bias"] = options["bias"].to(dtype)
    call = call.with_options(**options)
    return draw(with_block_mask(call, shape)) if draw(one_in(4)) else call


@st.composite
def merge_parts(draw: st.DrawFn, device: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """(outs, lses) of up to 20 parts, of which some saw nothing, and the inputs that want gradients."""
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    lead = draw(st.sampled_from([(), (1,), (3,)]))  # packed, or the batch
    splits, seqlen, heads = draw(st.integers(1, 20)), draw(st.integers(0, 20)), draw(st.integers(1, 9))
    head_dim = draw(st.one_of(st.sampled_from([64, 128]), st.integers(1, 300)))
    dtype = draw(st.sampled_from(dtypes_of(device)))
    outs = random(splits, *lead, seqlen, heads, head_dim, dtype=dtype, device=device)
    spread = draw(st.sampled_from([1e-6, 1.0, 100.0]))
    lses = random(splits, *lead, heads, seqlen, dtype=torch.promote_types(dtype, torch.float32), device=device) * spread
    lses.masked_fill_(torch.rand(lses.shape, device=device) < draw(st.sampled_from([0.0, 0.3, 0.9])), -torch.inf)
    if draw(st.booleans()):
        outs, lses = (t.transpose(0, -2).contiguous().transpose(0, -2) for t in (outs, lses))
    return outs, lses, tuple(name for name in ("outs", "lses") if draw(st.booleans()))


@st.composite
def decode_calls(draw: st.DrawFn, device: str, scores: int) -> Decode:
    """A call of the decoding operators, with new keys or without."""
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    (heads_q, heads_kv), (head_dim, head_dim_v) = draw(head_counts()), draw(both_head_dims())
    batch = draw(st.integers(1, 5))
    seqlen_q = draw(st.one_of(st.integers(1, 6), st.integers(1, 40), st.integers(128, 300)))  # or a chunk of a prompt
    rows = batch * max(heads_q * seqlen_q, heads_kv * 32)  # a cache of many heads is large by itself
    keys = max(1, draw(numbers_of_scores(scores)) // rows)
    seqlen_cache = draw(st.one_of(st.integers(1, min(300, keys)), st.integers(1, min(4000, keys))))
    seqlen_new = min(draw(st.integers(0, 4)), seqlen_cache)
    lengths = [draw(st.integers(0, seqlen_cache - seqlen_new)) for _ in range(batch)]
    call = make_decode(
        batch, seqlen_q, seqlen_cache, heads_q, heads_kv, head_dim, head_dim_v, seqlen_new,
        draw(st.sampled_from(dtypes_of(device))), device, cache_seqlens=int32(lengths, device),
        window_left=draw(sizes_of_window), window_right=draw(sizes_of_window), softmax_scale=draw(st.floats(-0.5, 0.5)),
    )  # fmt: skip
    call.options |= draw(decode_options(call, lengths))
    fill_unused_rows(call, torch.nan)
    if draw(one_in(3)):
        call = packed_queries(call, [draw(st.integers(0, seqlen_q)) for _ in range(batch)])
    if draw(st.booleans()):
        call.q = draw(other_strides(call.q))
    layout = draw(st.sampled_from(["plain", "pages", "cache_batch_idx"]))
    if layout == "pages":
        call = paged(call, draw(st.integers(1, 70)))
    elif layout == "cache_batch_idx":
        call = in_larger_cache(call, spare=draw(st.integers(0, 2)))
    return call


@st.composite
def decode_options(draw: st.DrawFn, call: Decode, lengths: list[int]) -> dict[str, Any]:
    options: dict[str, Any] = {"batch_invariant": draw(one_in(4))}
    options["num_splits"] = 0 if options["batch_invariant"] else draw(st.integers(0, 6))
    heads_q, head_dim = call.q.shape[-2:]
    if draw(st.booleans()):
        options["cache_leftpad"] = int32([draw(st.integers(0, n)) for n in lengths], call.device)
    if draw(one_in(3)):
        options["softcap"] = draw(st.floats(0.5, 30))
    if draw(one_in(3)):
        options["sink"] = random(heads_q, device=call.device)
    if draw(one_in(3)):
        shape = (call.batch, heads_q) if draw(st.booleans()) else (heads_q,)
        options["alibi_slopes"] = torch.rand(shape, device=call.device) * 0.2
    if call.k is not None and draw(st.booleans()):
        rows = call.k_cache.shape[1] + call.q.shape[1]  # as far as the last query may be rotated
        angles = torch.rand(rows, draw(st.integers(1, head_dim // 2)), device=call.device) * 6
        options |= {"rotary_cos": angles.cos().to(call.q.dtype), "rotary_sin": angles.sin().to(call.q.dtype)}
        options["rotary_interleaved"] = draw(st.booleans())
    return options


def in_larger_cache(call: Decode, spare: int) -> Decode:
    """The same cache, whose batch entries lie in random order among ``spare`` others of NaN."""
    entries = torch.randperm(call.batch + spare, device=call.device)[: call.batch]
    caches = []
    for cache in (call.k_cache, call.v_cache):
        caches.append(cache.new_full((call.batch + spare, *cache.shape[1:]), torch.nan))
        caches[-1][entries] = cache
    return Decode(call.q, *caches, call.k, call.v, {**call.options, "cache_batch_idx": entries.int()})
