"""bfloat16 on the matrix units of a CPU: tiles of 16 rows, 32 numbers deep, where shapes are whole tiles and where not.

Where a CPU has none, the same calls go to the kernels that the others take, and the same bounds hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import assert_matches_oracle, make_call, make_varlen_call, random_rng, run_library

BFLOAT16 = torch.bfloat16
VARIANT = "matrix units"

# (seqlen_q, seqlen_k, options): panels of 32 queries, blocks of 32 keys, tiles of 64 keys and of 256 queries.
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "whole tiles": (64, 128, {}),
    "five queries": (5, 200, {}),
    "a panel half in use": (16, 64, {}),
    "a lane more than half a panel": (17, 65, {}),
    "one key": (40, 1, {}),
    "several tiles of queries": (300, 70, {"causal": True}),
    "a window that ends within a pair of keys": (150, 333, {"window_size": (77, 12)}),
    "a window narrower than a tile's depth": (90, 90, {"window_size": (3, 0)}),
    "softcap": (70, 100, {"softcap": 5.0}),
    "dropout": (70, 100, {"dropout_p": 0.3, "rng_state": torch.tensor([11, 13])}),
    "a negative scale": (33, 65, {"softmax_scale": -0.3}),
    "a scale of zero": (33, 65, {"softmax_scale": 0.0}),
    "tiles of keys that begin within a packed one": (520, 520, {"window_size": (100, 30)}),
}


def on_this_cpu() -> bool:
    flags = Path("/proc/cpuinfo")
    return flags.exists() and {"amx_bf16", "amx_tile", "avx512_bf16"} <= set(flags.read_text().split())


@pytest.mark.parametrize("head_dims", [(64, 64), (8, 8), (40, 72), (128, 96), (200, 256)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_tiles(shape: str, head_dims: tuple[int, int]) -> None:
    seqlen_q, seqlen_k, options = SHAPES[shape]
    assert_matches_oracle(
        make_call(1, seqlen_q, seqlen_k, 4, 2, *head_dims, dtype=BFLOAT16, **options),
    )


def test_a_scale_near_the_largest_float() -> None:
    """Its product with log2 e is none."""
    q, k, v = (torch.randn(1, 100, 2, 64).to(BFLOAT16) for _ in "qkv")
    small = 2.0**-50  # products stay normal numbers
    found = flash_ext.attention(q * small, k * small, v, softmax_scale=1.5 * 2.0**127, return_lse=True)
    expected = flash_ext.attention(q, k, v, softmax_scale=1.5 * 2.0**27, return_lse=True)
    for ours, right in zip(found, expected, strict=True):
        assert right.isfinite().all()
        torch.testing.assert_close(ours, right, rtol=1e-2, atol=1e-2)


def test_packed_sequences_of_every_length() -> None:
    lengths = [0, 1, 4, 5, 31, 32, 33, 64, 100]
    assert_matches_oracle(make_varlen_call(lengths, lengths[::-1], heads_q=2, heads_kv=1, dtype=BFLOAT16))


def test_bias_and_its_gradient() -> None:
    assert_matches_oracle(make_call(2, 70, 100, dtype=BFLOAT16, bias=torch.randn(1, 4, 70, 100).to(BFLOAT16)))


def test_chunks_of_keys_end_within_a_block_of_tiles() -> None:
    """A chunk of the backward is at least 512 keys; the last one ends 8 keys behind a tile."""
    assert_matches_oracle(make_call(1, 40, 1096, 2, 2, 64, dtype=BFLOAT16, causal=True))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_with_nan_or_inf_reach_those_alone_that_see_them(name: str, value: float) -> None:
    """A product of whole tiles meets every key with every query, hidden or not."""
    clean = make_call(1, 96, 96, 2, 2, 64, dtype=BFLOAT16, causal=True).with_random_gradients()
    expected = run_library(clean, ("q", "k", "v"))
    dirty = make_call(1, 96, 96, 2, 2, 64, dtype=BFLOAT16, causal=True)
    for own, other in zip(dirty.inputs().values(), clean.inputs().values(), strict=True):
        own.copy_(other)
    dirty.grad_out, dirty.grad_lse = clean.grad_out, clean.grad_lse
    row = 50
    getattr(dirty, name)[:, row, :, 3] = value
    result = run_library(dirty, ("q", "k", "v"))
    if name == "q":
        others = [i for i in range(96) if i != row]
        assert torch.equal(result["out"][:, others], expected["out"][:, others])
        assert torch.equal(result["dq"][:, others], expected["dq"][:, others])
        for gradient in ("dk", "dv"):  # of keys that the row does not see
            assert torch.equal(result[gradient][:, row + 1 :], expected[gradient][:, row + 1 :])
    else:
        assert torch.equal(result["out"][:, :row], expected["out"][:, :row])
        assert torch.equal(result["dq"][:, :row], expected["dq"][:, :row])
    if value != torch.inf or name == "v":  # an Inf in a key may hide it
        assert not result["out"][:, row].isfinite().all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_panel_ends_within_a_pair_of_keys_that_another_sees(dropout_p: float) -> None:
    """The first 32 queries see 65 keys, the others more of the same tile. With fewer heads, panels would be tiles."""
    q, k, v = (torch.randn(1, n, 32, 16, dtype=BFLOAT16) for n in (64, 128, 128))
    options: dict[str, Any] = {"window_size": (-1, 33), "top_left": True}
    if dropout_p > 0:
        options |= {"dropout_p": dropout_p, "rng_state": random_rng()}

    def first_rows() -> tuple[Tensor, Tensor]:
        leaf = q.detach().requires_grad_()
        out = flash_ext.attention(leaf, k, v, **options)[:, :32]
        return out.detach(), torch.autograd.grad(out.sum(), leaf)[0][:, :32]

    expected, expected_dq = first_rows()
    k[:, 65:] = 1e4
    v[:, 65:] = 1e4
    found, dq = first_rows()
    assert torch.equal(found, expected)
    assert torch.equal(dq, expected_dq)


def test_a_gradient_that_is_not_finite_reaches_those_alone_that_its_row_sees() -> None:
    call = make_call(1, 96, 96, 2, 2, 64, dtype=BFLOAT16, causal=True).with_random_gradients()
    expected = run_library(call, ("q", "k", "v"))
    assert call.grad_out is not None
    call.grad_out[:, 50, :, 3] = torch.nan
    result = run_library(call, ("q", "k", "v"))
    for gradient in ("dk", "dv"):
        assert torch.equal(result[gradient][:, 51:], expected[gradient][:, 51:])
        assert result[gradient][:, :51].isnan().any()


def test_scores_of_the_forward_have_the_bits_of_the_backward() -> None:
    """One key far above all others: its weight is 1 in both, so dV is dO there, bit for bit."""
    call = make_call(1, 64, 64, 1, 1, 64, dtype=BFLOAT16)
    call.k[:, 7] = 40 * call.q[:, :1, 0, :].sign()[:, 0][:, None]
    call.q[...] = call.q[:, :1].sign() * 40
    call.grad_out = torch.randn_like(call.q)
    result = run_library(call, ("v",))
    assert torch.equal(result["out"], call.v[:, 7:8].expand_as(result["out"]))
    expected = call.grad_out.double().sum(1)
    torch.testing.assert_close(result["dv"][:, 7].double(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("step", [0.5, 7.0, 30.0])
def test_scores_that_grow_along_the_keys(step: float) -> None:
    """From tile to tile by less than the stabiliser of a row tolerates, in the end by more, and by more at once."""
    call = make_call(1, 70, 640, 2, 2, 64, dtype=BFLOAT16, softmax_scale=1.0)
    call.q[...] = call.q * 0.1
    call.q[..., 0] = 1
    call.k[..., 0] = (torch.arange(640) // 64 * step)[None, :, None].to(BFLOAT16)
    assert_matches_oracle(call)


@pytest.mark.parametrize(("size", "scale"), [(1e20, 1.0), (1e15, 1e10)])
def test_products_and_scores_that_overflow(size: float, scale: float) -> None:
    """An infinite score has an infinite log-sum-exp and no weights."""
    q, k, v = (torch.full((1, 70, 2, 64), size, dtype=BFLOAT16) for _ in range(3))
    out, lse = flash_ext.attention(q, k, v, softmax_scale=scale, return_lse=True)
    assert out.isnan().all() and (lse == torch.inf).all()


def test_torch_may_use_the_units_in_between() -> None:
    """Tile registers are configured for each thread: neither library may rely on what the other left there."""
    q = torch.randn(1, 128, 2, 64, dtype=BFLOAT16)
    a = torch.randn(96, 80, dtype=BFLOAT16)
    heads_first = q.transpose(1, 2)
    ours, product = flash_ext.attention(q, q, q), a @ a.T
    theirs = torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first)

    def alternate(_: int) -> bool:
        same = True
        for _ in range(20):
            same &= torch.equal(a @ a.T, product)
            same &= torch.equal(flash_ext.attention(q, q, q), ours)
            found = torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first)
            same &= torch.equal(found, theirs)
        return same

    assert alternate(0)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(alternate, range(8)))


@pytest.mark.parametrize(("limit", "wanted"), [("amx", on_this_cpu()), ("avx512", False), ("baseline", False)])
def test_the_plan_says_whether_the_units_are_used(limit: str, wanted: bool) -> None:
    program = (
        "import torch, flash_ext; q = torch.randn(1, 40, 2, 64, dtype=torch.bfloat16);"
        "print(flash_ext.explain(q, q, q)); print(flash_ext.explain(q, q, q, operation='backward'));"
        "print('float32', flash_ext.explain(q.float(), q.float(), q.float()))"
    )
    environment = {**os.environ, "FLASH_EXT_CPU_ISA": limit}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    bfloat16, float32 = run.stdout.split("float32 flash_ext", 1)
    assert bfloat16.count(f"variant for products by {VARIANT}") == (4 if wanted else 0)
    assert VARIANT not in float32
