"""``options``: how long a call with each option takes, beside the peers, and what the option costs in percent of the
plain call's time.

Peers take part where they have the option: torch's SDPA gets masks, windows, biases and ALiBi as its attn_mask, made
before the clock starts, FlexAttention as rules. The call that a variant's cost is measured from takes turns with it:
the plain call, and for deterministic variants the same one without that.

"pairs" is the number of query-key pairs that a variant works on, over that of this call; the cost is measured from its
time for as many pairs. "MB" are the bytes of bias or mask that all batch entries and heads
together look at, and "% net" is the cost without the time in which the measured read stream delivers them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import flash_ext
from benchmarks.arguments import dtypes_of, on_cpu, positive
from benchmarks.ceilings import name_of
from benchmarks.checks import Checker, Expected, OnAverage, Result
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.peers import OURS, Peer, ours
from benchmarks.report import Row, is_ours
from benchmarks.timing import Candidate, Timings
from tests.oracle import Call

PLAIN = "plain"
DIRECTIONS = ("forward", "backward")
HEAD_DIMS, SEQLEN, TOKENS, HIDDEN = (64, 128), 4096, 16384, 2048
CPU_HEAD_DIMS, CPU_SEQLEN, CPU_TOKENS, CPU_HIDDEN = (64,), 512, 1024, 256
DROPOUT = 0.1
SHARE_VISIBLE = 0.9  # of the random masks
ALSO_PEERS = ("flex",)
GROUP = 4  # query heads of a key head, where they are grouped
UNEVEN = (1, 2, 5, 8)  # lengths of packed sequences, in sixteenths of the tokens
MANY, CPU_MANY = 4096, 64  # sequences of a pack
CHECKED_OF_MANY = 16


@dataclass(frozen=True)
class Size:
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Variant:
    """A call with an option."""

    name: str
    call: Call
    pairs: float = 1.0  # of those of the plain call
    bytes_read: int = 0  # of bias or mask, by all batch entries and heads together
    gradients_of: tuple[str, ...] = ("q", "k", "v")
    base: Call | None = None  # whose time the cost is measured from; None: the plain call
    heads_kv: Sequence[int] | None = None  # that are checked
    batch_entries: int | None = None

    @property
    def directions(self) -> Sequence[str]:
        """In which the option changes what is done."""
        if len(self.gradients_of) > 3 or self.call.options.get("deterministic"):
            return ("backward",)
        return ("forward",) if self.call.options.get("return_max_logit") else DIRECTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="default: both")
    parser.add_argument("--head-dim", type=positive, nargs="+", metavar="N", help="default: 64 128")
    parser.add_argument("--seqlen", type=positive, help=f"default: {SEQLEN}")
    parser.add_argument("--tokens", type=positive, help=f"batch x seqlen, default: {TOKENS}")
    parser.add_argument("--hidden", type=positive, help=f"heads x head_dim, default: {HIDDEN}")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="options whose names contain one of these")


dtypes = dtypes_of


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    cpu = on_cpu(chosen)
    seqlen = chosen.seqlen or (CPU_SEQLEN if cpu else SEQLEN)
    batch = max(1, (chosen.tokens or (CPU_TOKENS if cpu else TOKENS)) // seqlen)
    hidden = chosen.hidden or (CPU_HIDDEN if cpu else HIDDEN)
    sizes = [
        Size(batch, seqlen, max(1, hidden // head_dim), head_dim, dtype, chosen.device)
        for dtype in dtypes_of(chosen)
        for head_dim in chosen.head_dim or (CPU_HEAD_DIMS if cpu else HEAD_DIMS)
    ]
    return [
        partial(measure, size, direction, chosen.only, setting) for size in sizes for direction in chosen.directions
    ]


def variants(size: Size) -> list[Variant]:
    """The plain call first."""
    shape = (size.batch, size.seqlen, size.heads, size.head_dim)
    q, k, v, grad = (size.random(*shape) for _ in range(4))
    plain = Variant(PLAIN, Call(q, k, v, grad_out=grad))
    return [
        plain,
        *biases_and_masks(plain, size),
        *scores(plain, size),
        *sparse(plain, size),
        *packed(plain, size),
        *packed_many(plain, size),
        *deterministic(plain, size),
        with_options(plain, "max_logit", return_max_logit=True),
    ]


def with_options(plain: Variant, name: str, **options: Any) -> Variant:
    return replace(plain, name=name, call=plain.call.with_options(**options))


def biases_and_masks(plain: Variant, size: Size) -> list[Variant]:
    b, h, n = size.batch, size.heads, size.seqlen
    per_head, shared, per_key = (size.random(*shape) for shape in ((1, h, n, n), (1, 1, n, n), (b, 1, 1, n)))
    mask, padding = (torch.rand(shape, device=size.device) < SHARE_VISIBLE for shape in ((1, 1, n, n), (b, 1, 1, n)))
    pairs = b * h * n * n
    biases = {"bias (1, h, q, k)": per_head, "bias (1, 1, q, k)": shared, "bias (b, 1, 1, k)": per_key}
    masks = {"mask (1, 1, q, k)": mask, "mask (b, 1, 1, k)": padding}
    found = []
    for option, tensors in (("bias", biases), ("mask", masks)):
        for name, tensor in tensors.items():
            looked_at = (pairs if tensor.shape[2] > 1 else b * h * n) * tensor.element_size()
            found.append(replace(with_options(plain, name, **{option: tensor}), bytes_read=looked_at))
    found.append(padding_at_the_end(plain, size))
    trained = replace(found[0], name="bias (1, h, q, k), its gradient", gradients_of=("q", "k", "v", "bias"))
    return [*found, trained]


def padding_at_the_end(plain: Variant, size: Size) -> Variant:
    """Keys behind a length of each batch entry, from half of seqlen on, are hidden."""
    lengths = torch.linspace(size.seqlen // 2, size.seqlen, size.batch, device=size.device).long()
    mask = (torch.arange(size.seqlen, device=size.device) < lengths[:, None])[:, None, None]
    variant = with_options(plain, "padding (b, 1, 1, k), up to half", mask=mask)
    looked_at = size.batch * size.heads * size.seqlen
    return replace(variant, pairs=float(lengths.sum()) / (size.batch * size.seqlen), bytes_read=looked_at)


def scores(plain: Variant, size: Size) -> list[Variant]:
    """What changes scores or weights, and reads nothing."""
    slopes = torch.rand(size.heads, device=size.device) / 16
    rng = flash_ext.draw_rng_state(size.device)
    dropout = with_options(plain, f"dropout {DROPOUT}", dropout_p=DROPOUT, rng_state=rng)
    return [
        with_options(plain, "softcap", softcap=30.0),
        with_options(plain, "ALiBi", alibi_slopes=slopes),
        replace(dropout, heads_kv=(0,), batch_entries=1),  # what the oracle's mask begins with
        with_options(plain, "sink", sink=size.random(size.heads)),
    ]


def sparse(plain: Variant, size: Size) -> list[Variant]:
    n, reach = size.seqlen, size.seqlen // 8
    causal_pairs = (n + 1) / (2 * n)
    window_pairs = sum(min(n, i + reach + 1) - max(0, i - reach) for i in range(n)) / n**2
    blocks = flash_ext.BlockMask.sliding_window(n, n, (reach, reach), device=size.device)
    every = flash_ext.BlockMask.sliding_window(n, n, (-1, -1), device=size.device)
    return [
        replace(with_options(plain, "causal", causal=True), pairs=causal_pairs),
        replace(with_options(plain, f"window {reach}", window_size=(reach, reach)), pairs=window_pairs),
        with_blocks(plain, f"block mask, window {reach}", blocks, window_pairs),
        with_blocks(plain, "block mask, all blocks", every, 1.0),
    ]


def deterministic(plain: Variant, size: Size) -> list[Variant]:
    """Beside the same call without it: full, causal, with grouped heads and packed."""
    grouped = replace(plain.call, k=plain.call.k[:, :, ::GROUP], v=plain.call.v[:, :, ::GROUP])
    bases = {
        "": plain.call,
        ", causal": plain.call.with_options(causal=True),
        f", {GROUP} query heads a key head": grouped,
        ", varlen, uneven": with_lengths(plain, "", uneven_lengths(size), size).call,
    }
    if size.heads % GROUP:
        del bases[f", {GROUP} query heads a key head"]
    return [
        replace(plain, name=f"deterministic{name}", call=base.with_options(deterministic=True), base=base)
        for name, base in bases.items()
    ]


def with_blocks(plain: Variant, name: str, mask: flash_ext.BlockMask, pairs: float) -> Variant:
    call = replace(plain.call.with_options(block_mask=mask), block_visible=mask.to_dense())
    return replace(plain, name=name, call=call, pairs=pairs)


def packed(plain: Variant, size: Size) -> list[Variant]:
    """Each with the longest length given, and without: then the tokens of all are the only bound on it."""
    tokens, short = size.batch * size.seqlen, max(1, size.seqlen // 16)
    packs = {
        "even": [size.seqlen] * size.batch,
        "uneven": uneven_lengths(size),
        "short": [short] * (tokens // short),
        "one long": [size.seqlen, *[16] * ((tokens - size.seqlen) // 16)],
    }
    return [
        found
        for name, lengths in packs.items()
        for found in with_and_without_longest(with_lengths(plain, f"varlen, {name}", lengths, size))
    ]


def uneven_lengths(size: Size) -> list[int]:
    return [size.batch * size.seqlen * share // sum(UNEVEN) for share in UNEVEN]


def packed_many(plain: Variant, size: Size) -> list[Variant]:
    """Packs where a bound says least: thousands of short sequences, alone and beside one of 16 times the plain call's
    length. Of an eighth of the heads, so that they take the plain call's time; the first sequences are checked."""
    count, heads = CPU_MANY if size.device.type == "cpu" else MANY, max(1, size.heads // 8)
    packs = {
        f"{count} short": [max(1, size.seqlen // 16)] * count,
        f"one of {16 * size.seqlen} beside {count - 1} of 16": [16] * (count - 1) + [16 * size.seqlen],
    }
    found: list[Variant] = []
    for name, lengths in packs.items():
        q, k, v, grad = (size.random(sum(lengths), heads, size.head_dim) for _ in range(4))
        whole = replace(plain, call=Call(q, k, v, grad_out=grad), batch_entries=CHECKED_OF_MANY)
        variant = with_lengths(whole, f"varlen, {name}", lengths, size)
        found += with_and_without_longest(replace(variant, pairs=variant.pairs * heads / size.heads))
    return found


def with_and_without_longest(given: Variant) -> tuple[Variant, Variant]:
    return given, with_options(given, f"{given.name}, no max_seqlen", max_seqlen_q=None, max_seqlen_k=None)


def with_lengths(plain: Variant, name: str, lengths: Sequence[int], size: Size) -> Variant:
    rows = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(size.device, torch.int32)
    call = plain.call
    assert call.grad_out is not None
    tensors = (call.q, call.k, call.v, call.grad_out)
    q, k, v, grad = (t.detach().flatten(0, -3)[:rows] for t in tensors)
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    pairs = sum(length**2 for length in lengths) / (size.batch * size.seqlen**2)
    return replace(plain, name=name, call=Call(q, k, v, options, grad_out=grad), pairs=pairs)


def measure(size: Size, direction: str, only: Sequence[str] | None, setting: Setting) -> list[Row]:
    """A row for each variant, in which take turns: the call that its cost is measured from, the variant, its peers."""
    listed = [v for v in variants(size) if direction in v.directions]
    plain, chosen = listed[0], [v for v in listed if only is None or any(text in v.name for text in only)]
    alone = Comparison()
    add(alone, PLAIN, ours(), plain, direction, expected_of(plain, direction))
    rows = []
    for variant in chosen:
        base = alone
        if variant.base is not None:
            base, of_base = Comparison(), replace(plain, call=variant.base)
            add(base, PLAIN, ours(), of_base, direction, expected_of(of_base, direction))
        rows.append(measure_variant(size, direction, variant, base, setting))
    return rows


def measure_variant(size: Size, direction: str, variant: Variant, base: Comparison, setting: Setting) -> Row:
    """``base``: of the call that the cost is measured from, by the name of the plain one."""
    expected = expected_of(variant, direction)
    by_peers: Checker = expected
    if variant.call.options.get("dropout_p"):  # theirs draw other numbers
        undropped = replace(variant, call=variant.call.with_options(dropout_p=0.0, rng_state=None))
        by_peers = OnAverage(expected_of(undropped, direction))
    comparison = Comparison() if variant.name == PLAIN else Comparison(dict(base.candidates), dict(base.missing))
    add(comparison, OURS, ours(), variant, direction, expected)
    for name, peer in setting.peers.items():
        add(comparison, name, peer, variant, direction, by_peers)
    return row_of(
        size, direction, variant, comparison.measure(setting), comparison.missing, setting.ceilings["read_tbps"]
    )


def expected_of(variant: Variant, direction: str) -> Expected:
    gradients_of = variant.gradients_of if direction == "backward" else ()
    options = {name: value for name, value in variant.call.options.items() if name != "return_max_logit"}
    return Expected(replace(variant.call, options=options), gradients_of, variant.heads_kv, variant.batch_entries)


def add(comparison: Comparison, name: str, peer: Peer, variant: Variant, direction: str, expected: Checker) -> None:
    """Checks what the peer makes of the variant, and lets it take part."""
    call, own = variant.call, name == PLAIN or is_ours(name)
    if own:
        supported, reason = flash_ext.supports(call.q, call.k, call.v, operation=direction, **call.options)
    else:
        supported = call.varlen or not peer.is_too_large(call.q, call.k)
        reason = "its scores would take more than 2 GiB"
    if not supported:
        comparison.leave_out(name, reason)
        return
    gradients_of = variant.gradients_of if direction == "backward" else ()
    leaves = {name: t.detach().requires_grad_(name in gradients_of) for name, t in call.inputs().items()}
    prepare = cache(partial(peer.with_options, call))  # where it fails, it fails in the comparison

    def attend() -> Tensor:
        return prepare()(leaves)

    if direction == "forward":
        comparison.add(name, Candidate(torch.no_grad()(attend), peer.around), expected, required=own)
        return
    inputs = [leaves[name] for name in gradients_of]
    kept: list[Tensor] = []

    def differentiate() -> tuple[Tensor, ...]:
        return torch.autograd.grad(kept[0], inputs, call.grad_out, retain_graph=True)

    def out_and_gradients() -> Result:
        with peer.around():
            kept[:] = [attend()]
            gradients = zip(gradients_of, differentiate(), strict=True)
            return {"out": kept[0].detach(), **{f"d{name}": gradient for name, gradient in gradients}}

    comparison.add(name, Candidate(differentiate, peer.around), expected, out_and_gradients, required=own)


def row_of(
    size: Size, direction: str, variant: Variant, timings: Timings, missing: Mapping[str, str], read_tbps: float
) -> Row:
    figures: dict[str, float] = {}
    ms = timings.medians()
    base = OURS if variant.name == PLAIN else PLAIN
    if {OURS, base} <= ms.keys():
        plain = ms[base] * variant.pairs
        reading = variant.bytes_read / read_tbps / 1e9
        figures = {
            "% cost": 100 * (ms[OURS] / plain - 1),
            "% net": 100 * ((ms[OURS] - reading) / plain - 1),
            "pairs": variant.pairs,
            "MB": variant.bytes_read / 1e6,
        }
    return timed_row(size, direction, variant, timings, figures, missing)


def timed_row(
    size: Size,
    direction: str,
    variant: Variant,
    timings: Timings,
    figures: dict[str, float],
    missing: Mapping[str, str],
) -> Row:
    shape = f"{size.batch} x {size.seqlen} x {size.heads} x {size.head_dim}"
    return Row.timed(
        timings.without(PLAIN),
        table=f"{direction}, {name_of(size.dtype)}, {shape}",
        label=variant.name,
        problem={
            "direction": direction,
            "batch": size.batch,
            "seqlen": size.seqlen,
            "heads": size.heads,
            "head_dim": size.head_dim,
            "dtype": name_of(size.dtype),
        },
        figures=figures,
        missing=dict(missing),
    )
