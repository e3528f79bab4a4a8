"""Full attention whose tiles of queries leave the tail wave of a GPU half empty: those tiles are split along the keys,
and the splits are combined. No result may show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.oracle import FLOATS, Call, assert_matches_oracle, explained_on_hopper, make_call, run_library

HEAD_DIMS = [64, 96, 128, 192, 256]  # of the kernels for Hopper
# Batch, queries, keys, heads, on 132 SMs: one tile of queries alone; a few; a wave and a few; most of a wave. So many
# keys that splitting is worth it.
FEW, SOME = (1, 50, 6000, 1), (2, 300, 4500, 3)
SIZES = {"one": FEW, "some": SOME, "little_over": (2, 100, 4500, 71), "most_of_a_wave": (3, 130, 7000, 31)}


def assert_split(call: Call) -> None:
    """On as many SMs as the sizes are for."""
    explained = explained_on_hopper(call)
    if explained is not None and explained.problem.num_workers == 132:
        assert explained.plan.key_splits.tiles > 0


def on(device: str, size: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    _, queries, keys, heads = size
    return size if device != "cpu" else (1, min(queries, 70), min(keys, 300), min(heads, 2))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=str)
def test_sizes(device: str, dtype: torch.dtype, head_dim: int, size: tuple[int, int, int, int]) -> None:
    batch, queries, keys, heads = on(device, size)
    call = make_call(batch, queries, keys, heads, heads, head_dim, dtype=dtype, device=device)
    assert_split(call)
    first = assert_matches_oracle(call, gradients_of=())
    for _ in range(3):
        again = run_library(call)
        assert torch.equal(again["out"], first["out"]) and torch.equal(again["lse"], first["lse"])


OPTIONS: dict[str, Any] = {
    "sink": lambda heads, device: {"sink": torch.linspace(-2.0, 9.0, heads, device=device)},
    "scale": lambda heads, device: {"softmax_scale": 0.3},
    "window": lambda heads, device: {"window_size": (3000, 200)},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (72, 40), (128, 128), (192, 128), (256, 256)])
def test_options_and_grouped_heads(device: str, head_dim: int, head_dim_v: int, options: str) -> None:
    batch, queries, keys, _ = on(device, SOME)
    chosen = OPTIONS[options](4, device)
    call = make_call(batch, queries, keys, 4, 2, head_dim, head_dim_v, dtype=torch.bfloat16, device=device, **chosen)
    assert_split(call)
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=str)
def test_all_weight_in_one_part(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """Of each head in another one; what the other parts find vanishes beside it, or overflows on the way."""
    batch, queries, keys, heads = on(device, (2, 300, 4500, 8))
    call = make_call(batch, queries, keys, heads, heads, head_dim, dtype=dtype, device=device)
    assert_split(call)
    call.q[..., 0] = head_dim**0.5
    for head in range(heads):
        call.k[:, keys * head // heads, head, 0] = 60.0 + 40.0 * head
    assert_matches_oracle(call, gradients_of=())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_is_not_finite(device: str, head_dim: int) -> None:
    """NaN in a key of one head, Inf in values of another, in the last tile of keys too: other heads stay as they are.
    Scores of -inf in most parts."""
    batch, queries, keys, heads = on(device, SOME)
    call = make_call(batch, queries, keys, heads, heads, head_dim, dtype=torch.bfloat16, device=device)
    call.q[..., 0] = 1.0
    before = run_library(call)
    for key in (5, keys - 1):
        call.v[0, key, 0, 3] = torch.inf
    call.k[-1, keys // 2, -1] = torch.nan
    out = run_library(call)["out"]
    assert out[-1, :, -1].isnan().all()
    assert (out[0, :, 0, 3] == torch.inf).all()
    columns = [c for c in range(head_dim) if c != 3]
    torch.testing.assert_close(out[0, :, 0, columns], before["out"][0, :, 0, columns], rtol=1e-2, atol=1e-2)
    for entry in range(batch):
        for head in range(heads):
            if (entry, head) not in ((0, 0), (batch - 1, heads - 1)):
                assert torch.equal(out[entry, :, head], before["out"][entry, :, head])

    call = make_call(batch, queries, keys, heads, heads, head_dim, dtype=torch.bfloat16, device=device)
    call.q[..., 0] = 1.0
    call.k[:, 100:, :, 0] = -torch.inf
    result = run_library(call)
    shorter = make_call(batch, queries, 100, heads, heads, head_dim, dtype=torch.bfloat16, device=device)
    shorter.q, shorter.k, shorter.v = call.q, call.k[:, :100], call.v[:, :100]
    expected = run_library(shorter)
    torch.testing.assert_close(result["out"], expected["out"], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(result["lse"], expected["lse"])
