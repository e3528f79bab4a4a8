"""The dense backward: gradients against the oracle, each subset of them, whatever the strides of what comes in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import flash_ext
from tests.contract.test_forward import OPTIONS
from tests.oracle import (
    FLOATS,
    Call,
    assert_matches_oracle,
    collect_gradients,
    make_call,
    make_varlen_call,
    random,
    run_library,
)

pytestmark = pytest.mark.usefixtures("kernel_family")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_match_the_oracle(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert_matches_oracle(make_call(dtype=dtype, device=device, **options))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 239), (239, 1), (113, 203), (203, 113), (129, 257)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(device: str, dtype: torch.dtype, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    assert_matches_oracle(
        make_call(1, seqlen_q, seqlen_k, heads_q=2, heads_kv=1, causal=causal, dtype=dtype, device=device)
    )


def test_lengths_beyond_one_tile(device: str, dtype: torch.dtype) -> None:
    assert_matches_oracle(make_call(1, 1023, 1024, heads_q=1, heads_kv=1, causal=True, dtype=dtype, device=device))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 256), (256, 8), (64, 72), (192, 128), (24, 40), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_head_dims(device: str, head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    assert_matches_oracle(make_call(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, device=device))


MANY_TILES_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
KERNEL_HEAD_DIMS = [64, 96, 128, 136, 192, 200, 256]


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (70, 20)}], ids=str)
@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
@pytest.mark.parametrize("dtype", MANY_TILES_DTYPES, ids=str)
def test_many_tiles(device: str, dtype: torch.dtype, head_dim: int, mask: dict[str, Any]) -> None:
    """The last tile of keys has one key, and its neighbour none."""
    assert_matches_oracle(make_call(1, 193, 257, 2, 1, head_dim, dtype=dtype, device=device, **mask))


@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
@pytest.mark.parametrize("dtype", MANY_TILES_DTYPES, ids=str)
def test_many_tiles_of_packed_sequences(device: str, dtype: torch.dtype, head_dim: int) -> None:
    lengths_q, lengths_k = [130, 0, 1, 77, 190], [200, 60, 0, 260, 190]
    call = make_varlen_call(
        lengths_q, lengths_k, device, spare=9, heads_q=2, heads_kv=1, head_dim=head_dim, dtype=dtype, causal=True
    )
    call.k[-9:] = call.v[-9:] = torch.nan
    assert_matches_oracle(call)


@pytest.mark.parametrize("hidden", [slice(100, None), slice(0, 150)], ids=str)
@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
@pytest.mark.parametrize("dtype", MANY_TILES_DTYPES, ids=str)
def test_hidden_keys_in_many_tiles(device: str, dtype: torch.dtype, head_dim: int, hidden: slice) -> None:
    """They reach no gradient, neither through their own tile nor through one that shares its work with it."""
    window = {"window_size": (-1, 0), "top_left": True} if hidden.start else {"window_size": (40, -1)}
    call = make_call(1, 100, 290, 2, 1, head_dim, dtype=dtype, device=device, **window)
    call.k[:, hidden] = call.v[:, hidden] = torch.nan
    result = assert_matches_oracle(call)
    assert (result["dk"][:, hidden] == 0).all() and (result["dv"][:, hidden] == 0).all()


SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0, "causal": True},
    "negative scale": {"softmax_scale": -0.3, "window_size": (70, 20)},
    "no scale": {"softmax_scale": 0.0},
    "scale of 0 in float": {"softmax_scale": 1e-300, "window_size": (70, 20)},
    "alibi": {"causal": True},
}


@pytest.mark.parametrize("options", SCORES.values(), ids=SCORES.keys())
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(64, 64), (128, 128), (40, 120), (128, 24), (192, 128), (72, 256)]
)
def test_scores_of_many_tiles(
    device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, options: dict[str, Any]
) -> None:
    if options == SCORES["alibi"]:
        options = {**options, "alibi_slopes": torch.rand(2, device=device)}
    call = make_call(1, 193, 257, 2, 1, head_dim, head_dim_v=head_dim_v, dtype=dtype, device=device, **options)
    assert_matches_oracle(call)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_more_tiles_of_keys_than_a_gpu_works_on(
    device: str, dtype: torch.dtype, head_dim: int, mask: dict[str, Any]
) -> None:
    """Blocks side by side add to the same dQ, which must be zero before."""
    batch, heads = (1, 2) if device == "cpu" else (2, 32)
    assert_matches_oracle(make_call(batch, 700, 520, heads, heads // 2, head_dim, dtype=dtype, device=device, **mask))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_rows_that_nothing_weighs(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """A gradient of the largest number, of rows that see no key: 0 times it is 0, in a tile with others, too."""
    call = make_call(1, 200, 70, 2, 1, head_dim, dtype=dtype, device=device, causal=True).with_random_gradients()
    assert call.grad_out is not None
    call.grad_out[:, :130] = torch.finfo(dtype).max
    result = assert_matches_oracle(call)
    assert (result["dq"][:, :130] == 0).all()


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
def test_dk_and_dv_are_the_same_each_time(device: str, head_dim: int, mask: dict[str, Any]) -> None:
    """In float32 each key's are summed up in one order, `deterministic` or not: what blocks tell each other is there
    when it is read."""
    batch, seqlen, runs = (1, 130, 2) if device == "cpu" else (4, 700, 30)
    call = make_call(batch, seqlen, seqlen, 8, 4, head_dim, device=device, dtype=torch.float32, **mask)
    call = call.with_random_gradients()
    first = run_library(call, ("k", "v"))
    for _ in range(runs):
        again = run_library(call, ("k", "v"))
        assert torch.equal(again["dk"], first["dk"]) and torch.equal(again["dv"], first["dv"])


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (4, 4), (6, 2), (7, 1)])
def test_grouped_heads_sum_into_their_kv_head(device: str, dtype: torch.dtype, heads_q: int, heads_kv: int) -> None:
    assert_matches_oracle(make_call(heads_q=heads_q, heads_kv=heads_kv, causal=True, dtype=dtype, device=device))


SUBSETS = [
    subset for n in range(1, 6) for subset in itertools.combinations(("q", "k", "v", "bias", "sink"), n)
]  # every set of inputs that may require a gradient


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_every_subset_of_gradients(device: str, dtype: torch.dtype, subset: tuple[str, ...]) -> None:
    call = make_call(
        bias=random(1, 4, 33, 47, device=device), sink=random(4, device=device), dtype=dtype, device=device
    )
    assert_matches_oracle(call, gradients_of=subset)


def backward_op(call: Call, **wanted: bool) -> tuple[torch.Tensor, ...]:
    """torch.ops.flash_ext.attention_backward of a dense call without options."""
    out, lse = flash_ext.attention(call.q, call.k, call.v, return_lse=True)
    scalars = dict(
        max_seqlen_q=call.q.shape[1], max_seqlen_k=call.k.shape[1], softmax_scale=0.2, softcap=0.0, dropout_p=0.0,
        window_left=-1, window_right=-1, top_left=False, allow_tf32=False, deterministic=False,
    )  # fmt: skip
    op = torch.ops.flash_ext.attention_backward
    names = (argument.name for argument in op.default._schema.arguments)
    needs = {f"need_{name}": wanted.get(name, False) for name in ("dq", "dk", "dv", "dbias", "dsink")}
    given = dict(q=call.q, k=call.k, v=call.v, out=out, lse=lse, grad_out=call.grad_out, grad_lse=None)
    return op(**{**dict.fromkeys(names), **given, **scalars, **needs})


@pytest.mark.parametrize("wanted", ["dq", "dk", "dv"])
def test_a_gradient_that_is_not_wanted_is_empty(device: str, dtype: torch.dtype, wanted: str) -> None:
    gradients = backward_op(make_call(dtype=dtype, device=device).with_random_gradients(), **{wanted: True})
    for name, gradient in zip(("dq", "dk", "dv", "dbias", "dsink"), gradients, strict=True):
        assert (gradient.numel() > 0) == (name == wanted), name


@pytest.mark.parametrize("which", ["transposed", "expanded", "sliced", "summed", "non_contiguous_last"])
def test_layout_of_grad_out(device: str, dtype: torch.dtype, which: str) -> None:
    call = make_call(dtype=dtype, device=device).with_random_gradients()
    grad = call.grad_out
    call.grad_out = {
        "transposed": grad.transpose(1, 2).contiguous().transpose(1, 2),
        "expanded": grad[:1, :1].expand_as(grad),
        "sliced": torch.cat([grad, grad + 1], dim=-1)[..., :32],
        "summed": torch.ones((), device=device).expand_as(grad),
        "non_contiguous_last": grad.transpose(1, 3).contiguous().transpose(1, 3),
    }[which]
    assert_matches_oracle(call)


def test_layout_of_grad_lse(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device).with_random_gradients()
    lse = call.grad_lse
    wide = torch.cat([lse, torch.full_like(lse, torch.nan)], dim=2)[..., : lse.shape[2]]
    heads_first = lse.transpose(0, 1).contiguous().transpose(0, 1)
    for grad_lse in (
        lse.transpose(1, 2).contiguous().transpose(1, 2), lse[:1].expand(2, -1, -1), wide, heads_first
    ):  # fmt: skip
        call.grad_lse = grad_lse
        assert_matches_oracle(call)


@pytest.mark.parametrize("head_dim", [32, 168, 256])
def test_gradients_of_strided_inputs(device: str, dtype: torch.dtype, head_dim: int) -> None:
    call = make_call(head_dim=head_dim, dtype=dtype, device=device)
    call.q = call.q.transpose(1, 2).contiguous().transpose(1, 2)
    packed = torch.stack([call.k, call.v], dim=3)
    call.k, call.v = packed[:, :, :, 0], packed[:, :, :, 1]
    assert_matches_oracle(call)


def test_gradient_through_a_sum(device: str, dtype: torch.dtype) -> None:
    """``out.sum().backward()`` hands in a gradient of stride 0."""
    call = make_call(dtype=dtype, device=device)
    q = call.q.clone().requires_grad_()
    flash_ext.attention(q, call.k, call.v).sum().backward()
    call.grad_out = torch.ones(1, device=device).expand(*call.q.shape)
    expected = run_library(call, ("q",))["dq"]
    torch.testing.assert_close(q.grad, expected)


def test_inputs_shared_by_q_k_and_v(device: str) -> None:
    x = random(2, 21, 2, 16, device=device).requires_grad_()
    call = Call(x, x, x).with_random_gradients()
    out, lse = flash_ext.attention(x, x, x, return_lse=True)
    total = collect_gradients(call, out, lse, {"x": x})["dx"]
    parts = run_library(call, ("q", "k", "v"))
    torch.testing.assert_close(total, parts["dq"] + parts["dk"] + parts["dv"])


def test_no_graph_without_requires_grad(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    assert not flash_ext.attention(call.q, call.k, call.v).requires_grad
    with torch.no_grad():
        assert not flash_ext.attention(call.q.requires_grad_(), call.k, call.v).requires_grad


def test_backward_twice_through_one_forward(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device).with_random_gradients()
    q = call.q.clone().requires_grad_()
    out = flash_ext.attention(q, call.k, call.v)
    first = torch.autograd.grad(out, q, call.grad_out, retain_graph=True)
    second = torch.autograd.grad(out, q, call.grad_out)
    torch.testing.assert_close(first, second)
