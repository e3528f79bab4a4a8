"""``add_layer_norm``: torch's addition and ``layer_norm``, in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext  # noqa: F401  registers the operators

EPS = 1e-5
OP = torch.ops.flash_ext.add_layer_norm.default
DTYPES = {"cpu": [torch.float64, torch.float32, torch.bfloat16, torch.float16]}
DTYPES["cuda"] = DTYPES["cpu"][1:]

pytestmark = pytest.mark.op("add_layer_norm")


def make(device: str, dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual, weight, bias; the mean of a row is not zero."""
    x, residual = ((2 + torch.randn(*shape, device=device)).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], device=device).to(dtype) for _ in range(2))
    return x, residual, weight, bias


def check(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    total, out = OP(x, residual, weight, bias, EPS, True)
    low_sum = x + residual
    assert torch.equal(total, low_sum)
    wide = torch.float64 if x.dtype in (torch.float32, torch.float64) else torch.float32
    parameters = [None if p is None else p.to(wide) for p in (weight, bias)]
    ref = F.layer_norm(low_sum.to(wide), x.shape[-1:], *parameters, EPS)
    low = F.layer_norm(low_sum, x.shape[-1:], weight, bias, EPS)
    error, low_error = ((result.to(wide) - ref).abs().max().item() for result in (out, low))
    rounding = {torch.float64: 64}.get(x.dtype, 4) * torch.finfo(x.dtype).eps  # float64 is its own reference
    assert error <= 2 * low_error + rounding * ref.abs().max().item()
    assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, x.dtype, True)
    without, same = OP(x, residual, weight, bias, EPS, False)
    assert without.numel() == 0 and torch.equal(same, out)


@pytest.mark.parametrize("width", [1, 7, 8, 64, 200, 256, 768, 1024, 1032, 4096, 5120, 16384, 20000])
def test_widths(width: int, device: str) -> None:
    """A warp, several, a CTA's worth, too wide for one, and not of whole vectors."""
    for dtype in DTYPES[device]:
        check(*make(device, dtype, 5, width))


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (2, 3, 64), (3, 1, 2, 64), (1001, 64), (64,)])
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    if 0 in shape:
        x, residual, weight, bias = make(device, torch.float32, *shape)
        assert [t.shape for t in OP(x, residual, weight, bias, EPS, True)] == [shape, shape]
    else:
        check(*make(device, torch.float32, *shape))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_without_parameters(weighted: bool, biased: bool, device: str) -> None:
    x, residual, weight, bias = make(device, torch.float32, 6, 96)
    check(x, residual, weight if weighted else None, bias if biased else None)


def test_strides_and_odd_addresses(device: str) -> None:
    for dtype in DTYPES[device]:
        x, residual, weight, bias = make(device, dtype, 6, 5, 128)
        check(x.transpose(0, 1), residual.transpose(0, 1), weight, bias)
        check(x[..., 1:], residual[..., 1:], weight[1:], bias[1:])
        odd = torch.randn(6 * 128 + 1, device=device).to(dtype)[1:].view(6, 128)
        check(odd, residual[:, 0], weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_is_of_the_rounded_sum(dtype: torch.dtype, device: str) -> None:
    """What rounds away in the sum is gone: all numbers of a row are equal then."""
    large = 0.5 / torch.finfo(dtype).eps
    x, residual, weight, bias = make(device, dtype, 6, 96)
    x, residual = torch.full_like(x, large), torch.rand_like(residual) * 0.2
    assert torch.equal(x + residual, x)
    assert torch.equal(OP(x, residual, weight, bias, EPS, False)[1], bias.expand_as(x))


def test_large_mean(device: str) -> None:
    """The variance is of distances to the mean, not a difference of squares."""
    x, residual, weight, bias = make(device, torch.float32, 4, 512)
    check(x + 3e3, residual, weight, bias)


def test_not_a_number_stays_in_its_row(device: str) -> None:
    x, residual, weight, bias = make(device, torch.float32, 4, 64)
    x[1, 3] = torch.nan
    out = OP(x, residual, weight, bias, EPS, False)[1]
    assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(4, 64, dtype=torch.int32)), "x must be"),
        (dict(residual=torch.zeros(4, 63)), "residual must"),
        (dict(residual=torch.zeros(4, 64, dtype=torch.float16)), "residual must"),
        (dict(weight=torch.zeros(63)), "weight must"),
        (dict(bias=torch.zeros(64, dtype=torch.float64)), "bias must"),
        (dict(x=torch.zeros(4, 0), residual=torch.zeros(4, 0)), "width"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    x, residual, weight, bias = make("cpu", torch.float32, 4, 64)
    with pytest.raises(RuntimeError, match=message):
        OP(**(dict(x=x, residual=residual, weight=weight, bias=bias, eps=EPS, need_sum=True) | change))


def test_has_no_derivative(device: str) -> None:
    x, residual, weight, bias = make(device, torch.float32, 4, 64)
    with pytest.raises(RuntimeError, match="no derivative"):
        OP(x.requires_grad_(), residual, weight, bias, EPS, True)[1].sum().backward()
