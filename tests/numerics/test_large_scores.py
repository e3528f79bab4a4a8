"""Scores of ten thousand and of a billion, and biases at the end of what a float holds.

The last place of a float32 score of 1e4 is 1e-3, which is 1e-3 of its weight. A row with one key far above all others
must not notice: its weight is 1 in the forward, in the backward and wherever it is recomputed from lse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import FLOATS, HALF, random

HEAD_DIMS = [64, 96, 128, 192, 256]  # of the kernels for Hopper
ROWS, KEYS = 64, 600  # a query for each of the first columns
SIZE = 181.0  # its square, 32761, is exact in every dtype that sums
SLOPE = 0.3 // 2**-24 * 2**-24  # slopes are float32, whatever the inputs are
SCALES = [1.0, 0.3034, 0.0971]  # the product of an exact score and most numbers is rounded


def weight_tolerance(dtype: torch.dtype) -> float:
    """Of a weight of 1 that is recomputed from lse: on CUDA, that of 16-bit inputs is taken to base 2 there."""
    return 1e-2 if dtype in HALF else 0.0


def short_numbers(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random numbers of eight bits: products with a weight of 1 are exact, however a kernel splits them."""
    return random(*shape, device=device).to(torch.bfloat16).to(dtype)


def one_key_each(size: float, dtype: torch.dtype, head_dim: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, the key of each query): their product is size^2, all others are 0. Keys lie anywhere but at the end."""
    keys = torch.randperm(KEYS - 1, device=device)[:ROWS]
    q = torch.zeros(1, ROWS, 1, head_dim, dtype=dtype, device=device)
    k = torch.zeros(1, KEYS, 1, head_dim, dtype=dtype, device=device)
    columns = torch.arange(ROWS, device=device)
    q[0, columns, 0, columns] = size
    k[0, keys, 0, columns] = size
    return q, k, short_numbers(1, KEYS, 1, head_dim, dtype=dtype, device=device), keys


def zero_bias(dtype: torch.dtype, device: str) -> Tensor:
    return torch.zeros(1, 1, ROWS, 2 * KEYS, dtype=dtype, device=device)


def every_block(device: str) -> flash_ext.BlockMask:
    return flash_ext.BlockMask.from_blocks(torch.ones(1, 5, dtype=torch.bool, device=device), ROWS, KEYS)


OPTIONS: dict[str, Callable[[torch.dtype, str], dict[str, Any]]] = {
    "plain": lambda dtype, device: {},
    "window": lambda dtype, device: {"window_size": (KEYS, KEYS)},
    "sink": lambda dtype, device: {"sink": torch.zeros(1, dtype=lse_dtype(dtype), device=device)},
    "ALiBi": lambda dtype, device: {"alibi_slopes": torch.full((1,), SLOPE, device=device)},
    "mask": lambda dtype, device: {"mask": torch.ones(1, 1, ROWS, KEYS, dtype=torch.bool, device=device)},
    "block mask": lambda dtype, device: {"block_mask": every_block(device)},
    "bias": lambda dtype, device: {"bias": zero_bias(dtype, device)[..., :KEYS]},
    "strided bias": lambda dtype, device: {"bias": zero_bias(dtype, device)[..., ::2]},
}


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def largest_scores(scale: float, option: str, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each row, rounded as a number of the dtype is."""
    scores = torch.full((ROWS,), SIZE * SIZE, dtype=dtype, device=keys.device) * torch.tensor(scale, dtype=dtype)
    if option != "ALiBi":
        return scores
    diagonal = torch.arange(ROWS, device=keys.device) + KEYS - ROWS
    return scores - SLOPE * (diagonal - keys).abs().to(dtype)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_key_far_above_all_others(
    device: str, dtype: torch.dtype, head_dim: int, scale: float, option: str
) -> None:
    """Its weight is 1 to the last bit: in out, and, recomputed from lse, in the gradients of out and of lse; there,
    for 16-bit inputs, nearly so."""
    q, k, v, keys = one_key_each(SIZE, dtype, head_dim, device)
    options = OPTIONS[option](dtype, device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = flash_ext.attention(q, k, v, softmax_scale=scale, return_lse=True, **options)
    if option == "ALiBi":  # weights are taken from what the score will be on the diagonal
        torch.testing.assert_close(out[0], v[0, keys], rtol=4 * torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(out[0], v[0, keys])
    rtol = {torch.float64: 1e-15, torch.float32: 2e-7}.get(dtype, 1e-6)
    torch.testing.assert_close(lse[0, 0], largest_scores(scale, option, keys, lse.dtype), rtol=rtol, atol=0)

    grad_out = short_numbers(*out.shape, dtype=dtype, device=device)
    dv = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)[2]
    expected = torch.zeros_like(v)
    expected[0, keys] = grad_out[0]
    torch.testing.assert_close(dv, expected, rtol=weight_tolerance(dtype), atol=0)

    grad_lse = short_numbers(*lse.shape, dtype=lse.dtype, device=device)
    dq, dk = torch.autograd.grad(lse, leaves[:2], grad_lse)
    of_rows = (grad_lse[0, 0] * scale).to(dtype)[:, None]
    tight = {"rtol": 4 * torch.finfo(dtype).eps + 2 * weight_tolerance(dtype), "atol": 0.0}
    torch.testing.assert_close(dq[0, :, 0], k[0, keys, 0] * of_rows, **tight)
    torch.testing.assert_close(dk[0, keys, 0], q[0, :, 0] * of_rows, **tight)


@pytest.mark.parametrize("below", [5.0, 38.0, 60.0])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_maximum_behind_the_first_tile(device: str, head_dim: int, scale: float, below: float) -> None:
    """The last key, which a kernel may visit first and take weights from, is below the highest one by a little."""
    q, k, v, _ = one_key_each(SIZE, torch.float32, head_dim, device)
    k[0, -1, 0] = SIZE - below / (SIZE * scale)
    v.requires_grad_()
    out = flash_ext.attention(q, k, v, softmax_scale=scale)
    grad_out = short_numbers(*out.shape, dtype=torch.float32, device=device)
    (dv,) = torch.autograd.grad(out, v, grad_out)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double())[0, 0].float() * scale
    tolerance = 2e-3 if below < 10 else 1e-6  # with two weights that matter, lse is no score
    weights = scores.double().softmax(-1)
    found, values = out[0, :, 0].double(), v[0, :, 0].detach().double()
    torch.testing.assert_close(found, weights @ values, rtol=0, atol=10 * tolerance)
    expected = weights.T @ grad_out[0, :, 0].double()
    torch.testing.assert_close(dv[0, :-1, 0].double(), expected[:-1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", [0.0, 5e4])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_gradient_of_a_bias(device: str, dtype: torch.dtype, head_dim: int, scale: float, softcap: float) -> None:
    if dtype in HALF and softcap:
        pytest.skip("their tanh is right to 2^-11: to 5 of a score of 1e4")
    q, k, v, keys = one_key_each(SIZE, dtype, head_dim, device)
    bias = torch.zeros(1, 1, ROWS, KEYS, device=device, requires_grad=True)
    lse = flash_ext.attention(q, k, v, bias=bias, softmax_scale=scale, softcap=softcap, return_lse=True)[1]
    grad_lse = short_numbers(*lse.shape, dtype=lse.dtype, device=device)
    (dbias,) = torch.autograd.grad(lse, bias, grad_lse)
    expected = torch.zeros_like(bias)
    expected[0, 0, torch.arange(ROWS, device=device), keys] = grad_lse[0, 0]
    torch.testing.assert_close(dbias, expected, rtol=2 * weight_tolerance(dtype), atol=0)


def integers(*shape: int, device: str) -> Tensor:
    """Any order of summation gives the same products: rounding scores is all that a kernel does."""
    return torch.randint(-511, 512, shape, device=device).float()


def floats(*shape: int, device: str) -> Tensor:
    """Products are rounded as they are summed: forward and backward have to do so in the same way."""
    return torch.randn(*shape, device=device) * 300.0


def tolerance_of_sums(numbers: Callable[..., Tensor], head_dim: int, top: float) -> float:
    """Of a weight that the backward recomputes. On Hopper it sums the columns of wide heads otherwise than the forward:
    scores differ in the last place."""
    return 8 * torch.finfo(torch.float32).eps * top if numbers is floats and head_dim > 128 else 1e-6


@pytest.mark.parametrize("numbers", [integers, floats])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rows_with_a_clear_maximum(device: str, head_dim: int, causal: bool, numbers: Callable[..., Tensor]) -> None:
    rows, keys, heads = 200, 300, 2
    q, k = (numbers(1, n, heads, head_dim, device=device) for n in (rows, keys))
    v = short_numbers(1, keys, heads, head_dim, dtype=torch.float32, device=device).requires_grad_()
    scale = 0.0971 / head_dim**0.5
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale  # of 8000 or so
    if causal:
        scores.masked_fill_(torch.ones(rows, keys, device=device, dtype=torch.bool).triu(keys - rows + 1), -torch.inf)
    highest = scores.topk(2)
    alone = highest.values[..., 0] > highest.values[..., 1] + 30  # (1, heads, rows): nearly all
    assert alone.float().mean() > 0.8
    out = flash_ext.attention(q, k, v, softmax_scale=scale, causal=causal)
    chosen = highest.indices[..., 0]
    values = v.detach().transpose(1, 2).gather(2, chosen[..., None].expand(-1, -1, -1, head_dim))
    assert torch.equal(out.transpose(1, 2)[alone], values[alone])

    grad_out = short_numbers(*out.shape, dtype=torch.float32, device=device)
    grad_out *= alone.transpose(1, 2)[..., None]
    (dv,) = torch.autograd.grad(out, v, grad_out)
    at = chosen[..., None].expand(-1, -1, -1, head_dim)
    addends = grad_out.double().transpose(1, 2)
    zeros = torch.zeros(1, heads, keys, head_dim, dtype=torch.float64, device=device)
    expected, sizes = (zeros.scatter_add(2, at, x) for x in (addends, addends.abs()))
    tolerance = tolerance_of_sums(numbers, head_dim, highest.values.max().item())
    assert ((dv.double().transpose(1, 2) - expected).abs() <= tolerance * (sizes + 1e-3)).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("option", ["plain", "ALiBi", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.op("attention_weights")
def test_weights(device: str, dtype: torch.dtype, head_dim: int, scale: float, option: str) -> None:
    q, k, v, keys = one_key_each(SIZE, dtype, head_dim, device)
    options = OPTIONS[option](dtype, device)
    lse = flash_ext.attention(q, k, v, softmax_scale=scale, return_lse=True, **options)[1]
    lse.requires_grad_()
    weights = flash_ext.attention_weights(q, k, lse, softmax_scale=scale, **options)
    at = 0, 0, torch.arange(ROWS, device=device), keys
    expected = torch.zeros_like(weights)
    expected[at] = 1
    rtol = 2 * weight_tolerance(dtype)
    torch.testing.assert_close(weights, expected, rtol=rtol, atol=0)
    gradient = short_numbers(*weights.shape, dtype=weights.dtype, device=device)
    (dlse,) = torch.autograd.grad(weights, lse, gradient)
    torch.testing.assert_close(dlse[0, 0], -gradient[at].to(dlse.dtype), rtol=rtol, atol=0)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("size", [SIZE, 2.0**20])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.op("attention_decode")
def test_decode(
    device: str, dtype: torch.dtype, rows: int, head_dim: int, scale: float, size: float, num_splits: int
) -> None:
    size = min(size, 60000.0) if dtype == torch.float16 else size
    q, k, v, keys = one_key_each(size, dtype, head_dim, device)
    out, lse = flash_ext.decode(
        q[:, :rows], k, v, softmax_scale=scale, num_splits=num_splits, return_lse=True, causal=False
    )
    assert torch.equal(out[0], v[0, keys[:rows]])
    rtol = 1e-6 if dtype in HALF else 2e-7
    torch.testing.assert_close(lse, torch.full_like(lse, size * size * scale), rtol=rtol, atol=0)


@pytest.mark.parametrize("lse", [9940.4, 2.0**38, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.op("merge")
def test_merge(device: str, head_dim: int, lse: float) -> None:
    """One part has all the weight."""
    outs = random(3, 1, ROWS, 2, head_dim, device=device).requires_grad_()
    lses = torch.full((3, 1, 2, ROWS), -lse, device=device)
    lses[1] = lse
    lses.requires_grad_()
    out, merged = flash_ext.merge(outs, lses)
    assert torch.equal(out, outs[1]) and torch.equal(merged, lses[1])
    grad_out, grad_lse = random(*out.shape, device=device), random(*merged.shape, device=device)
    douts, dlses = torch.autograd.grad([out, merged], [outs, lses], [grad_out, grad_lse])
    assert torch.equal(douts[1], grad_out) and douts[::2].count_nonzero() == 0
    torch.testing.assert_close(dlses[1], grad_lse, rtol=0, atol=1e-4)  # and <d out, out_1 - out>, which is near 0
    assert dlses[::2].count_nonzero() == 0


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scores_beyond_the_integers_of_a_float(device: str, dtype: torch.dtype, head_dim: int, option: str) -> None:
    """At 2^31 and beyond, the rounding of a score is a large number itself."""
    size = 60000.0 if dtype == torch.float16 else 2.0**20
    q, k, v, keys = one_key_each(size, dtype, head_dim, device)
    v.requires_grad_()
    out, lse = flash_ext.attention(q, k, v, softmax_scale=0.3034, return_lse=True, **OPTIONS[option](dtype, device))
    assert torch.equal(out[0], v[0, keys])
    assert lse.isfinite().all()
    grad_out = short_numbers(*out.shape, dtype=dtype, device=device)
    (dv,) = torch.autograd.grad(out, v, grad_out)
    assert torch.equal(dv[0, keys], grad_out[0])


BIAS_SHAPES = [(ROWS, KEYS), (1, KEYS)]


@pytest.mark.parametrize("wide", [False, True], ids=["own_dtype", "float32"])
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_bias_on_one_key(
    device: str, dtype: torch.dtype, head_dim: int, shape: tuple[int, int], wide: bool
) -> None:
    bias = torch.zeros(1, 1, *shape, dtype=torch.float32 if wide else dtype, device=device)
    chosen = 417
    bias[..., chosen] = torch.finfo(bias.dtype).max
    bias.requires_grad_()
    q, k, v = (short_numbers(1, n, 1, head_dim, dtype=dtype, device=device) for n in (ROWS, KEYS, KEYS))
    leaves = [*(t.requires_grad_() for t in (q, k, v)), bias]
    out, lse = flash_ext.attention(q, k, v, bias=bias, return_lse=True)
    assert torch.equal(out[0], v[0, chosen].expand_as(out[0]))
    assert lse.isfinite().all()
    grad_out = short_numbers(*out.shape, dtype=dtype, device=device)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    assert all(g.isfinite().all() for g in gradients)
    torch.testing.assert_close(gradients[2][0, chosen], grad_out[0].to(lse.dtype).sum(0).to(dtype))


@pytest.mark.parametrize("wide", [False, True], ids=["own_dtype", "float32"])
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_lowest_bias_pads(
    device: str, dtype: torch.dtype, head_dim: int, shape: tuple[int, int], wide: bool
) -> None:
    """As a mask, as long as another key is left; with none left all are alike, and no result is NaN."""
    bias = torch.zeros(1, 1, *shape, dtype=torch.float32 if wide else dtype, device=device)
    bias[..., 100:] = torch.finfo(bias.dtype).min
    padded = shape[0] > 1
    if padded:
        bias[..., :20, :] = torch.finfo(bias.dtype).min  # rows that have nothing but padding
    q, k, v = (random(1, n, 1, head_dim, dtype=dtype, device=device) for n in (ROWS, KEYS, KEYS))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flash_ext.attention(q, k, v, bias=bias)
    masked = flash_ext.attention(q, k, v, mask=bias == 0)
    rest = slice(20 if padded else 0, None)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    torch.testing.assert_close(out[:, rest], masked[:, rest], atol=tolerance, rtol=tolerance)
    if padded and torch.finfo(bias.dtype).max > 1e30:  # else scores are not lost beside it
        mean = v.double().mean(1, keepdim=True).to(dtype)
        torch.testing.assert_close(out[:, :20], mean.expand_as(out[:, :20]), atol=tolerance, rtol=tolerance)
    gradients = torch.autograd.grad(out, leaves, random(*out.shape, dtype=dtype, device=device))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(("rows", "keys"), [(100, 200), (200, 300)])
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_random_numbers_with_huge_scores(
    device: str, dtype: torch.dtype, head_dim: int, causal: bool, packed: bool, rows: int, keys: int
) -> None:
    """Nearly every row is that of its largest score, here of 1e8 to 1e12; forward and backward."""
    heads, groups = 4, 2
    size = 1e4 if dtype == torch.float16 else 1e6
    q = (random(1, rows, heads, head_dim, device=device) * size).to(dtype)
    k = (random(1, keys, groups, head_dim, device=device) * size).to(dtype)
    v = short_numbers(1, keys, groups, head_dim, dtype=dtype, device=device)
    products = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(heads // groups, 2))
    if causal:
        hidden = torch.ones(rows, keys, device=device, dtype=torch.bool).triu(keys - rows + 1)
        products.masked_fill_(hidden, -torch.inf)
    highest = products.topk(2)
    clear = highest.values[..., 0] > highest.values[..., 1] + 1e-4 * highest.values[..., 1].abs()
    assert clear.float().mean() > 0.9
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if packed:
        lengths = {"q": rows, "k": keys}
        bounds = {f"cu_seqlens_{s}": torch.tensor([0, n], dtype=torch.int32, device=device) for s, n in lengths.items()}
        out = flash_ext.attention(q[0], k[0], v[0], causal=causal, **bounds)[None]
    else:
        out = flash_ext.attention(q, k, v, causal=causal)
    chosen = highest.indices[..., 0]  # (1, heads, rows)
    values = v.detach().repeat_interleave(heads // groups, 2).transpose(1, 2)
    at = chosen[..., None].expand(-1, -1, -1, head_dim)
    assert torch.equal(out.transpose(1, 2)[clear], values.gather(2, at)[clear])
    if device == "cuda" and dtype == torch.float32 and head_dim > 128:
        return  # tolerance_of_sums(): here the last place is more than all

    grad_out = short_numbers(*out.shape, dtype=dtype, device=device) * clear.transpose(1, 2)[..., None]
    gradients = torch.autograd.grad(out, leaves, grad_out)
    assert all(g.isfinite().all() for g in gradients)
    addends = grad_out.double().transpose(1, 2)
    zeros = torch.zeros(1, heads, keys, head_dim, dtype=torch.float64, device=device)
    of_heads = [zeros.scatter_add(2, at, x) for x in (addends, addends.abs())]
    expected, sizes = (x.unflatten(1, (groups, -1)).sum(2).transpose(1, 2) for x in of_heads)
    found = gradients[2].double()
    assert ((found - expected).abs() <= 2 * torch.finfo(dtype).eps * sizes + 1e-6).all()
