"""Additive bias: every dtype, every broadcast pattern, and its gradient, summed over what was broadcast."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests.oracle import (
    FLOATS,
    assert_matches_oracle,
    int32,
    make_call,
    make_varlen_call,
    random,
    run_library,
)

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 33, 47
BROADCASTS = [
    tuple(n if keep else 1 for n, keep in zip((BATCH, HEADS, SEQLEN_Q, SEQLEN_K), kept, strict=True))
    for kept in itertools.product([True, False], repeat=4)
]


@pytest.mark.parametrize("shape", BROADCASTS, ids=str)
def test_every_broadcast_pattern(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    call = make_call(dtype=dtype, device=device, bias=random(*shape, dtype=dtype, device=device))
    assert_matches_oracle(call)


@pytest.mark.parametrize("bias_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtype_of_bias_is_its_own(device: str, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    bias = random(1, HEADS, SEQLEN_Q, SEQLEN_K, dtype=bias_dtype, device=device)
    assert_matches_oracle(make_call(dtype=dtype, device=device, causal=True, bias=bias))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bias_dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_rows_that_start_at_multiples_of_16_bytes(
    device: str, dtype: torch.dtype, bias_dtype: torch.dtype, head_dim: int
) -> None:
    """Such a bias may be copied by whole tiles."""
    bias = random(1, 2, 70, 192, dtype=bias_dtype, device=device)
    call = make_call(1, 70, 192, 2, 1, head_dim, dtype=dtype, device=device, bias=bias, causal=True)
    assert_matches_oracle(call)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [203, 1])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_that_is_the_same_for_all_keys(device: str, bias_dtype: torch.dtype, rows: int, head_dim: int) -> None:
    """More keys than a tile has, and fewer. Weights do not change, lse does."""
    for seqlen_k in (317, 20):
        bias = random(2, 2, rows, 1, dtype=bias_dtype, device=device).expand(-1, -1, -1, 1 if rows > 1 else seqlen_k)
        options = {"bias": bias, "window_size": (150, 40)}
        call = make_call(2, 203, seqlen_k, 2, 1, head_dim, dtype=torch.bfloat16, device=device, **options)
        assert_matches_oracle(call)


def test_gradient_of_bias_alone(device: str, dtype: torch.dtype) -> None:
    bias = random(1, HEADS, SEQLEN_Q, SEQLEN_K, device=device)
    assert_matches_oracle(make_call(dtype=dtype, device=device, bias=bias), gradients_of=("bias",))


@pytest.mark.parametrize("which", ["transposed", "sliced", "expanded", "odd_start"])
def test_strided_bias(device: str, dtype: torch.dtype, which: str) -> None:
    full = random(BATCH, HEADS, SEQLEN_Q, SEQLEN_K, device=device)
    wide = random(BATCH, HEADS + 1, SEQLEN_Q, SEQLEN_K + 3, device=device)
    bias = {
        "transposed": full.transpose(2, 3).contiguous().transpose(2, 3),
        "sliced": wide[:, 1:, :, 2:-1],
        "expanded": full[:1, :, :1].expand(BATCH, -1, SEQLEN_Q, -1),
        "odd_start": wide.flatten()[1 : 1 + full.numel()].view(full.shape),
    }[which]
    assert_matches_oracle(make_call(dtype=dtype, device=device, bias=bias))


MEMORIES = {
    "heads innermost": lambda full: full.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),  # as T5 makes its bias
    "queries innermost": lambda full: full.mT.contiguous().mT,
    "odd rows": lambda full: full[..., 3:],
    "one for the batch": lambda full: full.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)[:1].expand_as(full),
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_bias_that_lies_otherwise_is_the_same(
    device: str, bias_dtype: torch.dtype, memory: Callable[[Tensor], Tensor], head_dim: int
) -> None:
    """Several tiles each way, in kernels that copy tiles of a bias: by the same plan, with the same bits."""
    bias = memory(random(2, 2, 203, 328, dtype=bias_dtype, device=device))
    call = make_call(2, 203, bias.shape[3], 2, 1, head_dim, dtype=torch.bfloat16, device=device, bias=bias)
    call = call.with_random_gradients()
    found = assert_matches_oracle(call)
    plain = call.with_options(bias=bias.contiguous())
    expected = run_library(plain, tuple(call.inputs()))
    assert all(torch.equal(found[name], expected[name]) for name in ("out", "lse", "dbias"))
    if bias.shape[3] % 8 == 0:  # otherwise the contiguous one is copied as well
        plans = [flash_ext.explain(c.q, c.k, c.v, operation="backward", **c.options).plan for c in (call, plain)]
        assert plans[0].variant == plans[1].variant and plans[0].bias_kernel == plans[1].bias_kernel


def test_bias_whose_rows_share_memory(device: str) -> None:
    """A Toeplitz matrix of a row a head, as relative positions give: it is not made larger."""
    relative = random(1, 2, 1, 203 + 327, dtype=torch.bfloat16, device=device)
    bias = relative.as_strided((1, 2, 203, 328), (2 * 530, 530, 1, 1))
    call = make_call(2, 203, 328, 2, 1, 64, dtype=torch.bfloat16, device=device, bias=bias)
    assert_matches_oracle(call)
    assert not flash_ext.explain(call.q, call.k, call.v, **call.options).problem.bias_in_chunks


def test_bias_beyond_one_tile(device: str, dtype: torch.dtype) -> None:
    bias = random(1, 2, 203, 317, device=device)
    assert_matches_oracle(
        make_call(2, 203, 317, heads_q=2, heads_kv=1, bias=bias, causal=True, dtype=dtype, device=device)
    )


LARGE = (3, 4, 300, 264)  # several tiles each way, whole ones and others; rows of 16-bit and of float chunks
LARGE_SHAPES = [
    LARGE,
    (1, 4, 300, 264),
    (3, 1, 300, 264),
    (1, 1, 300, 264),
    (3, 1, 1, 264),
    (1, 4, 1, 264),
    (1, 1, 1, 264),
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_gradient_of_large_bias(device: str, dtype: torch.dtype, shape: tuple[int, ...], head_dim: int) -> None:
    bias = random(*shape, dtype=dtype, device=device)
    call = make_call(*(LARGE[0], *LARGE[2:]), 4, 2, head_dim, dtype=dtype, device=device, bias=bias)
    call = call.with_random_gradients()
    result = assert_matches_oracle(call, gradients_of=("bias",))
    assert torch.equal(result["dbias"], run_library(call, gradients_of=("bias",))["dbias"])


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (70, 30), "top_left": True},
        {"window_size": (0, 0)},
        {"softcap": 2.0, "causal": True},
        {"softmax_scale": -0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("bias_dtype", FLOATS[:3], ids=str)
def test_gradient_of_large_bias_with_options(
    device: str, bias_dtype: torch.dtype, broadcast: bool, options: dict[str, Any]
) -> None:
    bias = random(1, 4, 1 if broadcast else LARGE[2], LARGE[3], dtype=bias_dtype, device=device)
    slopes = torch.rand(4, device=device)
    call = make_call(
        *(LARGE[0], *LARGE[2:]),
        4,
        2,
        72,
        dtype=torch.bfloat16,
        device=device,
        bias=bias,
        alibi_slopes=slopes,
        **options,
    )
    assert_matches_oracle(call, gradients_of=("bias",))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradient_of_large_bias_that_hides(device: str, dtype: torch.dtype) -> None:
    """What -inf hides may be NaN."""
    bias = random(1, 4, *LARGE[2:], dtype=dtype, device=device)
    bias[..., 100:140] = -torch.inf
    bias[..., 5, :] = -torch.inf
    call = make_call(*(LARGE[0], *LARGE[2:]), 4, 2, 64, dtype=dtype, device=device, bias=bias).with_random_gradients()
    expected = assert_matches_oracle(call, gradients_of=("bias",))["dbias"]
    assert (expected[..., 100:140] == 0).all() and (expected[..., 5, :] == 0).all()
    call.k.detach()[:, 100:140] = torch.nan
    found = run_library(call, gradients_of=("bias",))["dbias"]  # from an out that may be rounded in another way
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


def test_gradient_of_large_bias_of_packed_sequences(device: str) -> None:
    lengths_q, lengths_k = [300, 17, 0, 140], [264, 5, 9, 260]
    bias = random(1, 4, 300, 264, dtype=torch.bfloat16, device=device)
    call = make_varlen_call(lengths_q, lengths_k, device, dtype=torch.bfloat16, causal=True, bias=bias)
    assert_matches_oracle(call, gradients_of=("bias",))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_gradient_of_large_bias_beside_what_nobody_sees(device: str, poison: float) -> None:
    """Rows of the same tiles that a window or lengths hide from all queries, and queries that are not in use."""
    bias = random(1, 4, *LARGE[2:], dtype=torch.bfloat16, device=device)
    call = make_call(
        *(LARGE[0], *LARGE[2:]),
        4,
        2,
        64,
        dtype=torch.bfloat16,
        device=device,
        bias=bias,
        window_size=(40, -1),
        top_left=True,
        seqused_q=int32([300, 131, 250], device),
        seqused_k=int32([264, 200, 129], device),
    )
    for sequence, (queries, keys) in enumerate([(300, 264), (131, 200), (250, 129)]):
        call.q[sequence, queries:] = call.k[sequence, keys:] = call.v[sequence, keys:] = poison
    assert_matches_oracle(call, gradients_of=("bias",))


def test_gradient_of_large_bias_beside_gaps_of_packed_sequences(device: str) -> None:
    """A tile of one sequence holds rows of the next."""
    lengths_q, lengths_k, used_q, used_k = [150, 70, 80], [140, 60, 64], [131, 70, 9], [130, 33, 64]
    bias = random(1, 4, 150, 144, dtype=torch.bfloat16, device=device)
    call = make_varlen_call(
        lengths_q,
        lengths_k,
        device,
        dtype=torch.bfloat16,
        bias=bias,
        seqused_q=int32(used_q, device),
        seqused_k=int32(used_k, device),
    ).with_options(max_seqlen_k=144)
    for lengths, used, tensors in ((lengths_q, used_q, (call.q,)), (lengths_k, used_k, (call.k, call.v))):
        for end, length, rows in zip(itertools.accumulate(lengths), lengths, used, strict=True):
            for tensor in tensors:
                tensor[end - length + rows : end] = torch.nan
    assert_matches_oracle(call, gradients_of=("bias",))


def test_bias_of_minus_infinity_hides(device: str, dtype: torch.dtype) -> None:
    see = torch.rand(BATCH, 1, SEQLEN_Q, SEQLEN_K, device=device) < 0.6
    see[:, :, 3] = False
    bias = torch.where(see, 0.0, -torch.inf)
    by_bias = assert_matches_oracle(make_call(dtype=dtype, device=device, bias=bias), gradients_of=("q", "k", "v"))
    assert (by_bias["out"][:, 3] == 0).all() and torch.isneginf(by_bias["lse"][:, :, 3]).all()


def test_gradient_of_bias_is_zero_where_nothing_is_visible(device: str, dtype: torch.dtype) -> None:
    bias = random(BATCH, HEADS, SEQLEN_Q, SEQLEN_K, device=device)
    call = make_call(dtype=dtype, device=device, bias=bias, causal=True, top_left=True)
    result = assert_matches_oracle(call)
    hidden = torch.ones(SEQLEN_Q, SEQLEN_K, dtype=torch.bool, device=device).triu(1)
    assert (result["dbias"][..., hidden] == 0).all()


def test_bias_comes_after_softcap(device: str, dtype: torch.dtype) -> None:
    bias = random(1, 1, 1, SEQLEN_K, device=device) * 10
    call = make_call(dtype=dtype, device=device, bias=bias, softcap=1.0)
    assert_matches_oracle(call)
    assert run_library(call)["lse"].max() > 10  # a capped bias could not lift it there


def test_an_infinite_bias_gives_an_infinite_lse(device: str, dtype: torch.dtype) -> None:
    """As torch.logsumexp does; out of that row is NaN, as torch.softmax makes it, and no other row is touched."""
    bias = torch.zeros(1, 1, 33, 47, device=device)
    bias[0, 0, 5, 11] = torch.inf
    result = run_library(make_call(dtype=dtype, device=device, bias=bias))
    infinite = torch.isposinf(result["lse"])
    assert infinite[:, :, 5].all() and infinite.sum() == infinite[:, :, 5].numel()
    assert result["out"][:, 5].isnan().all() and result["out"].isnan().sum() == result["out"][:, 5].numel()
