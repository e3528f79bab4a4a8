"""The functions named as in flash-attn 2: signatures, semantics, and what they take beyond ``flash_ext.attention``."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import functional, head_dims
from flash_ext.integrations.flash_attn import extension_2, interface_2, interface_3
from flash_ext.ops import DecodeOptions
from tests import reference
from tests.oracle import cumulative, int32, random

COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
REQUIRED = inspect.Parameter.empty
CACHE = dict.fromkeys(
    ["k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"]
)
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]


def required(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, REQUIRED)


SIGNATURES: dict[str, dict[str, Any]] = {
    "flash_attn_func": required("q", "k", "v") | COMMON,
    "flash_attn_qkvpacked_func": required("qkv") | COMMON,
    "flash_attn_kvpacked_func": required("q", "kv") | COMMON,
    "flash_attn_varlen_func": required("q", "k", "v", *LENGTHS) | COMMON | {"block_table": None},
    "flash_attn_varlen_qkvpacked_func": required("qkv", "cu_seqlens", "max_seqlen") | COMMON,
    "flash_attn_varlen_kvpacked_func": required("q", "kv", *LENGTHS) | COMMON,
    "flash_attn_with_kvcache": required("q", "k_cache", "v_cache")
    | CACHE
    | {
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_flash_attns(name: str) -> None:
    parameters = inspect.signature(getattr(flash_ext, name)).parameters
    assert [(p.name, p.default) for p in parameters.values()] == list(SIGNATURES[name].items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 5, 12, 33])
@pytest.mark.parametrize("causal", [False, True])
def test_dense(device: str, head_dim: int, causal: bool) -> None:
    q, k, v = (random(2, *shape, head_dim, device=device) for shape in [(9, 4), (13, 2), (13, 2)])
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    slopes = torch.rand(4, device=device)
    out, lse, dropped = flash_ext.flash_attn_func(
        q, k, v, 0.0, None, causal, (4, -1), 3.0, slopes, return_attn_probs=True
    )
    options = reference.Options(causal=causal, window_size=(4, -1), softcap=3.0, alibi_slopes=slopes)
    expected, expected_lse, _ = reference.attention(q, k, v, options)
    close(out, expected)
    close(lse, expected_lse)
    assert dropped.shape == (0,)
    found = torch.autograd.grad((out**2).sum(), (q, k, v))
    for got, want in zip(found, torch.autograd.grad((expected**2).sum(), (q, k, v)), strict=True):
        close(got, want)
    assert isinstance(flash_ext.flash_attn_func(q, k, v), Tensor)


def test_softcap_of_zero_is_off(device: str) -> None:
    q, k, v = (random(2, 9, 4, 16, device=device) for _ in range(3))
    assert torch.equal(flash_ext.flash_attn_func(q, k, v, softcap=0), flash_ext.flash_attn_func(q, k, v))
    with pytest.raises(RuntimeError, match=r"softcap must be .* got -1"):
        flash_ext.flash_attn_func(q, k, v, softcap=-1.0)


def test_last_dimension_of_any_stride(device: str) -> None:
    """Of sizes, too, that are padded."""
    for head_dim in (16, 12):
        q, k, v = (random(2, 9, 4, head_dim, device=device) for _ in range(3))
        for order in itertools.permutations(range(4)):
            back = sorted(range(4), key=order.__getitem__)
            turned = (t.permute(order).contiguous().permute(back) for t in (q, k, v))
            assert torch.equal(flash_ext.flash_attn_func(*turned), flash_ext.flash_attn_func(q, k, v))


def test_packed_tensors(device: str) -> None:
    qkv = random(2, 9, 3, 4, 12, device=device).requires_grad_()
    q, k, v = qkv.unbind(2)
    options: dict[str, Any] = {"causal": True, "softmax_scale": 0.4}
    expected = flash_ext.flash_attn_func(q, k, v, **options)
    assert torch.equal(flash_ext.flash_attn_qkvpacked_func(qkv, **options), expected)
    kv = qkv[:, :, 1:]
    assert torch.equal(flash_ext.flash_attn_kvpacked_func(q, kv, **options), expected)
    (found,) = torch.autograd.grad(flash_ext.flash_attn_qkvpacked_func(qkv, **options).sum(), qkv)
    close(found, torch.stack(torch.autograd.grad(expected.sum(), (q, k, v)), 2))


def test_packed_varlen_tensors(device: str) -> None:
    qkv, cu = random(9, 3, 4, 12, device=device), cumulative([4, 0, 5], device)
    expected = flash_ext.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 5, 5, causal=True)
    assert torch.equal(flash_ext.flash_attn_varlen_qkvpacked_func(qkv, cu, 5, causal=True), expected)
    q, kv = qkv[:, 0], qkv[:, 1:]
    assert torch.equal(flash_ext.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 5, 5, causal=True), expected)
    options = reference.Options(causal=True)
    close(expected, reference.varlen_attention(*qkv.unbind(1), cu.tolist(), cu.tolist(), options)[0])


@pytest.mark.parametrize("shape", [(2, 9, 2, 4, 16), (2, 9, 4, 16), (2, 9, 3, 4, 16, 1)], ids=str)
def test_packed_tensors_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="qkv must have 5 dimensions and size 3"):
        flash_ext.flash_attn_qkvpacked_func(torch.zeros(shape))


@pytest.mark.parametrize("head_dim", [16, 10])
def test_signed_probabilities_of_dropout(device: str, head_dim: int) -> None:
    q, k, v = (random(2, *shape, head_dim, device=device) for shape in [(9, 4), (13, 2), (13, 2)])
    out, lse, dropped = flash_ext.flash_attn_func(q, k, v, dropout_p=0.5, causal=True, return_attn_probs=True)
    weights = reference.attention(q, k, v, reference.Options(causal=True))[2]
    assert dropped.shape == (2, 4, 9, 13) and not dropped.requires_grad
    close(dropped.abs(), weights)
    kept = torch.where(dropped > 0, 2 * dropped, 0)
    close(out, torch.einsum("bhij,bjhd->bihd", kept, v.repeat_interleave(2, 2)))
    assert (dropped < 0).any()
    close(lse, reference.attention(q, k, v, reference.Options(causal=True))[1])


def test_signed_probabilities_of_packed_sequences(device: str) -> None:
    q, k, v = (random(9, 4, 16, device=device) for _ in range(3))
    cu = cumulative([4, 5], device)
    out, lse, dropped = flash_ext.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, 0.5, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (4, 9) and dropped.shape == (2, 4, 5, 5)
    assert not dropped[0, :, 4:].any() and not dropped[0, :, :, 4:].any()
    kept = torch.where(dropped > 0, 2 * dropped, 0)
    close(out[4:], torch.einsum("hij,jhd->ihd", kept[1], v[4:]))


@pytest.mark.op("attention_decode")
@pytest.mark.parametrize("head_dim", [16, 12])
def test_block_table_of_packed_queries(device: str, head_dim: int) -> None:
    lengths_q, lengths_k = [3, 1, 4], [20, 33, 4]
    q = random(8, 4, head_dim, device=device)
    pages_k, pages_v = (random(9, 8, 2, head_dim, device=device) for _ in range(2))
    table = int32([[4, 0, 7, 0, 0], [1, 2, 3, 5, 6], [8, 0, 0, 0, 0]], device)
    cu_q, cu_k = cumulative(lengths_q, device), cumulative(lengths_k, device)
    k, v = (
        torch.cat([pages[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate(lengths_k)])
        for pages in (pages_k, pages_v)
    )
    options: dict[str, Any] = {"causal": True, "return_attn_probs": True}
    expected = flash_ext.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 33, **options)
    found = flash_ext.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 4, 33, block_table=table, **options)
    for got, want in zip(found, expected, strict=True):
        close(got, want)
    with pytest.raises(ValueError, match="dropout_p must be 0 with block_table"):
        flash_ext.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 4, 33, 0.1, block_table=table)
    largest = 2**31 - 1
    loose = flash_ext.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 4, largest, block_table=table, **options)
    assert all(torch.equal(a, b) for a, b in zip(loose, found, strict=True))


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize("scalar_length", [False, True])
def test_cache_with_append(device: str, head_dim: int, scalar_length: bool) -> None:
    q, k, v = (random(2, *shape, head_dim, device=device) for shape in [(3, 4), (3, 2), (3, 2)])
    caches = [random(2, 32, 2, head_dim, device=device) for _ in range(2)]
    lengths = [20, 20] if scalar_length else [20, 29]
    expected_caches = [cache.clone() for cache in caches]
    for b, n in enumerate(lengths):
        expected_caches[0][b, n : n + 3], expected_caches[1][b, n : n + 3] = k[b], v[b]
    out, lse = flash_ext.flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=20 if scalar_length else int32(lengths, device),
        causal=True,
        return_softmax_lse=True,
    )
    for cache, expected in zip(caches, expected_caches, strict=True):
        assert torch.equal(cache, expected)
    for b, n in enumerate(lengths):
        ks, vs = (cache[b : b + 1, : n + 3] for cache in expected_caches)
        want, want_lse, _ = reference.attention(q[b : b + 1], ks, vs, reference.Options(causal=True))
        close(out[b], want[0])
        close(lse[b], want_lse[0])


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(device: str, interleaved: bool, causal: bool) -> None:
    q, k, v = (random(1, 3, 2, 24, device=device) for _ in range(3))
    caches = [random(1, 32, 2, 24, device=device) for _ in range(2)]
    angles = torch.rand(64, 8, device=device)
    cos, sin = angles.cos(), angles.sin()
    before = caches[0].clone()
    out = flash_ext.flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, cache_seqlens=10, causal=causal, rotary_interleaved=interleaved
    )
    at = torch.arange(10, 13, device=device)
    before[0, 10:13] = reference.rotate(k[0], cos, sin, at, interleaved)
    close(caches[0], before)
    turned = reference.rotate(q[0], cos, sin, at if causal else torch.full_like(at, 10), interleaved)[None]
    options = reference.Options(causal=causal)
    close(out, reference.attention(turned, before[:, :13], caches[1][:, :13], options)[0])


@pytest.mark.op("attention_decode")
def test_cache_options(device: str) -> None:
    q = random(2, 1, 4, 16, device=device)
    caches = [random(5, 64, 2, 16, device=device) for _ in range(2)]
    where, pad, lengths = int32([4, 1], device), int32([3, 0], device), int32([60, 7], device)
    out = flash_ext.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, cache_batch_idx=where, cache_leftpad=pad, window_size=(20, 0), num_splits=3
    )
    for b, (row, start, end) in enumerate([(4, 3, 60), (1, 0, 7)]):
        ks, vs = (cache[row : row + 1, start:end] for cache in caches)
        close(out[b], reference.attention(q[b : b + 1], ks, vs, reference.Options(window_size=(20, 0)))[0][0])


@pytest.mark.op("attention_decode")
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_the_number_of_splits_reaches_the_operator(
    device: str, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results do not show it: each function that takes one is watched."""
    sent: list[int] = []
    run = functional.call

    def watched(op: Any, *arguments: Any) -> Any:
        sent.append(DecodeOptions(*arguments[3:]).num_splits)
        return run(op, *arguments)

    monkeypatch.setattr(functional, "call", watched)
    q, cache = random(1, 1, 2, 16, device=device), random(1, 256, 2, 16, device=device)
    ends, used = cumulative([1], device), int32([200], device)
    page = int32([[0]], device)
    scores = (0.0, 0.25, False)
    flash_ext.flash_attn_with_kvcache(q, cache, cache, num_splits=num_splits)
    interface_3.flash_attn_with_kvcache(q, cache, cache, num_splits=num_splits)
    interface_3._flash_attn_forward(q, cache, cache, page_table=page, seqused_k=used, num_splits=num_splits)
    interface_2._flash_attn_varlen_forward(
        q[0], cache, cache, ends, ends, 1, 256, *scores, block_table=page, seqused_k=used, num_splits=num_splits
    )
    nothing = (None,) * 6
    extension_2.fwd_kvcache(
        q, cache, cache, None, None, used, *nothing, None, 0.25, False, -1, -1, 0.0, True, num_splits
    )
    assert sent == [num_splits] * 5


@pytest.mark.op("attention_decode")
def test_cache_errors(device: str) -> None:
    q, k = random(2, 1, 4, 16, device=device), random(2, 1, 4, 16, device=device)
    caches = [random(2, 64, 4, 16, device=device) for _ in range(2)]
    with pytest.raises(ValueError, match="k and v must be given together, got only k"):
        flash_ext.flash_attn_with_kvcache(q, *caches, k)
    with pytest.raises(RuntimeError, match="cache_seqlens"):
        flash_ext.flash_attn_with_kvcache(q, *caches, k, k)
    with pytest.raises(RuntimeError, match="rotary"):
        flash_ext.flash_attn_with_kvcache(q, *caches, rotary_cos=caches[0][0, :, 0, :4])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((20, 17, 20), "k must have the head_dim of q: expected 20 .* 17"),
        ((0, 0, 8), "q must have a head_dim from 1 to 256"),
        ((8, 8, 257), "v must have a head_dim from 1 to 256, got shape .*257"),
    ],
)
def test_head_dims_are_checked_before_padding(device: str, sizes: tuple[int, int, int], message: str) -> None:
    q, k, v = (random(1, 5, 2, size, device=device) for size in sizes)
    with pytest.raises(RuntimeError, match=message):
        flash_ext.flash_attn_func(q, k, v)
    cu = cumulative([2, 3], device)
    with pytest.raises(RuntimeError, match=message):
        flash_ext.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 3, 3)
    with pytest.raises(RuntimeError, match=message.replace("k must", "k_cache must").replace("v must", "v_cache must")):
        flash_ext.flash_attn_with_kvcache(q, k, v)


def test_options_of_a_caller_stay_as_they_are(device: str) -> None:
    """And weights take the scale of the head_dim before padding from the same options."""
    q, k, v = (random(1, 5, 2, 12, dtype=torch.float16, device=device) for _ in range(3))
    options = {"softmax_scale": None, "causal": True, "deterministic": None}
    out, lse = head_dims.attend(q, k, v, options)
    weights = head_dims.weights(q, k, lse, options)
    assert options == {"softmax_scale": None, "causal": True, "deterministic": None}
    expected = torch.einsum("bhqk,bkhd->bqhd", weights.float(), v.float())
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("name", ["k", "v"])
def test_narrower_rows_are_not_written_into_a_cache(device: str, name: str) -> None:
    caches = [random(1, 8, 2, 24, device=device) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    new = {n: random(1, 1, 2, 17 if n == name else 24, device=device) for n in ("k", "v")}
    with pytest.raises(RuntimeError, match=f"^{name} must have the head_dim of"):
        flash_ext.flash_attn_with_kvcache(random(1, 1, 2, 24, device=device), *caches, **new, cache_seqlens=2)
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))


@pytest.mark.parametrize("window_size", [(-5, 2), (2, -2)], ids=str)
def test_only_minus_one_is_an_unlimited_window(device: str, window_size: tuple[int, int]) -> None:
    q, k, v = (random(2, 9, 2, 16, device=device) for _ in range(3))
    with pytest.raises(RuntimeError, match=r"window_size\[.\].* must be >= -1 \(-1 = unlimited\), got -"):
        flash_ext.flash_attn_func(q, k, v, window_size=window_size)


def test_integers_may_be_tensors(device: str) -> None:
    """flash-attn's own tests draw windows by torch.randint, and models take max_seqlen as a maximum of tensors."""
    q, k, v = (random(9, 2, 16, device=device) for _ in range(3))
    cu = cumulative([4, 5], device)
    expected = flash_ext.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, window_size=(3, 1))
    window = torch.tensor([3, 1], device=device)
    for given in (window, tuple(window), list(window), window.cpu().numpy(), tuple(window.cpu().numpy())):
        out = flash_ext.flash_attn_varlen_func(q, k, v, cu, cu, cu.diff().max(), window[0] + 2, window_size=given)
        assert torch.equal(out, expected)
    for wrong in (window.float(), window[:1], window[0], window > 0):
        with pytest.raises((TypeError, ValueError), match="window_size"):
            flash_ext.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, window_size=wrong)


@pytest.mark.op("attention_decode")
def test_cache_seqlens_may_be_any_integer(device: str) -> None:
    q, caches = random(2, 1, 4, 16, device=device), [random(2, 8, 2, 16, device=device) for _ in range(2)]
    expected = flash_ext.flash_attn_with_kvcache(q, *caches, cache_seqlens=int32([5, 5], device))
    integer = torch.tensor(5).numpy()[()]
    assert torch.equal(flash_ext.flash_attn_with_kvcache(q, *caches, cache_seqlens=integer), expected)
    for wrong in (True, [5, 5], 5.0):
        with pytest.raises(TypeError, match="cache_seqlens must be an integer, a Tensor or None"):
            flash_ext.flash_attn_with_kvcache(q, *caches, cache_seqlens=wrong)  # type: ignore[arg-type]
    for wrong in (-1, 2**31):
        with pytest.raises(ValueError, match="cache_seqlens must be from 0"):
            flash_ext.flash_attn_with_kvcache(q, *caches, cache_seqlens=wrong)


@pytest.mark.op("attention_decode")
def test_block_table_errors(device: str) -> None:
    q, pages = random(1, 4, 16, device=device), [random(4, 4, 2, 16, device=device) for _ in range(2)]
    table, cu_q = int32([[1, 2]], device), cumulative([1], device)

    def attend(cu_k: Any, max_seqlen_k: int = 8, q: torch.Tensor = q) -> Any:
        return flash_ext.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 1, max_seqlen_k, block_table=table)

    attend(cumulative([6], device), 6)
    cases = [(cumulative([3, 3], device), "shape of cu_seqlens_q"), (cumulative([6], device).long(), "int64")]
    if device == "cpu":
        cases += [(int32([3, 1], device), "not decrease"), (int32([-1, 1], device), "start at 0")]
    for cu_k, wrong in cases:
        with pytest.raises(ValueError, match=f"^cu_seqlens_k must .*{wrong}"):
            attend(cu_k)
    with pytest.raises(TypeError, match="cu_seqlens_k must be a Tensor"):
        attend([0, 6])
    if device == "cpu":
        with pytest.raises(ValueError, match=r"^max_seqlen_k must not be less than .* 6, got 2"):
            attend(cumulative([6], device), 2)


@pytest.mark.op("attention_decode")
def test_pages_run_forward_where_a_gradient_is_wanted(device: str) -> None:
    q, pages = random(1, 4, 16, device=device), [random(4, 4, 2, 16, device=device) for _ in range(2)]
    cu_q, cu_k, table = cumulative([1], device), cumulative([6], device), int32([[1, 2]], device)
    expected = flash_ext.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 1, 6, block_table=table)
    for t in (q, *pages):
        t.requires_grad_()
    out = flash_ext.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 1, 6, block_table=table)
    assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match=r"no derivative: attention over a cache or pages \(block_table\)"):
        out.sum().backward()


@pytest.mark.op("attention_decode")
def test_batch_invariant_decoding(device: str) -> None:
    q = random(5, 1, 4, 16, device=device)
    caches = [random(5, 3000, 2, 16, device=device) for _ in range(2)]
    together = flash_ext.decode(q, *caches, batch_invariant=True)
    alone = flash_ext.decode(q[2:3], *(cache[2:3] for cache in caches), batch_invariant=True)
    assert torch.equal(together[2:3], alone)


# ---- bert_padding ---------------------------------------------------------------------------------------------------


def test_unpad_and_pad(device: str) -> None:
    states = random(3, 5, 2, 4, device=device).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]], device=device)
    tokens, indices, cu_seqlens, longest, seqused = flash_ext.unpad_input(states, mask)
    assert torch.equal(tokens, states[mask.bool()])
    assert indices.tolist() == [0, 1, 10, 11, 12, 13]
    assert cu_seqlens.tolist() == [0, 2, 2, 6] and cu_seqlens.dtype == torch.int32
    assert longest == 4 and isinstance(longest, int)
    assert seqused.tolist() == [2, 0, 4] and seqused.dtype == torch.int32
    padded = flash_ext.pad_input(tokens, indices, 3, 5)
    assert torch.equal(padded, torch.where(mask.bool()[..., None, None], states, 0))
    (found,) = torch.autograd.grad((padded * states.detach()).sum(), states)
    assert torch.equal(found, padded.detach())


def test_unpad_with_unused_tokens(device: str) -> None:
    states = random(2, 4, 3, device=device)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]], device=device).bool()
    unused = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]], device=device).bool()
    tokens, indices, cu_seqlens, longest, seqused = flash_ext.unpad_input(states, mask, unused)
    assert torch.equal(tokens, states[mask | unused])
    assert indices.tolist() == [0, 1, 4, 5, 6, 7]
    assert cu_seqlens.tolist() == [0, 2, 6] and longest == 4 and seqused.tolist() == [1, 3]


def test_unpad_by_integers_other_than_1(device: str) -> None:
    """What is not 0 is a token, also where numbers of the two masks add up to 2 or 0."""
    states = random(2, 4, 3, device=device)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1]], device=device)
    unused = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]], device=device)
    expected = flash_ext.unpad_input(states, mask.bool(), unused.bool())
    for given in ((mask, unused), (mask.to(torch.uint8) * 255, unused), (-mask, mask + unused), (3 * mask, 2 * unused)):
        for found, wanted in zip(flash_ext.unpad_input(states, *given), expected, strict=True):
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted))


def test_unpad_refuses_masks_that_do_not_fit(device: str) -> None:
    states = random(3, 6, 2, device=device)
    good = torch.ones(3, 6, dtype=torch.int32, device=device)
    for bad in (good[:, :4], good[:2], good[..., None], good.float()):
        with pytest.raises(ValueError, match=r"^attention_mask must be bool or integer"):
            flash_ext.unpad_input(states, bad)
        with pytest.raises(ValueError, match=r"^unused_mask must be bool or integer"):
            flash_ext.unpad_input(states, good, bad)


def test_unpad_rows_of_several_sequences(device: str) -> None:
    states = random(3, 6, 2, device=device).requires_grad_()
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [0] * 6, [6, 0, 0, 0, 0, 0]], device=device)
    tokens, indices, cu_seqlens, longest = flash_ext.unpad_input_for_concatenated_sequences(states, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 12, 13, 14, 15, 16, 17]
    assert torch.equal(tokens, states.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5, 11] and cu_seqlens.dtype == torch.int32
    assert longest == 6 and isinstance(longest, int)
    padded = flash_ext.pad_input(tokens, indices, 3, 6)
    (found,) = torch.autograd.grad(padded.sum(), states)
    assert torch.equal(padded, states * found) and found.sum() == 2 * len(indices)
    nothing = flash_ext.unpad_input_for_concatenated_sequences(states, torch.zeros_like(lengths))
    assert [t.tolist() for t in nothing[1:3]] == [[], [0]] and nothing[3] == 0


def test_unpad_refuses_lengths_that_do_not_fit(device: str) -> None:
    states, lengths = random(2, 4, 3, device=device), torch.tensor([[2, 2, 0, 0], [1, 0, 0, 0]], device=device)
    for bad in (lengths + 1, lengths - 1, lengths.bool(), lengths.float(), lengths[:1]):
        with pytest.raises(ValueError, match=r"^attention_mask_in_length must"):
            flash_ext.unpad_input_for_concatenated_sequences(states, bad)


def test_pad_by_indices_of_32_bits(device: str) -> None:
    tokens = random(3, 2, device=device)
    indices = torch.tensor([0, 3, 5], device=device)
    expected = flash_ext.pad_input(tokens, indices, 2, 3)
    assert torch.equal(flash_ext.pad_input(tokens, indices.int(), 2, 3), expected)
    for bad in (indices[:2], indices[:, None], indices.float()):
        with pytest.raises(ValueError, match=r"^indices must"):
            flash_ext.pad_input(tokens, bad, 2, 3)
    with pytest.raises(ValueError, match=r"^batch must be at least 0, got -2"):
        flash_ext.pad_input(tokens, indices, -2, 3)


def test_index_first_axis(device: str) -> None:
    rows = random(4, 3, 2, device=device).requires_grad_()
    chosen = flash_ext.index_first_axis(rows, torch.tensor([2, 0, 2], device=device))
    assert torch.equal(chosen, rows[[2, 0, 2]])
    (found,) = torch.autograd.grad(chosen.sum(), rows)
    assert found[:, 0, 0].tolist() == [1.0, 0.0, 2.0, 0.0]
