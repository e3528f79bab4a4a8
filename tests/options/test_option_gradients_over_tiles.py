"""Gradients of q, k and v over many tiles of queries and keys, with one option of the scores, and with several: a
kernel that serves one option looks for no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.options.test_block_mask import blocked
from tests.oracle import (
    Call,
    assert_kernel_on_hopper,
    assert_matches_oracle,
    make_call,
    make_varlen_call,
    random,
    random_rng,
    run_library,
)

BATCH, HEADS = 2, 2
SEQLENS = {"cuda": (330, 460), "cpu": (70, 92)}  # several tiles each way; the last ones are in part
QKV = ("q", "k", "v")
HIDDEN = slice(40, 55)  # keys within a tile


def seqlens(device: str) -> tuple[int, int]:
    return SEQLENS[torch.device(device).type]


def bias_of(device: str, dtype: torch.dtype, spare: int = 4) -> Tensor:
    """Rows of 16-byte chunks, where ``spare`` is 4."""
    seqlen_q, seqlen_k = seqlens(device)
    return random(1, HEADS, seqlen_q, seqlen_k + spare, dtype=dtype, device=device)[..., :seqlen_k]


def key_bias_of(device: str, dtype: torch.dtype, heads: int = HEADS) -> Tensor:
    """The same for all queries; rows that start anywhere."""
    return random(BATCH, heads, 1, seqlens(device)[1] + 1, dtype=dtype, device=device)[..., 1:]


def hiding_key_bias_of(device: str, dtype: torch.dtype) -> Tensor:
    """Of each head other keys."""
    bias = key_bias_of(device, dtype)
    for head in range(HEADS):
        bias[:, head, :, 7 * head : 21] = -torch.inf
        bias[:, head, :, 30 + head :: 5] = -torch.inf
    return bias


def mask_of(device: str) -> Tensor:
    """Tiles of all kinds; some queries see nothing."""
    mask = torch.rand(1, HEADS, *seqlens(device), device=device) < 0.8
    mask[:, 0, :130, 128:330], mask[:, :, 64:256, :190], mask[:, 1, 5:9] = True, False, False
    return mask


def key_mask_of(device: str) -> Tensor:
    """The same for all queries; of one batch entry and head nothing but the first keys, of another other keys."""
    mask = torch.rand(BATCH, HEADS, 1, seqlens(device)[1], device=device) < 0.8
    mask[0, 0], mask[0, 0, :, :30], mask[1, :, :, 5:25] = False, True, False
    return mask


def dropout(device: str) -> dict[str, Any]:
    return {"dropout_p": 0.3, "rng_state": random_rng(device)}


OPTIONS: dict[str, Callable[[str, torch.dtype], dict[str, Any]]] = {
    "ALiBi": lambda device, dtype: {"alibi_slopes": torch.rand(HEADS, device=device) / 8},
    "softcap": lambda device, dtype: {"softcap": 2.0},
    "dropout": lambda device, dtype: dropout(device),
    "mask": lambda device, dtype: {"mask": mask_of(device)},
    "bias": lambda device, dtype: {"bias": bias_of(device, dtype)},
    "bias of uneven rows": lambda device, dtype: {"bias": bias_of(device, dtype, spare=3)},
    "bias of another dtype": lambda device, dtype: {
        "bias": bias_of(device, torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)
    },
    "bias of 32 bits": lambda device, dtype: {"bias": bias_of(device, torch.float32)},
    "per-key bias": lambda device, dtype: {"bias": key_bias_of(device, dtype, heads=1)},
    "per-key bias and heads": lambda device, dtype: {"bias": key_bias_of(device, dtype)},
    "per-key bias of 32 bits": lambda device, dtype: {"bias": key_bias_of(device, torch.float32)},
    "per-key bias that hides": lambda device, dtype: {"bias": hiding_key_bias_of(device, dtype)},
    "per-key bias, mask": lambda device, dtype: {"bias": key_bias_of(device, dtype), "mask": mask_of(device)},
    "per-key bias that hides, dropout": lambda device, dtype: {
        "bias": hiding_key_bias_of(device, dtype),
        **dropout(device),
    },
    "per-key bias, softcap, ALiBi": lambda device, dtype: {
        "bias": key_bias_of(device, dtype),
        "softcap": 2.0,
        "alibi_slopes": torch.rand(HEADS, device=device) / 8,
    },
    "key-padding mask": lambda device, dtype: {"mask": key_mask_of(device)},
    "key-padding mask, bias": lambda device, dtype: {"mask": key_mask_of(device), "bias": bias_of(device, dtype)},
    "key-padding mask, per-key bias": lambda device, dtype: {
        "mask": key_mask_of(device),
        "bias": hiding_key_bias_of(device, dtype),
    },
    "key-padding mask, dropout": lambda device, dtype: {"mask": key_mask_of(device), **dropout(device)},
    "key-padding mask, bias, dropout": lambda device, dtype: {
        "mask": key_mask_of(device),
        "bias": bias_of(device, dtype),
        **dropout(device),
    },
    "bias of 32 bits, dropout": lambda device, dtype: {"bias": bias_of(device, torch.float32), **dropout(device)},
    "bias of heads": lambda device, dtype: {"bias": random(1, HEADS, 1, 1, dtype=dtype, device=device)},
    "softcap, key-padding mask": lambda device, dtype: {"softcap": 2.0, "mask": key_mask_of(device)},
    "ALiBi, key-padding mask": lambda device, dtype: {
        "alibi_slopes": torch.rand(HEADS, device=device) / 8,
        "mask": key_mask_of(device),
    },
    "softcap, dropout": lambda device, dtype: {"softcap": 2.0, **dropout(device)},
    "mask, dropout": lambda device, dtype: {"mask": mask_of(device), **dropout(device)},
    "bias, mask": lambda device, dtype: {"bias": bias_of(device, dtype), "mask": mask_of(device)},
    "bias, softcap, ALiBi": lambda device, dtype: {
        "bias": bias_of(device, dtype),
        "softcap": 2.0,
        "alibi_slopes": torch.rand(HEADS, device=device) / 8,
    },
}


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[64, 128, 192, 256])
def head_dim(request: pytest.FixtureRequest) -> int:
    return request.param


def call_of(device: str, dtype: torch.dtype, head_dim: int, **options: Any) -> Call:
    """One for Hopper's own backward, unless its shared memory lacks room for a 32-bit bias beside dropout or a mask."""
    call = make_call(BATCH, *seqlens(device), HEADS, 1, head_dim, dtype=dtype, device=device, **options)
    wide_bias = "bias" in options and options["bias"].element_size() > 2 and head_dim == 128
    beside = "mask" in options or "dropout_p" in options
    own = ("sm90/backward", "sm90/backward_options", "sm90/backward_persistent")
    if head_dim > 128:
        own = ("sm90/backward_wide",)
    kernels = ("sm80/backward",) if wide_bias and beside else own
    assert_kernel_on_hopper(call, kernels, "backward")
    return call.with_random_gradients()


@pytest.mark.parametrize("window", [{}, {"causal": True}, {"window_size": (100, 40)}], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_of_options(device: str, dtype: torch.dtype, head_dim: int, options: str, window: dict[str, Any]) -> None:
    assert_matches_oracle(call_of(device, dtype, head_dim, **OPTIONS[options](device, dtype), **window), QKV)


@pytest.mark.parametrize("option", ["mask", "per-key bias"])
def test_of_more_query_tiles_than_a_warp_has_lanes(device: str, head_dim: int, option: str) -> None:
    """Steps are found 32 tiles of 64 queries at a time; a mask hides some. A CTA has all queries of its heads."""
    batch, heads, heads_kv, seqlen_q, seqlen_k = (4, 16, 4, 2500, 200) if device == "cuda" else (1, 2, 1, 150, 40)
    mask = torch.rand(1, heads, seqlen_q, seqlen_k, device=device) < 0.8
    mask[:, ::2, 64 : seqlen_q - 300] = mask[:, 1, : seqlen_q // 2] = False
    bias = random(1, heads, 1, seqlen_k, dtype=torch.bfloat16, device=device)
    options = {"mask": mask} if option == "mask" else {"bias": bias}
    sizes = (batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim)
    call = make_call(*sizes, dtype=torch.bfloat16, device=device, **options)
    assert_matches_oracle(call.with_random_gradients(), QKV)


def test_of_a_softcap_that_scores_exceed(device: str, dtype: torch.dtype, head_dim: int) -> None:
    call = call_of(device, dtype, head_dim, softcap=1.0)
    call.q[:, ::3] *= 8
    assert_matches_oracle(call, QKV)


@pytest.mark.parametrize("block", [(32, 64), (64, 64)], ids=str)
def test_of_a_block_mask(device: str, dtype: torch.dtype, head_dim: int, block: tuple[int, int]) -> None:
    """Lists drive the backward for blocks of 64 queries up to head_dim 128, and for no others."""
    seqlen_q, seqlen_k = seqlens(device)
    see = torch.rand(BATCH, HEADS, -(-seqlen_q // block[0]), -(-seqlen_k // block[1]), device=device) < 0.5
    see = see.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, :seqlen_q, :seqlen_k]
    assert_matches_oracle(blocked(call_of(device, dtype, head_dim), see, *block), QKV)


def test_of_heads_that_share_keys_in_packed_sequences(device: str, dtype: torch.dtype, head_dim: int) -> None:
    seqlen_q, seqlen_k = seqlens(device)
    mask = torch.rand(1, 4, seqlen_q, seqlen_k, device=device) < 0.7
    key_bias = random(4, 4, 1, seqlen_k, dtype=dtype, device=device)
    key_mask = torch.rand(4, 4, 1, seqlen_k, device=device) < 0.7
    slopes = torch.rand(4, device=device) / 8
    for options in ({"mask": mask}, {"bias": key_bias}, {"mask": key_mask}, {"alibi_slopes": slopes}, dropout(device)):
        call = make_varlen_call(
            [seqlen_q, 0, 1, 70],
            [seqlen_k, 9, 0, 90],
            device,
            heads_q=4,
            heads_kv=2,
            head_dim=head_dim,
            dtype=dtype,
            **options,
        )
        assert_matches_oracle(call, QKV)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(
    "option",
    ["mask", "bias", "bias of 32 bits", "mask, bias", "per-key bias", "key-padding mask", "key-padding mask, bias"],
)
@pytest.mark.parametrize("drops", [False, True])
def test_what_nobody_sees_reaches_no_gradient(
    device: str, dtype: torch.dtype, head_dim: int, option: str, poison: float, drops: bool
) -> None:
    """In tiles that the window leaves whole.

    A bias of -inf hides scores, not values: those it only gives the weight 0.
    """
    options: dict[str, Any] = dropout(device) if drops else {}
    if "mask" in option:
        options["mask"] = (key_mask_of if "of keys" in option else mask_of)(device)
        options["mask"][..., HIDDEN] = False
    if "bias" in option:
        bias_dtype = torch.float32 if "32" in option else dtype
        options["bias"] = (key_bias_of if option == "per-key bias" else bias_of)(device, bias_dtype).contiguous()
        options["bias"][..., HIDDEN] = -torch.inf
    if option == "bias":
        options["bias"] = torch.cat([options["bias"], options["bias"][..., :4]], -1)[..., : seqlens(device)[1]]
    call = call_of(device, dtype, head_dim, **options)
    expected = run_library(call, QKV)
    call.k[:, HIDDEN] = poison
    if "mask" in option:
        call.v[:, HIDDEN] = poison
    result = run_library(call, QKV)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-2
    for name in ("dq", "dk", "dv"):  # the forward may have added up out in another order
        torch.testing.assert_close(result[name], expected[name], rtol=tolerance, atol=tolerance)
    assert (result["dk"][:, HIDDEN] == 0).all() and (result["dv"][:, HIDDEN] == 0).all()


@pytest.mark.parametrize("poisoned", ["q", "grad_out"])
@pytest.mark.parametrize("option", ["mask", "bias, mask", "mask, dropout"])
def test_a_query_of_nan_reaches_no_key_that_a_mask_hides_from_it(
    device: str, dtype: torch.dtype, head_dim: int, option: str, poisoned: str
) -> None:
    """In tiles that the window leaves whole, and whose other queries see the key."""
    query = 41
    call = call_of(device, dtype, head_dim, **OPTIONS[option](device, dtype))
    call.options["mask"][:, :, query] = True
    call.options["mask"][:, :, query, HIDDEN] = False
    getattr(call, poisoned)[:, query] = torch.nan
    result = run_library(call, QKV)
    assert result["dk"][:, HIDDEN].isfinite().all() and result["dv"][:, HIDDEN].isfinite().all()
    assert result["dk"][:, HIDDEN.stop :].isnan().all()
    others = torch.arange(call.q.shape[1]) != query
    assert result["dq"][:, others].isfinite().all()


@pytest.mark.parametrize("option", ["mask", "bias", "per-key bias"])
def test_scores_that_overflow_where_nobody_sees_them(device: str, head_dim: int, option: str) -> None:
    """Sums of Inf and -Inf, or Inf, and gradients of scores likewise."""
    bias = (key_bias_of if "keys" in option else bias_of)(device, torch.bfloat16)
    mask = mask_of(device)
    bias[..., HIDDEN], mask[..., HIDDEN] = -torch.inf, False
    call = call_of(device, torch.bfloat16, head_dim, **({"mask": mask} if option == "mask" else {"bias": bias}))
    expected = run_library(call, QKV)
    call.q[..., :9], call.k[..., :9] = call.q[..., :9] * 2.0**60, call.k[..., :9] * 2.0**-60
    call.k[:, HIDDEN, :, ::2], call.k[:, HIDDEN, :, 1::2] = 2.0**100, -(2.0**100)
    call.v[:, HIDDEN] = 2.0**127
    result = run_library(call, QKV)
    torch.testing.assert_close(result["dv"], expected["dv"], rtol=2e-2, atol=2e-2)
    assert all(result[name].isfinite().all() for name in ("out", "dq", "dv"))
    assert (result["dk"][:, HIDDEN] == 0).all() and (result["dv"][:, HIDDEN] == 0).all()
