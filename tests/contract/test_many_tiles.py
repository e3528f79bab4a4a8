"""More tiles of queries than a GPU works on at a time, and rows whose first or only key lies at the edge of a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_ext
from tests.oracle import (
    FLOATS,
    Call,
    assert_alike,
    assert_hoppers_own_forward,
    assert_kernel_on_hopper,
    assert_matches_oracle,
    explained_on_hopper,
    int32,
    make_call,
    make_varlen_call,
    random,
    run_library,
)

HEAD_DIMS = [64, 96, 128, 192, 256]  # of the kernels for Hopper
# Of q and k, and of v.
BETWEEN = [
    (72, 72),
    (88, 40),
    (40, 88),
    (96, 104),
    (136, 136),
    (168, 192),
    (192, 128),
    (136, 72),
    (120, 168),
    (200, 96),
]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "softcap": {"softcap": 5.0, "causal": True},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("head_dim", "keys"), [*((head_dim, 500) for head_dim in HEAD_DIMS), (128, 400), (256, 400)])
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_many_heads(device: str, dtype: torch.dtype, head_dim: int, keys: int, mask: dict[str, Any]) -> None:
    """Also in the other shape of a kernel that has two, which fits 400 keys better."""
    batch, heads = (1, 4) if device == "cpu" else (3, 64)
    call = make_call(batch, 260, keys, heads, heads // 2, head_dim, dtype=dtype, device=device, **mask)
    assert_hoppers_own_forward(call)
    first = assert_matches_oracle(call, gradients_of=())
    again = run_library(call)
    assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("queries", [193, 256, 448])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=str)
def test_a_rest_of_few_queries(
    device: str, dtype: torch.dtype, head_dim: int, queries: int, mask: dict[str, Any]
) -> None:
    """Tiles of 192 queries leave up to 64, which get the rows of another warpgroup."""
    batch, heads = (1, 2) if device == "cpu" else (3, 64)
    call = make_call(batch, queries, 200, heads, heads // 2, head_dim, dtype=dtype, device=device, **mask)
    assert_hoppers_own_forward(call)
    first = assert_matches_oracle(call, gradients_of=())
    again = run_library(call)
    assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("head_dim", "head_dim_v"), BETWEEN)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_head_dims_between_those_of_kernels(
    device: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, mask: dict[str, Any]
) -> None:
    call = make_call(2, 260, 800, 4, 2, head_dim, head_dim_v, dtype=dtype, device=device, **mask)
    assert_hoppers_own_forward(call)
    for name in ("q", "k", "v"):  # what lies beside the columns is nobody's
        tensor = getattr(call, name)
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 64), torch.nan)
        wide[..., : tensor.shape[-1]] = tensor
        setattr(call, name, wide[..., : tensor.shape[-1]])
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("head_dim", [64, 96, 192, 256])
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_many_packed_sequences(device: str, dtype: torch.dtype, head_dim: int) -> None:
    lengths_q, lengths_k = [300, 0, 1, 77, 190], [200, 60, 0, 400, 190]
    heads = 2 if device == "cpu" else 48
    call = make_varlen_call(
        lengths_q, lengths_k, device, spare=9, heads_q=heads, heads_kv=2, head_dim=head_dim, dtype=dtype, causal=True
    )
    call.k[-9:] = call.v[-9:] = torch.nan
    assert_matches_oracle(call, gradients_of=())
    call.options |= {"seqused_k": int32([130, 60, 0, 399, 1], device)}
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(271, 271), (191, 272), (128, 209), (200, 121), (65, 192), (128, 191), (200, 255)]
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_first_keys_at_the_edge_of_a_tile(
    device: str, head_dim: int, seqlen_q: int, seqlen_k: int, dtype: torch.dtype
) -> None:
    """Under a causal mask some row of a tile sees nothing of the last tile of keys, and all of the one before."""
    assert_matches_oracle(make_call(1, seqlen_q, seqlen_k, 2, 1, head_dim, dtype=dtype, device=device, causal=True))


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_of_nan_leave_the_others_alone(device: str, head_dim: int, dtype: torch.dtype) -> None:
    call = make_call(1, 150, 800, 2, 2, head_dim, dtype=dtype, device=device)
    assert_hoppers_own_forward(call)
    before = run_library(call)
    call.q[:, 40] = torch.nan
    after = run_library(call)
    others = [i for i in range(150) if i != 40]
    assert after["out"][:, 40].isnan().all()
    assert_alike(after["out"][:, others], before["out"][:, others])
    assert_alike(after["lse"][:, :, others], before["lse"][:, :, others])


GRADIENT_MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "keys_of_nobody": {"window_size": (-1, 20), "top_left": True},
}


def more_tiles_of_keys_than_sms(device: str, head_dim: int, dtype: torch.dtype, **options: Any) -> Call:
    """Unsplit tiles, of which Hopper's backward has more than a section and two waves: CTAs go from one tile to the
    next, or zero sums of dQ for later CTAs."""
    batch, seqlen_k = (4, 400) if head_dim > 128 else (3, 520)
    batch, heads = (1, 2) if device == "cpu" else (batch, 64)
    call = make_call(batch, 300, seqlen_k, heads, heads // 2, head_dim, dtype=dtype, device=device)
    call = call.with_options(**options).with_random_gradients()
    if explained := explained_on_hopper(call, "backward"):
        schedule = explained.plan.schedule
        assert schedule.head_splits == schedule.query_splits == 1
    return call


@pytest.mark.parametrize("mask", GRADIENT_MASKS.values(), ids=GRADIENT_MASKS.keys())
@pytest.mark.parametrize("head_dim", [40, *HEAD_DIMS])
@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=str)
def test_gradients_of_more_tiles_of_keys_than_sms(
    device: str, dtype: torch.dtype, head_dim: int, mask: dict[str, Any]
) -> None:
    """With ``keys_of_nobody`` no query sees the keys of the last tiles."""
    call = more_tiles_of_keys_than_sms(device, head_dim, dtype, **mask)
    own = ("sm90/backward_persistent", "sm90/backward", "sm90/backward_wide")
    assert_kernel_on_hopper(call, own[(head_dim > 64) + (head_dim > 128)], "backward")
    first, again = assert_matches_oracle(call), run_library(call, ("k", "v"))
    for name in ("dk", "dv"):
        assert torch.equal(first[name], again[name])


@pytest.mark.parametrize(
    "option", ["softcap", "alibi_slopes", "bias", "mask", "key_mask", "no_keys_of_last_group", "no_keys_of_last_entry"]
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_option_gradients_of_more_tiles_of_keys_than_sms(device: str, head_dim: int, option: str) -> None:
    call = more_tiles_of_keys_than_sms(device, head_dim, torch.bfloat16)
    batch, seqlen_q, heads, _ = call.q.shape
    keys, queries = (torch.arange(tensor.shape[1], device=device) for tensor in (call.k, call.q))
    entries, query_heads = (torch.arange(count, device=device) for count in (batch, heads))
    options: dict[str, Any] = {
        "softcap": {"softcap": 3.0},
        "alibi_slopes": {"alibi_slopes": torch.rand(heads, device=device)},
        "bias": {"bias": random(1, heads, seqlen_q, len(keys), dtype=call.dtype, device=device)},
        "mask": {"mask": (keys <= queries[:, None] // 2)[None, None]},
        "key_mask": {"mask": (keys < 140)[None, None, None]},
        "no_keys_of_last_group": {"mask": (query_heads < heads - 2)[None, :, None, None] & (keys >= 0)},
        "no_keys_of_last_entry": {"mask": (entries < batch - 1)[:, None, None, None] & (keys >= 0)},
    }[option]
    assert_matches_oracle(call.with_options(**options), ("q", "k", "v"))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (1500, 130)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_a_number_of_heads_that_is_prime(device: str, head_dim: int, seqlen_q: int, seqlen_k: int) -> None:
    """Heads work side by side in sections of equal size, but for the last one, which has fewer."""
    heads = 3 if device == "cpu" else 311
    call = make_call(1, seqlen_q, seqlen_k, heads, heads, head_dim, dtype=torch.bfloat16, device=device, causal=True)
    assert_matches_oracle(call, ("q", "k", "v"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_fewer_rows_than_tiles_of_keys(device: str, head_dim: int) -> None:
    """Not every CTA finds a row of dQ to zero for later ones."""
    call = make_call(1, 5, 8400, 7, 7, head_dim, dtype=torch.bfloat16, device=device)
    assert_matches_oracle(call, ("q", "k", "v"))


@pytest.mark.parametrize(("heads", "seqlen"), [(6, 130), (8, 2048)])
@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_dq_is_complete_when_it_is_stored(device: str, head_dim: int, heads: int, seqlen: int) -> None:
    """Hopper's kernel that stores dQ starts on SMs that have no tile of keys: of 132, eight heads of 2048 leave some
    idle for all of the last wave. In scratch memory, calls find the counters of those before."""
    heads, seqlen = (heads, seqlen) if device == "cuda" else (2, 130)
    call = make_call(1, seqlen, seqlen, heads, heads, head_dim, dtype=torch.bfloat16, device=device)
    call = call.with_random_gradients()
    if explained := explained_on_hopper(call, "backward"):
        assert explained.plan.schedule.head_splits == explained.plan.schedule.query_splits == 1
    want = run_library(call.with_options(deterministic=True), ("q",))["dq"]
    for _ in range(5):
        dq = run_library(call.with_options(deterministic=False), ("q",))["dq"]
        torch.testing.assert_close(dq, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=str)
def test_gradients_of_many_packed_sequences(device: str, dtype: torch.dtype) -> None:
    lengths_q, lengths_k = [300, 0, 1, 77, 190, 400], [200, 260, 0, 400, 190, 129]
    heads = 2 if device == "cpu" else 48
    call = make_varlen_call(
        lengths_q, lengths_k, device, spare=9, heads_q=heads, heads_kv=heads // 2, head_dim=64, dtype=dtype, causal=True
    )
    call.k[-9:] = call.v[-9:] = torch.nan
    assert_matches_oracle(call)
    call.options |= {"seqused_k": int32([130, 260, 0, 399, 1, 0], device)}
    assert_matches_oracle(call)


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 192, 256])
def test_a_value_of_the_future_many_tiles_on(device: str, head_dim: int, poison: float, dtype: torch.dtype) -> None:
    column = head_dim - 5
    call = make_call(1, 800, 800, 2, 2, head_dim, dtype=dtype, device=device, causal=True)
    assert_hoppers_own_forward(call)
    before = run_library(call)["out"]
    for row in (50, 210, 333):
        call.v[:, row, :, column] = poison
    after = run_library(call)["out"]
    columns = [c for c in range(head_dim) if c != column]
    assert_alike(after[..., columns], before[..., columns])
    assert_alike(after[:, :50], before[:, :50])
    assert not after[:, 50:, :, column].isfinite().any()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_a_captured_graph(device: str, dtype: torch.dtype, deterministic: bool) -> None:
    """Forward and backward, replayed on other numbers, give what they give outside of a graph: but for the order of the
    additions to dq, the same bits."""
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    call = make_call(2, 300, 300, 96, 24, 64, dtype=dtype, device=device, causal=True)
    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v)]
    grad_out = torch.randn_like(call.q)

    def step() -> tuple[torch.Tensor, ...]:
        out = flash_ext.attention(*leaves, causal=True, deterministic=deterministic)
        assert isinstance(out, torch.Tensor)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(3):
        for leaf in leaves:
            leaf.data.normal_()
        graph.replay()
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, step(), strict=True):
            if name == "dq" and not deterministic:
                torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
            else:
                assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_many_tiles_of_queries_without_keys(device: str, head_dim: int, dtype: torch.dtype) -> None:
    """Some of them between others that see keys."""
    heads, rows = (2, 700) if device == "cpu" else (64, 5000)
    call = make_call(1, rows, 100, heads, heads, head_dim, dtype=dtype, device=device)
    out, lse = flash_ext.attention(call.q, call.k, call.v, causal=True, return_lse=True)
    assert (out[:, : rows - 100] == 0).all() and (lse[..., : rows - 100] == -torch.inf).all()
    last = flash_ext.attention(call.q[:, -100:], call.k, call.v, causal=True)
    assert_alike(out[:, -100:], last)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(400, 170), (170, 400), (65, 193), (150, 1)])
@pytest.mark.parametrize("top_left", [False, True])
def test_every_row_of_dq_is_written(device: str, head_dim: int, seqlen_q: int, seqlen_k: int, top_left: bool) -> None:
    """Of tiles of queries that some, one or no tile of keys adds to. Outputs are poisoned, and not deterministic."""
    windows = [(-1, 0), (0, 0), (100, 30), (191, 1)]
    for window in windows if device == "cuda" else windows[:1]:
        call = make_call(1, seqlen_q, seqlen_k, 2, 1, head_dim, dtype=torch.bfloat16, device=device)
        call = call.with_options(window_size=window, top_left=top_left, deterministic=False)
        assert_matches_oracle(call, gradients_of=("q",))


def test_dq_of_packed_sequences_is_written(device: str) -> None:
    call = make_varlen_call([1, 130, 0, 64, 200], [70, 0, 5, 257, 129], device, dtype=torch.bfloat16, head_dim=128)
    for options in ({}, {"causal": True}, {"window_size": (20, 7)}):
        assert_matches_oracle(call.with_options(deterministic=False, **options), gradients_of=("q",))
