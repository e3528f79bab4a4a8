"""Calls of the decoding operators, and their oracle: gather each sequence's keys, then plain attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import reference
from .oracle import (
    HALF,
    assert_within_bound,
    cumulative,
    describe,
    int32,
    largest_of,
    poisoned_outputs,
    random,
    rounding_of_large_scores,
)

DEFAULTS: dict[str, Any] = dict(
    softmax_scale=0.25, softcap=0.0, window_left=-1, window_right=-1, rotary_interleaved=False, num_splits=1,
    batch_invariant=False, allow_tf32=False,
)  # fmt: skip


@dataclass
class Decode:
    """One call of attention_decode or, with new keys, of attention_decode_append."""

    q: Tensor  # (batch, seqlen_q, heads_q, head_dim), or packed
    k_cache: Tensor  # (batch_cache, seqlen_cache, heads_kv, head_dim), or paged
    v_cache: Tensor
    k: Tensor | None = None  # (batch, seqlen_new, heads_kv, head_dim)
    v: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)  # the operators' other arguments

    def __repr__(self) -> str:
        given = {"q": self.q, "k_cache": self.k_cache, "v_cache": self.v_cache, "k": self.k, "v": self.v}
        return f"Decode({', '.join(f'{name}={describe(value)}' for name, value in {**given, **self.options}.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints of a problem that fails."""
        printer.text(repr(self))

    @property
    def device(self) -> str:
        return str(self.q.device)

    @property
    def batch(self) -> int:
        cu = self.options.get("cu_seqlens_q")
        return self.q.shape[0] if cu is None else len(cu) - 1

    def run(self, **overrides: Any) -> tuple[Tensor, Tensor]:
        """(out, lse); the caches are written where there are new keys."""
        ops = torch.ops.flash_ext
        op = ops.attention_decode if self.k is None else ops.attention_decode_append
        arguments: dict[str, Any] = dict.fromkeys(a.name for a in op.default._schema.arguments)
        arguments |= dict(q=self.q, k_cache=self.k_cache, v_cache=self.v_cache)
        if self.k is not None:
            arguments |= dict(k=self.k, v=self.v)
        options = {**DEFAULTS, **self.options, **overrides}
        if "max_seqlen_q" not in options:
            cu_seqlens_q = options.get("cu_seqlens_q")
            options["max_seqlen_q"] = self.q.shape[1] if cu_seqlens_q is None else int(cu_seqlens_q.diff().max())
        return op(**{**arguments, **options})

    def cache_rows(self, b: int) -> Tensor:
        """Where the rows of batch entry b lie: indices into the cache with its first two dimensions flattened."""
        table, batch_idx = self.options.get("block_table"), self.options.get("cache_batch_idx")
        seqlen_cache = self.k_cache.shape[1]
        if table is not None:
            pages = table[b].long().clamp(0, self.k_cache.shape[0] - 1)  # entries that are not in use may be anything
            return (pages[:, None] * seqlen_cache + torch.arange(seqlen_cache, device=pages.device)).flatten()
        entry = b if batch_idx is None else int(batch_idx[b])
        return torch.arange(seqlen_cache, device=self.q.device) + entry * seqlen_cache

    def cache_length(self, b: int) -> int:
        lengths = self.options.get("cache_seqlens")
        return len(self.cache_rows(b)) if lengths is None else int(lengths[b])

    def expected_caches(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The caches after the append."""
        caches = [t.clone() if dtype is None else t.to(dtype) for t in (self.k_cache, self.v_cache)]
        for b in range(self.batch if self.k is not None else 0):
            length, seqlen_new = self.cache_length(b), self.k.shape[1]
            rows = self.cache_rows(b)[length : length + seqlen_new]
            k_new = self.rotated(self.k[b].to(caches[0].dtype), length + torch.arange(seqlen_new, device=rows.device))
            for cache, fresh in zip(caches, (k_new, self.v[b].to(caches[1].dtype)), strict=True):
                cache.view(-1, *cache.shape[2:])[rows] = fresh
        return caches[0], caches[1]

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.options.get("rotary_cos"), self.options.get("rotary_sin")
        if cos is None:
            return x
        interleaved = self.options.get("rotary_interleaved", False)
        return reference.rotate(x, cos.to(x.dtype), sin.to(x.dtype), positions, interleaved)

    def expected(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse) in ``dtype``."""
        o = {**DEFAULTS, **self.options}
        k_cache, v_cache = self.expected_caches(dtype)
        packed = o.get("cu_seqlens_q") is not None
        seqlen_q = self.q.shape[1]
        starts = o["cu_seqlens_q"].tolist() if packed else [b * seqlen_q for b in range(self.batch + 1)]
        rows = self.q.to(dtype) if packed else self.q.to(dtype).flatten(0, 1)
        out = rows.new_zeros(*rows.shape[:2], v_cache.shape[-1])
        lse = rows.new_full((rows.shape[1], rows.shape[0]), -torch.inf)
        local = o["window_left"] >= 0 or o["window_right"] >= 0
        for b in range(self.batch):
            length = self.cache_length(b)
            q = rows[starts[b] : starts[b + 1]]
            positions = torch.full((len(q),), length, device=q.device)
            q = self.rotated(q, positions + torch.arange(len(q), device=q.device) if local else positions)
            first = 0 if o.get("cache_leftpad") is None else int(o["cache_leftpad"][b])
            keys = self.cache_rows(b)[first : length + (0 if self.k is None else self.k.shape[1])]
            slopes = o.get("alibi_slopes")
            options = reference.Options(
                window_size=(o["window_left"], o["window_right"]),
                softmax_scale=o["softmax_scale"],
                softcap=o["softcap"],
                alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b : b + 1],
                sink=o.get("sink"),
            )
            k, v = (cache.view(-1, *cache.shape[2:])[keys][None] for cache in (k_cache, v_cache))
            part, part_lse, _ = reference.attention(q[None], k, v, options)
            out[starts[b] : starts[b + 1]], lse[:, starts[b] : starts[b + 1]] = part[0], part_lse[0]
        if packed:
            return out, lse
        return out.unflatten(0, (self.batch, -1)), lse.unflatten(1, (self.batch, -1)).transpose(0, 1)


def make_decode(
    batch: int = 3,
    seqlen_q: int = 1,
    seqlen_cache: int = 75,
    heads_q: int = 4,
    heads_kv: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    seqlen_new: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> Decode:
    """A contiguous cache; rows that are not in use hold NaN."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v

    def normal(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device)

    call = Decode(
        normal(batch, seqlen_q, heads_q, head_dim),
        normal(batch, seqlen_cache, heads_kv, head_dim),
        normal(batch, seqlen_cache, heads_kv, head_dim_v),
        options=options,
    )
    if seqlen_new:
        call.k, call.v = (normal(batch, seqlen_new, heads_kv, d) for d in (head_dim, head_dim_v))
    return fill_unused_rows(call, torch.nan)


def fill_unused_rows(call: Decode, value: float) -> Decode:
    """Whatever lies outside [leftpad, cache_seqlens) of each sequence."""
    leftpad = call.options.get("cache_leftpad")
    used = torch.zeros(call.k_cache.shape[0] * call.k_cache.shape[1], dtype=torch.bool, device=call.q.device)
    for b in range(call.batch):
        used[call.cache_rows(b)[0 if leftpad is None else int(leftpad[b]) : call.cache_length(b)]] = True
    for cache in (call.k_cache, call.v_cache):
        cache.view(-1, *cache.shape[2:])[~used] = value
    return call


def paged(call: Decode, page_size: int, spare_pages: int = 3) -> Decode:
    """The same cache in pages that lie in random order."""
    device, (batch, seqlen_cache) = call.device, call.k_cache.shape[:2]
    max_pages = -(-seqlen_cache // page_size)
    table = torch.randperm(batch * max_pages + spare_pages, device=device)[: batch * max_pages].view(batch, max_pages)
    pools = []
    for cache in (call.k_cache, call.v_cache):
        padded = cache.new_full((batch, max_pages * page_size, *cache.shape[2:]), torch.nan)
        padded[:, :seqlen_cache] = cache
        pool = cache.new_full((batch * max_pages + spare_pages, page_size, *cache.shape[2:]), torch.nan)
        pool[table.flatten()] = padded.view(batch * max_pages, page_size, *cache.shape[2:])
        pools.append(pool)
    options = {"cache_seqlens": int32([seqlen_cache] * batch, device), **call.options, "block_table": table.int()}
    return Decode(call.q, *pools, call.k, call.v, options)


def packed_queries(call: Decode, lengths: Sequence[int]) -> Decode:
    """Queries of different lengths, (total_q, heads_q, head_dim)."""
    q = random(sum(lengths), *call.q.shape[2:], dtype=call.q.dtype, device=call.device)
    options = {**call.options, "cu_seqlens_q": cumulative(lengths, call.device)}
    return Decode(q, call.k_cache, call.v_cache, call.k, call.v, options)


def assert_decode_matches(call: Decode, **overrides: Any) -> tuple[Tensor, Tensor]:
    """Out, lse and, where there are new keys, the caches against the oracle; returns the library's result."""
    call = Decode(call.q, call.k_cache, call.v_cache, call.k, call.v, {**call.options, **overrides})
    ref, low = call.expected(torch.float64), call.expected(call.q.dtype)
    rotary = call.options.get("rotary_cos") is not None
    low_lse = call.expected(torch.float32)[1] if call.q.dtype in HALF and not rotary else low[1]
    caches = call.expected_caches()
    before = [t.clone() for t in (call.k_cache, call.v_cache)]
    results = [call.run()]
    for cache, saved in zip((call.k_cache, call.v_cache), before, strict=True):
        cache.copy_(saved)
    with poisoned_outputs():
        results.append(call.run())
    factor = 3.0 if call.options.get("softcap") else 2.0
    for out, lse in results:
        assert out.dtype == call.q.dtype and out.is_contiguous() and lse.is_contiguous()
        assert lse.dtype == (torch.float64 if call.q.dtype == torch.float64 else torch.float32)
        lse_dtype = call.q.dtype if rotary else lse.dtype
        slack = rounding_of_large_scores(lse.dtype, ref[1], call.q.shape[-1]) * largest_of(ref[0])
        assert_within_bound("out", out, ref[0], low[0], call.q.dtype, factor, slack)
        assert_within_bound("lse", lse, ref[1], low_lse, lse_dtype, factor, rounding_of_tanh(call))
    assert_caches_equal(call, caches, exact=not rotary)
    return results[0]


def rounding_of_tanh(call: Decode) -> float:
    """What the softcap may take off an lse of 16-bit inputs where plain PyTorch is right by luck: they have tanh to the
    last bit of 1, which is an error of the score times the cap."""
    return 2 * torch.finfo(torch.float32).eps * call.options.get("softcap", 0.0) if call.q.dtype in HALF else 0.0


def assert_caches_equal(call: Decode, expected: tuple[Tensor, Tensor], exact: bool) -> None:
    """Every row, those that must stay as they were included."""
    for name, got, want in zip(("k_cache", "v_cache"), (call.k_cache, call.v_cache), expected, strict=True):
        tolerance = {"rtol": 0, "atol": 0} if exact or name == "v_cache" else {"rtol": 2e-2, "atol": 2e-2}
        if got.dtype not in HALF and not exact:
            tolerance = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got, want, equal_nan=True, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
