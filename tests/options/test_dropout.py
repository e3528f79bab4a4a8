"""Dropout draws by coordinates: the mask is the same for every tiling and device."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from tests import reference
from tests.oracle import (
    FLOATS,
    assert_alike,
    assert_matches_oracle,
    make_call,
    make_varlen_call,
    random_rng,
    run_library,
)


def library_mask(rng: torch.Tensor, p: float, *shape: int) -> torch.Tensor:
    return torch.ops.flash_ext.dropout_mask(rng, p, *shape)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_the_oracle_knows_the_published_vectors(counter: tuple, key: tuple, words: tuple) -> None:
    """Known answers of Random123 1.14 (kat_vectors, philox4x32 7)."""
    assert reference.philox4x32_7(counter, key) == words


def test_the_oracle_agrees_with_itself() -> None:
    rng, (batch, heads, seqlen_q, seqlen_k) = random_rng(), (2, 3, 37, 71)
    keep = reference.dropout_keep(rng, 0.4, batch, heads, seqlen_q, seqlen_k)
    for b, h, i, j in zip(*(torch.randint(n, (200,)).tolist() for n in keep.shape), strict=True):
        scalar = reference.dropout_keeps(*rng.tolist(), 0.4, b * heads + h, i, j)
        assert scalar == bool(keep[b, h, i, j])


@pytest.mark.op("dropout_mask")
@pytest.mark.parametrize("p", [0.0, 2**-20, 0.1, 0.5, 0.9, 1 - 2**-20, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 37, 71), (1, 2, 130, 65), (3, 1, 16, 64)], ids=str)
def test_mask_equals_the_oracle_bit_for_bit(device: str, p: float, shape: tuple[int, ...]) -> None:
    rng = random_rng(device)
    mask = library_mask(rng, p, *shape)
    assert mask.dtype == torch.bool and mask.shape == shape and mask.is_contiguous()
    assert torch.equal(mask, reference.dropout_keep(rng, p, *shape))


@pytest.mark.op("dropout_mask")
@pytest.mark.parametrize("rng", [(0, 0), (-1, -1), (2**63 - 1, 1), (-(2**63), 2**40), (5, -(2**63))], ids=str)
def test_seed_and_offset_of_any_sign(device: str, rng: tuple[int, int]) -> None:
    state = torch.tensor(rng, device=device)
    assert torch.equal(library_mask(state, 0.5, 1, 2, 20, 40), reference.dropout_keep(state, 0.5, 1, 2, 20, 40))


@pytest.mark.op("dropout_mask")
def test_seeds_and_offsets_draw_different_masks(device: str) -> None:
    states = [(1, 0), (2, 0), (1, 1), (1, 2**32), (2 + 2**32, 0)]
    masks = [library_mask(torch.tensor(s, device=device), 0.5, 1, 1, 64, 64) for s in states]
    for a in range(len(masks)):
        for b in range(a):
            assert not torch.equal(masks[a], masks[b]), (states[a], states[b])


@pytest.mark.op("dropout_mask")
@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
def test_keep_rate(device: str, p: float) -> None:
    kept = library_mask(random_rng(device), p, 2, 4, 256, 256).float()
    p = round(256 * p) / 256
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - (1 - p)) < 6 * deviation
    for others in ((0, 1, 2), (0, 1, 3)):
        each = kept.mean(dim=others) - (1 - p)
        assert each.abs().max() < 6.5 * (p * (1 - p) / (2 * 4 * 256)) ** 0.5


@pytest.mark.op("dropout_mask")
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["batch", "heads", "queries", "keys"])
def test_neighbours_are_independent(device: str, dim: int, p: float) -> None:
    """Weights that share a call of Philox, words of it, or places in words, and those of other calls: none of them
    says anything of another. The mean product of n independent numbers of variance 1 has a deviation of 1 / sqrt(n)."""
    kept = library_mask(random_rng(device), p, 4, 4, 512, 512).float()
    p = round(256 * p) / 256
    normal = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    for distance in (1, 2, 3) if dim < 2 else (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 32, 48, 63, 64, 65, 128):
        count = kept.shape[dim] - distance
        product = normal.narrow(dim, 0, count) * normal.narrow(dim, distance, count)
        assert abs(product.mean().item()) < 6 / product.numel() ** 0.5, distance


@pytest.mark.op("dropout_mask")
def test_every_pair_of_weights_of_a_group_is_independent(device: str) -> None:
    """The 1024 weights of 16 queries and 64 keys, over many groups: their covariance is the identity."""
    p, groups = 0.25, 4096
    kept = library_mask(random_rng(device), p, 1, 1, 16 * 64, 64 * 64).float()
    normal = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    of_group = normal.reshape(64, 16, 64, 64).transpose(1, 2).reshape(groups, 1024)
    covariance = of_group.T @ of_group / groups - torch.eye(1024, device=device)
    assert covariance.abs().max() < 6.5 / groups**0.5
    assert abs(covariance.square().mean().item() * groups - 1) < 0.02


@pytest.mark.parametrize(
    ("p", "rounded"), [(0.3, 77 / 256), (0.5, 0.5), (2**-18, 1 / 256), (0.002, 1 / 256), (0.9999, 255 / 256)]
)
def test_the_mean_is_exact(device: str, p: float, rounded: float) -> None:
    """One key of value 1: out is 0 or the scale, which is that of the p that is drawn and not of the one asked for."""
    q, one = torch.zeros(1, 4096, 16, 8, device=device), torch.ones(1, 1, 16, 8, device=device)
    out = flash_ext.attention(q, one, one, dropout_p=p, rng_state=random_rng(device))
    kept = out[out != 0]
    assert kept.numel() > 0
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rounded)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [2.0**-18, 1 - 2.0**-20])
def test_p_near_the_ends_drops_some_and_keeps_some(device: str, dtype: torch.dtype, p: float) -> None:
    keep = library_mask(random_rng(device), p, 1, 1, 64, 256)
    assert keep.any() and not keep.all()
    assert_matches_oracle(
        make_call(dtype=dtype, device=device, dropout_p=p, rng_state=random_rng(device)).with_random_gradients()
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.95])
def test_out_and_gradients_match_the_oracle_with_that_mask(device: str, dtype: torch.dtype, p: float) -> None:
    call = make_call(dtype=dtype, device=device, causal=True, dropout_p=p, rng_state=random_rng(device))
    assert_matches_oracle(call)


@pytest.mark.parametrize("p", [1 / 256, 0.1, 0.5, 129 / 256, 255 / 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_keeps_what_the_mask_says(device: str, dtype: torch.dtype, head_dim: int, p: float) -> None:
    """Bit for bit: equal weights, and a value of 1 in a column of its own for each of 64 keys at a time."""
    batch, heads, seqlen_q, seqlen_k, columns = 1, 2, 333, 203, 64
    rng = random_rng(device)
    keep = reference.dropout_keep(rng, p, batch, heads, seqlen_q, seqlen_k)
    q = torch.zeros(batch, seqlen_q, heads, head_dim, dtype=dtype, device=device)
    keys = torch.zeros(batch, seqlen_k, heads, head_dim, dtype=dtype, device=device)
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None]
    near = (distance - (seqlen_k - seqlen_q)).abs() <= 70
    for first in range(0, seqlen_k, columns):
        count = min(columns, seqlen_k - first)
        values = torch.zeros_like(keys)
        values[:, first : first + count, :, :count] = torch.eye(count, dtype=dtype, device=device)[:, None]
        for options, visible in (({}, torch.ones_like(near)), ({"window_size": (70, 70)}, near)):
            out = flash_ext.attention(q, keys, values, dropout_p=p, rng_state=rng, **options)
            found = out[..., :count].transpose(1, 2) != 0
            assert torch.equal(found, (keep & visible)[..., first : first + count])


def test_beyond_one_tile(device: str, dtype: torch.dtype) -> None:
    call = make_call(
        1, 203, 413, heads_q=3, heads_kv=1, dtype=dtype, device=device, dropout_p=0.3, rng_state=random_rng(device)
    )
    assert_matches_oracle(call)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_with_softcap_at_every_head_dim(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """dV takes the weights, dK and dQ take them times the derivative of the cap."""
    call = make_call(1, 70, 150, 2, 1, head_dim, dtype=dtype, device=device, softcap=2.0, dropout_p=0.3,
                     rng_state=random_rng(device))  # fmt: skip
    assert_matches_oracle(call)


def test_packed_sequences(device: str, dtype: torch.dtype) -> None:
    options = {"dropout_p": 0.4, "rng_state": random_rng(device), "causal": True}
    assert_matches_oracle(make_varlen_call([17, 0, 40], [23, 5, 40], device, **options, dtype=dtype))


def test_a_row_does_not_depend_on_what_else_is_computed(device: str, dtype: torch.dtype) -> None:
    """Cutting the problem, and so its tiling, changes nothing of the rows that stay."""
    call = make_call(2, 150, 90, heads_q=2, dtype=dtype, device=device, dropout_p=0.3, rng_state=random_rng(device))
    whole = run_library(call)["out"]
    part = make_call(1, 21, 90, heads_q=2, dtype=dtype, device=device)
    part.q, part.k, part.v, part.options = call.q[:1, :21], call.k[:1], call.v[:1], call.options
    torch.testing.assert_close(run_library(part)["out"], whole[:1, :21])


def test_lse_does_not_know_of_dropout(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    half, all_but_few = (
        run_library(call.with_options(dropout_p=p, rng_state=random_rng(device)))["lse"] for p in (0.5, 0.9)
    )
    assert torch.equal(half, all_but_few)
    # Without dropout another kernel may run, which sums in another order.
    torch.testing.assert_close(half, run_library(call)["lse"], rtol=1e-6, atol=1e-6)


def test_p_zero_drops_nothing(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device)
    assert torch.equal(run_library(call.with_options(dropout_p=0.0))["out"], run_library(call)["out"])


def test_p_one_drops_everything(device: str, dtype: torch.dtype) -> None:
    result = assert_matches_oracle(make_call(dtype=dtype, device=device, dropout_p=1.0, rng_state=random_rng(device)))
    assert (result["out"] == 0).all()
    assert torch.isfinite(result["lse"]).all()
    assert (result["dv"] == 0).all()


def test_without_a_state_torch_s_generator_draws_one(device: str, dtype: torch.dtype) -> None:
    call = make_call(dtype=dtype, device=device, dropout_p=0.5)
    torch.manual_seed(7)
    first, second = run_library(call)["out"], run_library(call)["out"]
    torch.manual_seed(7)
    again = run_library(call)["out"]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_backward_drops_what_forward_dropped(device: str, dtype: torch.dtype) -> None:
    """With v the identity, out is the weights and dv's sum counts exactly what was kept."""
    call = make_call(1, 32, 32, heads_q=1, heads_kv=1, dtype=dtype, device=device, dropout_p=0.5)
    v = torch.eye(32, device=device, dtype=dtype)[None, :, None].requires_grad_()
    out = flash_ext.attention(call.q, call.k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert_alike(dv[0, :, 0, 0], out.detach().float().sum(1)[0, 0].to(dtype))
