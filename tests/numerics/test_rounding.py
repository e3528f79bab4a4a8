"""Numbers of 16 bits on a CPU: they are read exactly and written by rounding to nearest, ties to even.

Calls are chosen whose arithmetic is exact, so that nothing but the conversion is left to look at.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import HALF

DTYPES = pytest.mark.parametrize("dtype", HALF, ids=str)


def every_number(dtype: torch.dtype) -> Tensor:
    """All but NaN."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    return numbers[~numbers.isnan()]


def halfway_and_near(dtype: torch.dtype) -> Tensor:
    """float32 numbers: those halfway between two neighbours of the dtype, their neighbours, and any; some of NaN."""
    numbers = every_number(dtype)
    numbers = numbers[numbers.isfinite()].float().sort().values
    halfway = (numbers[1:] / 2 + numbers[:-1] / 2)[::7]
    up, down = (torch.nextafter(halfway, torch.tensor(limit)) for limit in (torch.inf, -torch.inf))
    largest = torch.finfo(dtype).max
    edges = torch.tensor([largest, largest * (1 + torch.finfo(dtype).eps / 4), torch.nan, 0.0, -0.0])
    edges = torch.cat([edges, torch.nextafter(edges[1:2], torch.tensor(torch.inf))])
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # all bits of one set
    return torch.cat([numbers[::5], halfway, up, down, torch.randn(1000) * 3, torch.randn(1000) * 1e-6, edges, nans])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """But for those of a NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and bool(same.all())


@DTYPES
@pytest.mark.parametrize("strided", [False, True])
def test_bias_is_read_exactly(dtype: torch.dtype, strided: bool) -> None:
    """lse of a row that sees one key, whose product is 0, is the bias."""
    numbers = every_number(dtype)
    rows, keys = len(numbers) // 64, 64
    bias = numbers[: rows * keys].view(1, 1, rows, keys)
    for key in (0, 1, 17, 63):
        shown = torch.arange(keys) == key
        given = bias.transpose(2, 3).contiguous().transpose(2, 3) if strided else bias
        q, k = torch.zeros(1, rows, 1, 8), torch.zeros(1, keys, 1, 8)
        _, lse = flash_ext.attention(q, k, k, bias=given, mask=shown[None, None, None], return_lse=True)
        expected = bias[0, 0, :, key].float()
        assert torch.equal(lse[0, 0], expected)


@DTYPES
def test_values_are_read_and_written_exactly(dtype: torch.dtype) -> None:
    """out of a row that sees one key is its value."""
    numbers = every_number(dtype)
    v = numbers[: len(numbers) // 40 * 40].view(1, -1, 1, 40)
    q, k = (torch.zeros(1, v.shape[1], 1, 8, dtype=dtype) for _ in "qk")
    out = flash_ext.attention(q, k, v, window_size=(0, 0))
    if dtype == torch.bfloat16:  # a CPU's matrix units take subnormal numbers for 0
        subnormal = (v.abs() < torch.finfo(dtype).tiny) & (out == 0)
        out = torch.where(subnormal, v, out)
    assert torch.equal(out, v)


@DTYPES
def test_out_is_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """out of two keys with one score is the mean of their values, half of the time halfway between two numbers."""
    numbers = every_number(dtype)
    first = numbers[numbers.isfinite() & (numbers.abs().float() < torch.finfo(dtype).max / 4)]
    first = first[: len(first) // 40 * 40].view(1, -1, 1, 40)
    second = (first.float() * 1.01).to(dtype)
    v = torch.stack([first, second], dim=2).flatten(1, 2)
    sequences = first.shape[1]
    cu_q, cu_k = (torch.arange(sequences + 1, dtype=torch.int32) * n for n in (1, 2))
    q, k = (torch.zeros(n * sequences, 1, 8, dtype=dtype) for n in (1, 2))
    out = flash_ext.attention(q, k, v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=1, max_seqlen_k=2)
    expected = ((first[0].float() + second[0].float()) / 2).to(dtype)
    assert same_bits(out, expected)


@DTYPES
def test_gradient_of_bias_is_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """In a row that sees one key it is the gradient of lse, whatever that is."""
    gradient = halfway_and_near(dtype)
    rows = len(gradient)
    q, k = torch.zeros(1, rows, 1, 8), torch.zeros(1, 1, 1, 8)
    bias = torch.zeros(1, 1, rows, 1, dtype=dtype, requires_grad=True)
    _, lse = flash_ext.attention(q, k, k, bias=bias, return_lse=True)
    (found,) = torch.autograd.grad(lse, bias, gradient.view(1, 1, rows))
    assert same_bits(found.flatten(), gradient.to(dtype))
