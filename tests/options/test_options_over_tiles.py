"""Bias, masks and dropout over many tiles of queries and keys: which tiles a mask leaves, what a bias does to the
row stabilisers, and how each comes to the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.options.test_block_mask import blocked
from tests.oracle import (
    Call,
    assert_kernel_on_hopper,
    assert_matches_oracle,
    int32,
    make_call,
    make_varlen_call,
    random,
    random_rng,
    run_library,
)

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 2, 300, 520  # several tiles each way of every kernel for 16 bits
HEAD_DIMS = [64, 128, 256]
DTYPES = [torch.float16, torch.bfloat16]


def call_of(device: str, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    return make_call(BATCH, SEQLEN_Q, SEQLEN_K, HEADS, 1, head_dim, dtype=dtype, device=device, **options)


def checked(call: Call) -> Tensor:
    """The result. Hopper's own kernel makes it of 16-bit inputs and a bias of 16 bits; wider ones are for the other."""
    bias = call.options.get("bias")
    narrow = call.q.element_size() == 2 and (bias is None or bias.element_size() == 2)
    assert_kernel_on_hopper(call, "sm90/forward" if narrow else "sm80/forward")
    return assert_matches_oracle(call, gradients_of=())["out"]


def mask_by_tiles(device: str, *, of_queries: int = 64, of_keys: int = 64) -> Tensor:
    """A third of the tiles hidden, a third visible, a third of random pairs; some queries see nothing."""
    shape = (BATCH, HEADS, -(-SEQLEN_Q // of_queries), -(-SEQLEN_K // of_keys))
    kind = torch.randint(0, 3, shape, device=device)
    kind = kind.repeat_interleave(of_queries, 2).repeat_interleave(of_keys, 3)[:, :, :SEQLEN_Q, :SEQLEN_K]
    see = (kind == 2) | ((kind == 1) & (torch.rand(kind.shape, device=device) < 0.5))
    see[:, :, 100:110] = False
    return see


@pytest.mark.parametrize("window", [{}, {"causal": True}, {"window_size": (170, 60)}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_masks_that_hide_whole_tiles(device: str, head_dim: int, dtype: torch.dtype, window: dict[str, Any]) -> None:
    call = call_of(device, head_dim, dtype, mask=mask_by_tiles(device), **window)
    assert (checked(call)[:, 100:110] == 0).all()


@pytest.mark.parametrize("rows", [1, 140], ids=["of keys", "of pairs"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_masks_that_hide_more_than_32_tiles(device: str, head_dim: int, dtype: torch.dtype, rows: int) -> None:
    """Which tiles are visited is known for 32 of them at a time, of whichever size a kernel's tiles are."""
    mask = torch.rand(BATCH, 1, rows, 6300, device=device) < 0.7
    mask[0, ..., 90:2040] = mask[0, ..., 2050:6170] = False
    mask[1, ..., :4096] = mask[1, ..., 4160:] = False
    checked(make_call(BATCH, 140, 6300, HEADS, 1, head_dim, dtype=dtype, device=device, mask=mask))


@pytest.mark.parametrize("shape", [(1, 1), (BATCH, 1), (1, HEADS)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_masks_of_keys(device: str, head_dim: int, shape: tuple[int, int]) -> None:
    mask = torch.rand(*shape, 1, SEQLEN_K, device=device) < 0.6
    mask[..., 64:200] = mask[..., 390:] = False
    checked(call_of(device, head_dim, mask=mask))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_mask_that_hides_everything(device: str, head_dim: int) -> None:
    mask = torch.zeros(1, 1, SEQLEN_Q, SEQLEN_K, dtype=torch.bool, device=device)
    result = run_library(call_of(device, head_dim, mask=mask))
    assert (result["out"] == 0).all() and torch.isneginf(result["lse"]).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_a_mask_hides_from_some_queries(device: str, head_dim: int, poison: float) -> None:
    """Keys that nobody sees, in tiles that some visit; and a value that only some queries see."""
    mask = mask_by_tiles(device)
    mask[..., 70:75] = mask[..., 505:] = False
    mask[:, :, :150, 300] = False
    call = call_of(device, head_dim, mask=mask)
    call.k[:, 70:75] = call.v[:, 70:75] = call.k[:, 505:] = call.v[:, 505:] = poison
    expected = checked(call)
    call.v[:, 300, :, 3] = poison
    found = run_library(call)["out"]
    sees = mask[..., 300].transpose(1, 2)
    torch.testing.assert_close(found[..., :3], expected[..., :3], rtol=1e-2, atol=1e-2)
    assert not found[..., 3][sees].isfinite().any() and found[..., 3][~sees].isfinite().all()


BIASES = [(BATCH, HEADS, SEQLEN_Q), (1, HEADS, SEQLEN_Q), (BATCH, 1, SEQLEN_Q), (1, 1, 1), (BATCH, 1, 1)]


@pytest.mark.parametrize("spare", [0, 8, 3])
@pytest.mark.parametrize("bias_dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_biases_by_their_rows(device: str, head_dim: int, bias_dtype: torch.dtype, spare: int) -> None:
    """Rows that start at multiples of 16 bytes can be copied by whole tiles, others cannot."""
    for shape in BIASES:
        bias = random(*shape, SEQLEN_K + spare, dtype=bias_dtype, device=device)[
            ..., spare // 2 : SEQLEN_K + spare // 2
        ]
        checked(call_of(device, head_dim, bias=bias))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_batch_entries_that_share_a_bias(device: str, head_dim: int) -> None:
    """More than have their keys in L2 together: blocks of some of them run side by side."""
    bias = random(1, HEADS, 24, 8192, dtype=torch.bfloat16, device=device)
    checked(make_call(13, 24, 8192, HEADS, 1, head_dim, dtype=torch.bfloat16, device=device, bias=bias))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_of_columns_and_one_of_float64(device: str, dtype: torch.dtype, head_dim: int) -> None:
    bias = random(1, HEADS, SEQLEN_K, SEQLEN_Q, dtype=dtype, device=device).transpose(2, 3)
    checked(call_of(device, head_dim, dtype, bias=bias))
    checked(call_of(device, head_dim, dtype, bias=bias.double()))


@pytest.mark.parametrize("lowest", [-1e4, -6e4, -1e30, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_bias_that_pads(device: str, head_dim: int, dtype: torch.dtype, lowest: float) -> None:
    """The tiles that are visited first give all rows a reference that is far too low, or none."""
    bias = torch.zeros(BATCH, 1, SEQLEN_Q, SEQLEN_K, device=device)
    bias[0, :, :, 200:] = bias[1, :, ::3, 130:] = lowest
    checked(call_of(device, head_dim, dtype, bias=bias.to(dtype)))
    checked(call_of(device, head_dim, dtype, bias=bias))


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with a mask and softcap"])
@pytest.mark.parametrize("bias_dtype", [torch.float32, None], ids=["float32", "of q"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_each_tile_gets_its_own_bias(
    device: str, head_dim: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, alone: bool
) -> None:
    """Softcap makes warps slow, masks make others fast: the next bias must wait for who still reads the last one. So it
    must in the kernels of a bias alone, which have neither.

    Scores and bias are constant over a tile of keys and tell which it is; values take the tiles apart.
    """
    call = call_of(device, head_dim, dtype)
    tiles = -(-SEQLEN_K // 64)
    tile = torch.arange(SEQLEN_K, device=device) // 64
    call.q.zero_(), call.k.zero_(), call.v.zero_()
    call.q[..., 0] = head_dim**0.5
    call.k[:, :, 0, 0] = 0.3125 * tile
    call.v[:, torch.arange(SEQLEN_K, device=device), 0, tile] = 1.0
    bias = (0.03125 * tile).expand(1, HEADS, SEQLEN_Q, SEQLEN_K).contiguous().to(bias_dtype or dtype)
    weights = torch.exp(0.34375 * torch.arange(tiles, device=device).double()) * tile.bincount()
    for _ in range(8):
        seen = torch.rand(BATCH, HEADS, -(-SEQLEN_Q // 64), tiles, device=device) < 0.7
        seen[..., 0] = True
        rows = seen.repeat_interleave(64, 2)[:, :, :SEQLEN_Q]
        mask = rows.repeat_interleave(64, 3)[..., :SEQLEN_K].contiguous()
        if alone:
            rows = torch.ones_like(rows)
        others = {} if alone else {"mask": mask, "softcap": 100.0}
        out = run_library(call.with_options(bias=bias, **others), ())["out"]
        expected = torch.nn.functional.normalize(rows * weights, p=1, dim=-1).transpose(1, 2)
        torch.testing.assert_close(out[..., :tiles].double(), expected, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("window", [{}, {"causal": True}, {"window_size": (900, 300)}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_each_tile_gets_its_own_bias_or_mask_alone(
    device: str, head_dim: int, dtype: torch.dtype, window: dict[str, Any]
) -> None:
    """As above, without what makes warps slow, over more tiles than a list of them is looked up at a time."""
    seqlen, heads = (200, 1) if device == "cpu" else (2200, 16)
    call = make_call(2, seqlen, seqlen, heads, heads, head_dim, dtype=dtype, device=device, **window)
    tile = torch.arange(seqlen, device=device) // 64
    tiles = int(tile[-1]) + 1
    call.q.zero_(), call.k.zero_(), call.v.zero_()
    call.v[:, torch.arange(seqlen, device=device), :, tile] = 1.0
    # 6 bits of a number that tells the query's tile and the key's, in sixteenths; the last 3 of each.
    number = (tile[:, None] % 8 * 8 + tile % 8) / 16
    options: list[dict[str, Tensor]] = [
        {"bias": number.to(dtype).expand(1, heads, seqlen, seqlen).contiguous()},
        {"bias": (tile % 8 / 8).to(dtype).expand(2, 1, 1, seqlen).contiguous()},
        {"mask": (number * 16 * 7 % 5 > 1)[None, None]},
        {"mask": torch.rand(1, heads, seqlen, seqlen, device=device) < 0.7},
    ]
    for option in options:
        expected = reference_by_tiles(call.with_options(**option), tiles)
        for _ in range(2 if device == "cpu" else 6):
            out = run_library(call.with_options(**option), ())["out"]
            torch.testing.assert_close(out[..., :tiles].double(), expected, rtol=0.02, atol=1e-3)


def reference_by_tiles(call: Call, tiles: int) -> Tensor:
    """Of scores of 0 but for a bias, and values that are the number of their tile: the weight of each tile."""
    seqlen = call.q.shape[1]
    i, j = torch.arange(seqlen, device=call.q.device)[:, None], torch.arange(seqlen, device=call.q.device)
    left, right = (-1, 0) if call.options.get("causal") else call.options.get("window_size", (-1, -1))
    seen = ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    if "mask" in call.options:
        seen = seen & call.options["mask"]
    bias = call.options.get("bias", torch.zeros(1, 1, 1, 1, device=call.q.device))
    weights = torch.exp(bias.float()).masked_fill(~seen, 0.0)
    sums = torch.nn.functional.pad(weights, (0, -seqlen % 64)).unflatten(3, (tiles, 64)).sum(-1)
    expected = torch.nn.functional.normalize(sums.double(), p=1, dim=-1).transpose(1, 2)
    return expected.expand(call.q.shape[0], -1, call.q.shape[2], -1)


@pytest.mark.parametrize("slope", [0.05, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("towards", ["first", "last", "diagonal"])
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_bias_that_grows(
    device: str, head_dim: int, dtype: torch.dtype, bias_dtype: torch.dtype, towards: str, slope: float
) -> None:
    queries, keys = torch.arange(SEQLEN_Q, device=device)[:, None], torch.arange(SEQLEN_K, device=device)
    distance = {"first": keys + 0 * queries, "last": SEQLEN_K - keys + 0 * queries, "diagonal": (queries - keys).abs()}
    bias = (-slope * distance[towards].float()).to(bias_dtype)[None, None]
    checked(call_of(device, head_dim, dtype, bias=bias))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_bias_of_minus_infinity_hides_scores_of_nan(device: str, head_dim: int) -> None:
    bias = random(1, 1, SEQLEN_Q, SEQLEN_K, dtype=torch.bfloat16, device=device)
    bias[..., 60:140] = -torch.inf
    call = call_of(device, head_dim, bias=bias)
    expected = checked(call)
    call.k[:, 60:140] = torch.nan
    torch.testing.assert_close(run_library(call)["out"], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("block", [(64, 64), (128, 128), (64, 256), (192, 64), (32, 32), (48, 96)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_block_masks(device: str, head_dim: int, block: tuple[int, int]) -> None:
    see = mask_by_tiles(device, of_queries=block[0], of_keys=block[1])
    checked(blocked(call_of(device, head_dim), see, *block))
    checked(blocked(call_of(device, head_dim, causal=True), see[:1], *block))


@pytest.mark.parametrize("options", ["plain", "causal", "mask", "bias", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dropout(device: str, head_dim: int, dtype: torch.dtype, options: str) -> None:
    see = mask_by_tiles(device)
    bias = random(1, HEADS, SEQLEN_Q, SEQLEN_K, dtype=dtype, device=device)
    extra: dict[str, Any] = {
        "plain": {},
        "causal": {"causal": True},
        "mask": {"mask": see},
        "bias": {"bias": bias},
        "all": {
            "mask": see,
            "bias": bias,
            "softcap": 3.0,
            "alibi_slopes": torch.rand(HEADS, device=device),
            "sink": random(HEADS, device=device),
        },
    }[options]
    checked(call_of(device, head_dim, dtype, dropout_p=0.3, rng_state=random_rng(device), **extra))


@pytest.mark.parametrize("p", [1 / 256, 0.5, 129 / 256, 0.9])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dropout_by_its_share(device: str, head_dim: int, p: float) -> None:
    """The least share, a half and the next one above it, and most."""
    checked(call_of(device, head_dim, dropout_p=p, rng_state=random_rng(device)))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_packed_sequences(device: str, head_dim: int) -> None:
    lengths_q, lengths_k = [300, 1, 0, 129, 64], [520, 70, 9, 0, 200]
    bias = random(1, HEADS, 300, 520, dtype=torch.bfloat16, device=device)
    mask = torch.rand(1, 1, 300, 520, device=device) < 0.7
    arguments: dict[str, Any] = {"heads_q": HEADS, "heads_kv": 1, "head_dim": head_dim, "dtype": torch.bfloat16}
    for alone in (
        {"bias": bias},
        {"bias": bias.float()},
        {"mask": mask},
        {"dropout_p": 0.3, "rng_state": random_rng(device)},
    ):
        checked(make_varlen_call(lengths_q, lengths_k, device, causal=True, **alone, **arguments))
    call = make_varlen_call(lengths_q, lengths_k, device, causal=True, bias=bias, mask=mask, **arguments)
    checked(call)
    checked(
        call.with_options(seqused_k=int32([400, 33, 9, 0, 140], device), seqused_q=int32([290, 1, 0, 70, 64], device))
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_batch_entries_that_share_a_bias(device: str, head_dim: int) -> None:
    """More of them than run at a time, and heads of q that share those of k."""
    bias = random(1, 4, 260, 392, dtype=torch.bfloat16, device=device)
    batch = 2 if device == "cpu" else 24
    checked(make_call(batch, 260, 392, 4, 2, head_dim, dtype=torch.bfloat16, device=device, bias=bias))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_same_bits_each_time(device: str, head_dim: int) -> None:
    batch, heads = (1, 2) if device == "cpu" else (4, 24)
    rng = random_rng(device)
    q, k, v = (torch.randn(batch, 700, heads, head_dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.rand(batch, 1, 700, 700, device=device) < 0.5
    mask[..., 100:400] = False
    bias = torch.randn(1, heads, 700, 704, device=device, dtype=torch.bfloat16)[..., :700]
    for options in ({"mask": mask}, {"bias": bias, "causal": True}, {"dropout_p": 0.2, "rng_state": rng}):
        first, *others = (flash_ext.attention(q, k, v, **options) for _ in range(2 if device == "cpu" else 20))
        assert isinstance(first, Tensor)
        assert all(torch.equal(first, other) for other in others)
