"""What nobody may see has no influence: not on one bit of out, lse and gradients, whatever it is.

Kernels look for quick ways through a tile: scores that are all small, sums that do not overflow, values that are
finite. What is hidden must not have a say in that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import (
    Call,
    Result,
    assert_hoppers_own_forward,
    cumulative,
    int32,
    make_call,
    random,
    random_rng,
    run_library,
)

BATCH, QUERIES, KEYS, HEADS = 2, 210, 330, 2
HALF_SIZES = [(dtype, head_dim) for dtype in (torch.bfloat16, torch.float16) for head_dim in (64, 128, 256)]
SIZES = [*HALF_SIZES, (torch.bfloat16, 96), (torch.bfloat16, 192), (torch.float32, 64), (torch.float32, 128),
         (torch.float32, 256)]  # fmt: skip
Places = dict[str, Any]  # index by tensor: "q" (and the gradient of out), "kv", "k"


def by_used_keys(call: Call) -> tuple[Call, Places]:
    used = int32([KEYS - 30, 75], str(call.q.device))
    return call.with_options(seqused_k=used), {"kv": [(0, slice(KEYS - 30, None)), (1, slice(75, None))]}


def by_used_queries(call: Call) -> tuple[Call, Places]:
    used = int32([QUERIES, 70], str(call.q.device))
    return call.with_options(seqused_q=used), {"q": [(1, slice(70, None))]}


def by_window(call: Call) -> tuple[Call, Places]:
    """Keys behind the last query's, and within tiles that some queries see."""
    return call.with_options(causal=True, top_left=True), {"kv": [(slice(None), slice(QUERIES, None))]}


def by_left_window(call: Call) -> tuple[Call, Places]:
    first = KEYS - QUERIES - 20
    return call.with_options(window_size=(20, -1)), {"kv": [(slice(None), slice(0, first))]}


def by_key_mask(call: Call) -> tuple[Call, Places]:
    mask = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool, device=call.q.device)
    mask[0, ..., 5:90:3] = mask[1, ..., 200:] = False
    return call.with_options(mask=mask), {"kv": [(0, slice(5, 90, 3)), (1, slice(200, None))]}


def by_full_mask(call: Call) -> tuple[Call, Places]:
    mask = torch.rand(BATCH, 1, QUERIES, KEYS, device=call.q.device) < 0.7
    mask[..., 100:130] = mask[..., 7] = False
    mask[..., 0] = True
    return call.with_options(mask=mask), {"kv": [(slice(None), slice(100, 130)), (slice(None), 7)]}


def by_bias(call: Call) -> tuple[Call, Places]:
    """Keys alone: a bias of -inf is a number, which makes the weight 0."""
    bias = call.options.get("bias")
    bias = (
        random(BATCH, 1, QUERIES, KEYS, dtype=call.dtype, device=str(call.q.device)) if bias is None else bias.clone()
    )
    bias[..., 40:60] = bias[..., 300] = -torch.inf
    return call.with_options(bias=bias), {"k": [(slice(None), slice(40, 60)), (slice(None), 300)]}


def by_block_mask(size: int) -> Callable[[Call], tuple[Call, Places]]:
    """Whole columns of blocks, which no list names, and single keys within blocks that some lists name."""

    def by_blocks(call: Call) -> tuple[Call, Places]:
        device = call.q.device
        blocks = torch.rand(-(-QUERIES // size), -(-KEYS // size), device=device) < 0.7
        blocks[:, 0], blocks[:, 1] = True, False
        visible = blocks.repeat_interleave(size, 0).repeat_interleave(size, 1)[:QUERIES, :KEYS].clone()
        visible[:, 5:40] = False
        block_mask = flash_ext.BlockMask.from_dense(visible, (size, size))
        return call.with_options(block_mask=block_mask), {
            "kv": [(slice(None), slice(5, 40)), (slice(None), slice(size, 2 * size))]
        }

    by_blocks.__name__ = f"by_block_mask_of_{size}"
    return by_blocks


HIDE = {f.__name__: f for f in (by_used_keys, by_used_queries, by_window, by_left_window, by_key_mask, by_full_mask,
                                by_bias, by_block_mask(64), by_block_mask(128))}  # fmt: skip


def options_of(name: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    def bias(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device)

    slopes = torch.tensor([0.02, 0.3], device=device)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "softcap": {"softcap": 30.0},
        "softcap_and_alibi": {"softcap": 30.0, "alibi_slopes": slopes},
        "softcap_and_bias": {"softcap": 30.0, "bias": bias(1, HEADS, QUERIES, KEYS)},
        "alibi": {"alibi_slopes": slopes},
        "bias": {"bias": bias(BATCH, HEADS, QUERIES, KEYS)},
        "key_bias": {"bias": bias(BATCH, 1, 1, KEYS)},
        "dropout": {"dropout_p": 0.2, "rng_state": random_rng(device)},
        "negative_scale": {"softmax_scale": -0.2},
        "sink": {"sink": bias(HEADS)},
    }
    return options[name]


OPTIONS = ["plain", "softcap", "softcap_and_alibi", "softcap_and_bias", "alibi", "bias", "key_bias", "dropout",
           "negative_scale", "sink"]  # fmt: skip


def poisons(dtype: torch.dtype) -> list[float]:
    return [3e4 if dtype == torch.float16 else 1e30, torch.inf, -torch.inf, torch.nan]


def with_poison(call: Call, places: Places, poison: float) -> Call:
    tensors = {name: getattr(call, name).clone() for name in ("q", "k", "v", "grad_out")}
    names = {"q": ("q", "grad_out"), "kv": ("k", "v"), "k": ("k",)}
    for where, indices in places.items():
        for name in names[where]:
            for index in indices:
                tensors[name][index] = poison
    return Call(**tensors, options=call.options, block_visible=call.block_visible, grad_lse=call.grad_lse)


def assert_same_bits(got: Result, expected: Result, poison: float) -> None:
    for name, value in expected.items():
        assert not value.isnan().any(), f"{name} is NaN without poison"
        differing = int((got[name] != value).sum())
        assert differing == 0, f"{name}: {poison} where nobody sees it changes {differing} of {value.numel()} numbers"


def check_all_poisons(call: Call, places: Places) -> None:
    call = call.with_random_gradients().with_options(deterministic=True)
    gradients_of = tuple(call.inputs())
    expected = run_library(call, gradients_of)
    for poison in poisons(call.dtype):
        assert_same_bits(run_library(with_poison(call, places, poison), gradients_of), expected, poison)


def skip_on_cpu(device: str, dtype: torch.dtype, head_dim: int) -> None:
    if device == "cpu" and (dtype, head_dim) not in [(torch.bfloat16, 64), (torch.float32, 64)]:
        pytest.skip("a CPU has one kernel for all")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("hide", HIDE.values(), ids=HIDE.keys())
@pytest.mark.parametrize(("dtype", "head_dim"), SIZES, ids=str)
def test_hidden_keys_and_rows(
    device: str, dtype: torch.dtype, head_dim: int, hide: Callable[[Call], tuple[Call, Places]], option: str
) -> None:
    skip_on_cpu(device, dtype, head_dim)
    if hide is by_bias and option == "key_bias":
        pytest.skip("a bias of its own")
    call = make_call(BATCH, QUERIES, KEYS, HEADS, 1, head_dim, dtype=dtype, device=device,
                     **options_of(option, dtype, device))  # fmt: skip
    call.q *= 0.5
    check_all_poisons(*hide(call))


@pytest.mark.parametrize("option", ["plain", "softcap", "alibi", "negative_scale"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), SIZES, ids=str)
def test_rows_between_packed_sequences(
    device: str, dtype: torch.dtype, head_dim: int, causal: bool, option: str
) -> None:
    """And behind the last one: what a tile has of the memory behind a sequence's end."""
    skip_on_cpu(device, dtype, head_dim)
    call = make_call(seqlen_q=300, seqlen_k=420, heads_q=HEADS, heads_kv=1, head_dim=head_dim, dtype=dtype,
                     device=device, causal=causal, cu_seqlens_q=cumulative([90, 5, 180], device),
                     cu_seqlens_k=cumulative([130, 64, 200], device), seqused_q=int32([77, 5, 150], device),
                     seqused_k=int32([100, 50, 200], device), max_seqlen_q=180, max_seqlen_k=200,
                     **options_of(option, dtype, device))  # fmt: skip
    call.q *= 0.5
    rows = [slice(77, 90), slice(245, None)]
    keys = [slice(100, 130), slice(180, 194), slice(394, None)]
    check_all_poisons(call, {"q": rows, "kv": keys})


@pytest.mark.parametrize("scale", [0.02, 0.5, 8.0])
@pytest.mark.parametrize("hide", [by_used_keys, by_used_queries, by_window, by_key_mask], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("dtype", "head_dim"), HALF_SIZES, ids=str)
def test_softcap_at_all_sizes_of_scores(
    device: str, dtype: torch.dtype, head_dim: int, hide: Callable[[Call], tuple[Call, Places]], scale: float
) -> None:
    """Small scores have a formula of their own, which large ones of others must not take away; nor the reverse."""
    skip_on_cpu(device, dtype, head_dim)
    call = make_call(BATCH, QUERIES, KEYS, HEADS, 1, head_dim, dtype=dtype, device=device, softcap=20.0)
    call.q *= scale
    call, places = hide(call)
    check_all_poisons(call, places)
    small = {name: getattr(call, name) for name in ("q", "k", "v")}
    smaller = {name: t.clone() for name, t in small.items()}
    for where, indices in places.items():
        for name in "q" if where == "q" else "kv":
            for index in indices:
                smaller[name][index] = 0.0
    expected, got = run_library(call), run_library(Call(**smaller, options=call.options))
    assert_same_bits(got, expected, 0.0)


def weights_and_gradients(call: Call, lse: Tensor, grad_weights: Tensor) -> Result:
    leaves = {name: t.detach().requires_grad_() for name, t in {"q": call.q, "k": call.k, "lse": lse}.items()}
    weights = flash_ext.attention_weights(**leaves, **call.options)
    found = torch.autograd.grad(weights, list(leaves.values()), grad_weights)
    return {"weights": weights.detach(), **{"d" + name: g for name, g in zip(leaves, found, strict=True)}}


@pytest.mark.parametrize("option", ["plain", "softcap", "alibi", "bias"])
@pytest.mark.parametrize("hide", HIDE.values(), ids=HIDE.keys())
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float32, 64)], ids=str)
def test_weights_of_hidden_keys_and_rows(
    device: str, dtype: torch.dtype, head_dim: int, hide: Callable[[Call], tuple[Call, Places]], option: str
) -> None:
    call, places = hide(
        make_call(BATCH, QUERIES, KEYS, HEADS, 1, head_dim, dtype=dtype, device=device,
                  **options_of(option, dtype, device))
    )  # fmt: skip
    call = call.with_random_gradients()
    lse = run_library(call)["lse"]
    grad_weights = random(BATCH, HEADS, QUERIES, KEYS, dtype=dtype, device=device)
    expected = weights_and_gradients(call, lse, grad_weights)
    for poison in poisons(dtype):
        poisoned = weights_and_gradients(with_poison(call, places, poison), lse, grad_weights)
        assert_same_bits(poisoned, expected, poison)


# ---- Decoding -------------------------------------------------------------------------------------------------------

PAGE, CACHE_LENGTHS = 64, (300, 210)


@dataclass
class Cache:
    """Keys and values, and which of their rows (entry or page, row) no sequence has."""

    k: Tensor
    v: Tensor
    unused: Tensor
    options: dict[str, Any]

    def with_poison(self, poison: float) -> tuple[Tensor, Tensor]:
        where = self.unused[..., None, None]
        return self.k.masked_fill(where, poison), self.v.masked_fill(where, poison)


def make_cache(paged: bool, padding: tuple[int, ...], hidden: tuple[int, ...], head_dim: int, **kind: Any) -> Cache:
    """Of each sequence, the first rows are padding, and the next ones are hidden by the window."""
    device = kind["device"]
    sizes = (15, PAGE) if paged else (4, 330)
    k, v = random(*sizes, 1, head_dim, **kind), random(*sizes, 1, head_dim, **kind)
    unused = torch.ones(sizes, dtype=torch.bool, device=device)
    table = torch.randperm(sizes[0], device=device)[: 6 * BATCH if paged else BATCH]
    for b, pages in enumerate(table.view(BATCH, -1)):
        rows = unused[pages].flatten()
        rows[padding[b] + hidden[b] : CACHE_LENGTHS[b]] = False
        unused[pages] = rows.view(len(pages), -1)
    options = {"cache_seqlens": int32(CACHE_LENGTHS, device)}
    if any(padding):
        options["cache_leftpad"] = int32(padding, device)
    name = "block_table" if paged else "cache_batch_idx"
    return Cache(k, v, unused, options | {name: table.int().view(BATCH, -1) if paged else table.int()})


@pytest.mark.parametrize(
    "option", ["plain", "causal", "window", "padding", "softcap", "alibi", "sink", "splits", "batch_invariant"]
)
@pytest.mark.parametrize("queries", [1, 200])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize(("dtype", "head_dim"), SIZES, ids=str)
def test_unused_rows_of_a_cache(
    device: str, dtype: torch.dtype, head_dim: int, paged: bool, queries: int, option: str
) -> None:
    """Behind the lengths, in the padding, in pages and entries of nobody, and left of the window."""
    skip_on_cpu(device, dtype, head_dim)
    left = 40
    options: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"causal": True, "window_size": (left, 0)},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": torch.tensor([0.02, 0.3], device=device)},
        "sink": {"sink": random(HEADS, dtype=dtype, device=device)},
        "splits": {"num_splits": 3},
        "batch_invariant": {"batch_invariant": True},
    }
    padding = (17, 5) if option == "padding" else (0, 0)
    hidden = tuple(max(0, n - queries - left) if option == "window" else 0 for n in CACHE_LENGTHS)
    cache = make_cache(paged, padding, hidden, head_dim, dtype=dtype, device=device)
    q = 0.5 * random(BATCH, queries, HEADS, head_dim, dtype=dtype, device=device)

    def run(k: Tensor, v: Tensor) -> Result:
        given = cache.options | options.get(option, {})
        out, lse = flash_ext.decode(q, k, v, return_lse=True, **given)
        return {"out": out, "lse": lse}

    expected = run(cache.k, cache.v)
    for poison in poisons(dtype):
        assert_same_bits(run(*cache.with_poison(poison)), expected, poison)


# ---- A limit that is close ------------------------------------------------------------------------------------------

HIGH_KEYS, LOW_KEYS, LAST_QUERIES = 1024, 384, 128


def hide_by_key_mask(call: Call) -> tuple[Call, list[int], slice]:
    mask = torch.ones(1, 1, 1, HIGH_KEYS + LOW_KEYS, dtype=torch.bool, device=call.q.device)
    mask[..., [700, HIGH_KEYS + 50]] = False
    return call.with_options(mask=mask), [700, HIGH_KEYS + 50], slice(None)


def hide_by_full_mask(call: Call) -> tuple[Call, list[int], slice]:
    mask = torch.rand(1, 2, LAST_QUERIES, HIGH_KEYS + LOW_KEYS, device=call.q.device) < 0.9
    mask[..., 700] = False
    return call.with_options(mask=mask), [700], slice(None)


def hide_by_block_mask(call: Call) -> tuple[Call, list[int], slice]:
    visible = torch.ones(LAST_QUERIES, HIGH_KEYS + LOW_KEYS, dtype=torch.bool, device=call.q.device)
    visible[:, 700] = False
    return call.with_options(block_mask=flash_ext.BlockMask.from_dense(visible)), [700], slice(None)


def hide_by_diagonal(call: Call) -> tuple[Call, list[int], slice]:
    """The last key, from all queries but the last."""
    return call.with_options(causal=True), [HIGH_KEYS + LOW_KEYS - 1], slice(0, LAST_QUERIES - 1)


def hide_by_left_window(call: Call) -> tuple[Call, list[int], slice]:
    """Key 0, from the second half of the queries, whose tile has it."""
    left = HIGH_KEYS + LOW_KEYS - LAST_QUERIES // 2
    return call.with_options(window_size=(left, -1)), [0], slice(LAST_QUERIES // 2 + 1, None)


def with_low_scores_at_the_end(device: str, dtype: torch.dtype, head_dim: int) -> Call:
    """Scores of the last keys are about 0, of all others about 7."""
    call = make_call(1, LAST_QUERIES, HIGH_KEYS + LOW_KEYS, HEADS, HEADS, head_dim, dtype=dtype, device=device)
    call.q *= 0.1
    call.q[..., 0] = head_dim**0.5 / 8
    call.k[:, :HIGH_KEYS, :, 0] = 56.0
    call.k[:, HIGH_KEYS:, :, 0] = 0.0
    scores = torch.einsum("bqhd,bkhd->bhqk", call.q.float(), call.k.float()) / head_dim**0.5
    weights = (scores - scores[..., -64:].amax(-1, keepdim=True)).exp()
    assert weights.max() < 6e4 and weights.sum(-1).min() > 4 * 65504 * 1.2, "not the case that is meant"
    return call


HIDE_BESIDE_LARGE_SUMS = {f.__name__: f for f in (hide_by_key_mask, hide_by_full_mask, hide_by_block_mask,
                                                  hide_by_diagonal, hide_by_left_window)}  # fmt: skip


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("hide", HIDE_BESIDE_LARGE_SUMS.values(), ids=HIDE_BESIDE_LARGE_SUMS.keys())
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_hidden_values_beside_large_sums(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    hide: Callable[[Call], tuple[Call, list[int], slice]],
    poison: float,
) -> None:
    """The keys that a kernel visits first, the last ones, have low scores. Against their row max the weights of the
    others add up to more than a float16 holds, though none alone does: sums are float32, so this is no overflow. A NaN
    in V that nobody sees must not make it one, whose rows would be summed, and rounded, in another way."""
    call, keys, rows = hide(with_low_scores_at_the_end(device, dtype, head_dim))
    assert_hoppers_own_forward(call)
    expected = run_library(call)
    poisoned = Call(call.q, call.k, call.v.clone(), options=call.options)
    poisoned.v[:, keys] = poison
    got = run_library(poisoned)
    assert_same_bits(
        {"out": got["out"][:, rows], "lse": got["lse"][..., rows]},
        {"out": expected["out"][:, rows], "lse": expected["lse"][..., rows]},
        poison,
    )
