"""flash_ext under the names of FlashAttention: what libraries import, and what it computes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from tests import reference
from tests.oracle import cumulative, int32, random, random_rng


@pytest.fixture
def names() -> Iterator[None]:
    with flash_ext.as_flash_attn(force=True):
        yield


def into_pages(caches: tuple[Tensor, Tensor], page_size: int) -> tuple[list[Tensor], Tensor]:
    """(caches (pages, page_size, heads, head_dim) with their pages in another order, block_table)."""
    batch, seqlen, *rest = caches[0].shape
    order = torch.randperm(batch * seqlen // page_size, device=caches[0].device)
    pages = [cache.reshape(-1, page_size, *rest)[order].contiguous() for cache in caches]
    return pages, order.argsort().view(batch, -1).to(torch.int32)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


# ---- The names ------------------------------------------------------------------------------------------------------


def test_what_libraries_import(names: None) -> None:
    import flash_attn  # type: ignore[import-not-found]
    import flash_attn_interface  # type: ignore[import-not-found]
    from flash_attn.bert_padding import (  # type: ignore[import-not-found]  # noqa: F401
        index_first_axis,
        index_put_first_axis,
        pad_input,
        unpad_input,
    )
    from flash_attn.flash_attn_interface import (  # type: ignore[import-not-found]
        _flash_attn_backward,
        _flash_attn_forward,
        _flash_attn_varlen_backward,
        _flash_attn_varlen_forward,
        _wrapped_flash_attn_backward,
        _wrapped_flash_attn_forward,
    )
    from flash_attn.layers.rotary import apply_rotary_emb  # type: ignore[import-not-found]  # noqa: F401
    from flash_attn.ops.triton.rotary import apply_rotary  # type: ignore[import-not-found]  # noqa: F401

    assert flash_attn.__version__.startswith("2.8") and flash_attn_interface.__version__.startswith("3.")
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        ours, theirs = (inspect.signature(f) for f in (getattr(flash_ext, name), getattr(flash_attn, name)))
        assert ours == theirs
    for function in (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward):
        assert inspect.isfunction(function)  # ring attention reads their arguments
    assert list(inspect.signature(_flash_attn_varlen_backward).parameters)[:9] == [
        *("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv"),
    ]
    assert _wrapped_flash_attn_forward is _flash_attn_forward and _wrapped_flash_attn_backward is _flash_attn_backward
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.losses"):
        importlib.import_module("flash_attn.losses")


XFORMERS = """
import flash_ext
flash_ext.as_flash_attn(force=True)
import xformers.ops
from xformers.ops.fmha import flash
print(flash.FLASH_VERSION, flash._flash_attn_cuda.fwd.__module__)
"""


def test_xformers_finds_what_it_looks_for() -> None:
    """It does when it is imported, and diffusers imports it."""
    pytest.importorskip("xformers")
    environment = os.environ | {"PYTHONPATH": str(Path(flash_ext.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", XFORMERS], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.stdout.split() == ["2.8.3", "flash_ext.integrations.flash_attn.extension_2"], ran.stderr


def test_metadata(names: None) -> None:
    for name in ("flash-attn", "flash_attn", "Flash.Attn"):
        assert importlib.metadata.version(name).startswith("2.8")
    assert importlib.metadata.version("flash-attn-3").startswith("3.")
    packages = importlib.metadata.packages_distributions()
    assert "flash-attn" in packages["flash_attn"] and "flash-attn-3" in packages["flash_attn_interface"]
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface"):
        assert importlib.util.find_spec(name) is not None


def make_installation(folder: Path) -> None:
    package = folder / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    (package / "part.py").write_text("")


def test_a_real_installation_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finders = list(sys.meta_path)
    make_installation(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match=r"flash_attn is installed already .*force=True"):
        flash_ext.as_flash_attn()
    real = importlib.import_module("flash_attn")
    part = importlib.import_module("flash_attn.part")
    names = flash_ext.as_flash_attn(force=True)
    assert importlib.import_module("flash_attn").flash_attn_func and "flash_attn.part" not in sys.modules
    names.undo()
    assert sys.modules["flash_attn"] is real and sys.modules["flash_attn.part"] is part
    names.undo()
    assert sys.meta_path == finders
    for name in ("flash_attn", "flash_attn.part"):
        del sys.modules[name]


def test_twice_and_undone() -> None:
    with flash_ext.as_flash_attn(force=True):
        module = sys.modules["flash_attn"]
        with flash_ext.as_flash_attn():
            assert sys.modules["flash_attn"] is module
        assert sys.modules["flash_attn"] is module
    assert sys.modules.get("flash_attn") is not module


@pytest.mark.parametrize("force", [None, "False", 1, torch.tensor(True)], ids=str)
def test_force_is_a_bool(force: Any) -> None:
    with pytest.raises(TypeError, match="force must be True or False, got "):
        flash_ext.as_flash_attn(force=force)


def test_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    import transformers.utils.import_utils as memory

    monkeypatch.setattr(memory, "is_torch_cuda_available", lambda: True)
    installed = memory._is_package_available("flash_attn")[0]
    assert memory.is_flash_attn_2_available() == installed  # remembered
    with flash_ext.as_flash_attn(force=True):
        assert memory.is_flash_attn_2_available() and memory.is_flash_attn_3_available()
    assert memory.is_flash_attn_2_available() == installed
    memory.is_flash_attn_2_available.cache_clear()
    memory.is_flash_attn_3_available.cache_clear()


# ---- Version 2: the passes ------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi": True},
    "dropout": {"dropout_p": 0.3},
}


def passes(varlen: bool) -> tuple[Any, Any]:
    from flash_attn import flash_attn_interface as f

    if varlen:
        return f._flash_attn_varlen_forward, f._flash_attn_varlen_backward
    return f._flash_attn_forward, f._flash_attn_backward


@pytest.mark.parametrize("head_dim", [32, 19])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_passes(names: None, kind: str, varlen: bool, head_dim: int, device: str) -> None:
    """Forward and backward on their own are those of ``flash_attn_func``."""
    given = OPTIONS[kind]
    lead_q, lead_k = ((2, 33), (2, 41)) if not varlen else ((66,), (82,))
    q = random(*lead_q, 4, head_dim, device=device).requires_grad_()
    k, v = (random(*lead_k, 2, head_dim, device=device).requires_grad_() for _ in range(2))
    dout = random(*q.shape, device=device)
    slopes = torch.rand(4, device=device) if given.get("alibi") else None
    lengths: tuple[Any, ...] = ()
    if varlen:
        lengths = (cumulative([20, 46], device), cumulative([50, 32], device), 46, 50)
    causal, window, softcap = given.get("causal", False), given.get("window", (-1, -1)), given.get("softcap", 0.0)
    dropout_p = given.get("dropout_p", 0.0)
    rest = (dropout_p, head_dim**-0.5, causal, *window, softcap, slopes)

    forward, backward = passes(varlen)
    with torch.no_grad():
        out, lse, weights, rng_state = forward(q, k, v, *lengths, *rest, return_softmax=dropout_p > 0)
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
        rows = backward(dout, q, k, v, out, lse, dq, dk, dv, *lengths, *rest, False, rng_state)
    assert out.shape == q.shape and rng_state.shape == (2,) and rng_state.dtype == torch.int64
    assert_same(rows, (dout * out).sum(-1).transpose(-1, -2))
    assert weights.numel() == 0 if dropout_p == 0 else (weights < 0).any()

    options: dict[str, Any] = dict(causal=causal, window_size=window, softcap=softcap, alibi_slopes=slopes)
    if varlen:
        keys = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options |= dict(zip(keys, lengths, strict=True))
    if dropout_p:
        options |= dict(dropout_p=dropout_p, rng_state=rng_state)
    pad = -head_dim % 8
    padded = (torch.nn.functional.pad(x, (0, pad)) for x in (q, k, v))
    expected, expected_lse = flash_ext.attention(*padded, softmax_scale=head_dim**-0.5, return_lse=True, **options)
    expected = expected[..., :head_dim]
    assert_same(out, expected)
    assert_same(lse, expected_lse)
    for found, wanted in zip((dq, dk, dv), torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("given", [False, True], ids=["new tensors", "tensors that are there"])
def test_compiled_module(names: None, given: bool, varlen: bool, device: str) -> None:
    """What xFormers calls: results are those of the passes, by the positions of the compiled module's arguments."""
    from flash_attn.flash_attn_interface import flash_attn_gpu

    assert flash_attn_gpu is importlib.import_module("flash_attn_2_cuda")
    q, dout = (random(66, 4, 32, device=device) for _ in range(2))
    k, v = (random(82, 2, 32, device=device) for _ in range(2))
    ends, longest = (cumulative([20, 46], device), cumulative([50, 32], device)), (46, 50)
    if not varlen:
        q, k, v, dout = (x.view(2, -1, *x.shape[1:]) for x in (q, k, v, dout))
    slopes, softcap, window = torch.rand(4, device=device), 2.0, (9, 3)
    into = [torch.full_like(x, torch.nan) if given else None for x in (q, q, k, v)]
    score = (0.3, False, *window, softcap)
    forward, backward = passes(varlen)
    lengths = (*ends, *longest) if varlen else ()
    wanted = [torch.empty_like(x) for x in (q, k, v)]
    if varlen:
        torch.manual_seed(4)
        found = flash_attn_gpu.varlen_fwd(
            q, k, v, into[0], *ends, None, None, None, slopes, *longest, 0.2, 0.3, False, False, *window, softcap, True,
            None,
        )  # fmt: skip
        rng_state = found[3]
        gradients = flash_attn_gpu.varlen_bwd(
            dout, q, k, v, *found[:2], *into[1:], *ends, slopes, *longest, 0.2, 0.3, False, False, *window, softcap,
            False, None, rng_state,
        )  # fmt: skip
    else:
        torch.manual_seed(4)
        found = flash_attn_gpu.fwd(q, k, v, into[0], slopes, 0.2, *score, True, None)
        rng_state = found[3]
        gradients = flash_attn_gpu.bwd(
            dout, q, k, v, *found[:2], *into[1:], slopes, 0.2, *score, False, None, rng_state
        )
    torch.manual_seed(4)
    expected = forward(q, k, v, *lengths, 0.2, *score, slopes, True)
    rows = backward(dout, q, k, v, *expected[:2], *wanted, *lengths, 0.2, *score, slopes, False, expected[3])
    for one, other in zip([*found, *gradients], [*expected, *wanted, rows], strict=True):
        assert_same(one, other)
    results = (found[0], *gradients[:3])
    assert all(one is other for one, other in zip(results, into, strict=True)) or not given
    with pytest.raises(NotImplementedError, match=r"gen_ must be None: .*torch\.manual_seed"):
        flash_attn_gpu.fwd(q, k, v, None, None, 0.2, *score, True, torch.Generator(device))


@pytest.mark.op("attention_decode_append")
def test_compiled_module_over_a_cache(names: None, device: str) -> None:
    import flash_attn_2_cuda  # type: ignore[import-not-found]

    q, new_k, new_v = random(2, 1, 4, 32, device=device), *(random(2, 1, 2, 32, device=device) for _ in range(2))
    caches = [random(2, 64, 2, 32, device=device) for _ in range(2)]
    lengths, angles = int32([33, 7], device), torch.rand(64, 8, device=device)
    rotary = angles.cos(), angles.sin()
    ours = [x.clone() for x in caches]
    out = torch.full_like(q, torch.nan)
    found = flash_attn_2_cuda.fwd_kvcache(
        q, *ours, new_k, new_v, lengths, *rotary, None, None, None, None, out, 0.3, True, 20, -1, 2.0, False, 1
    )
    expected = flash_ext.flash_attn_with_kvcache(
        q, *caches, new_k, new_v, *rotary, lengths, softmax_scale=0.3, causal=True, window_size=(20, -1), softcap=2.0,
        rotary_interleaved=False, num_splits=1, return_softmax_lse=True,
    )  # fmt: skip
    assert found[0] is out
    for one, other in zip([*found, *ours], [*expected, *caches], strict=True):
        assert_same(one, other)


def test_passes_over_parts_of_the_keys(names: None, device: str) -> None:
    """What ring attention does: forwards merged, and backwards with the lse of all keys, summed."""
    forward, backward = passes(False)
    q, k, v, dout = (random(1, 24, 2, 16, device=device) for _ in range(4))
    rest = (0.0, 0.25, False, -1, -1, 0.0, None)
    halves = [slice(0, 10), slice(10, 24)]
    parts = [forward(q, k[:, keys], v[:, keys], *rest, False)[:2] for keys in halves]
    out, lse = flash_ext.merge(*zip(*parts, strict=True))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for keys in halves:
        share = torch.empty_like(q)
        backward(dout, q, k[:, keys], v[:, keys], out, lse, share, dk[:, keys], dv[:, keys], *rest, False)
        dq += share
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flash_ext.attention(*leaves)
    assert_same(out, expected)
    for found, wanted in zip((dq, dk, dv), torch.autograd.grad(expected, leaves, dout), strict=True):
        assert_same(found, wanted)


def test_only_gradients_that_are_asked_for(names: None, device: str) -> None:
    forward, backward = passes(False)
    q, k, v, dout = (random(1, 24, 2, 16, device=device) for _ in range(4))
    rest = (0.0, 0.25, True, -1, -1, 0.0, None)
    out, lse, *_ = forward(q, k, v, *rest, False)
    everything = [torch.empty_like(x) for x in (q, k, v)]
    backward(dout, q, k, v, out, lse, *everything, *rest, False)
    dk = torch.empty_like(k)
    backward(dout, q, k, v, out, lse, None, dk, None, *rest, False)
    assert_same(dk, everything[1])
    with pytest.raises(ValueError, match="rng_state must be that of the forward"):
        backward(dout, q, k, v, out, lse, None, dk, None, 0.5, *rest[1:], False)


@pytest.mark.op("attention_decode")
def test_varlen_forward_over_pages(names: None, device: str) -> None:
    forward, _ = passes(True)
    lengths = [50, 17]
    k, v = (random(2, 64, 2, 32, device=device) for _ in range(2))
    (k_pages, v_pages), block_table = into_pages((k, v), 16)
    q = random(5, 4, 32, device=device)
    cu_seqlens_q, used = cumulative([2, 3], device), int32(lengths, device)
    arguments = (cu_seqlens_q, cumulative(lengths, device), 3, 64, 0.0, 32**-0.5, True)
    out, lse, _, _ = forward(q, k_pages, v_pages, *arguments, block_table=block_table, seqused_k=used)
    rows = torch.cat([k[0, :50], k[1, :17]]), torch.cat([v[0, :50], v[1, :17]])
    expected, expected_lse, _, _ = forward(q, *rows, *arguments)
    assert_same(out, expected)
    assert_same(lse, expected_lse)


# ---- Version 3 ------------------------------------------------------------------------------------------------------


def test_3_fourth_argument_is_the_scale(names: None, device: str) -> None:
    import flash_attn_interface as fa3

    q = random(2, 33, 4, 24, device=device).requires_grad_()
    k, v = (random(2, 41, 2, 24, device=device).requires_grad_() for _ in range(2))
    out, lse = fa3.flash_attn_func(q, k, v, 0.3, True, window_size=(9, 0), softcap=2.0, return_attn_probs=True)
    options: dict[str, Any] = dict(softmax_scale=0.3, window_size=(9, 0), softcap=2.0, return_lse=True)
    expected, expected_lse = flash_ext.attention(q, k, v, **options)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    window = torch.tensor([9, 0])
    tuned = fa3.flash_attn_func(
        q, k, v, 0.3, True, window_size=window, softcap=2.0, num_splits=3, pack_gqa=True, sm_margin=4
    )
    assert torch.equal(tuned, out)
    (dk,) = torch.autograd.grad(tuned.sum(), k)
    assert_same(dk, torch.autograd.grad(expected.sum(), k)[0])
    qkv = torch.stack([q, q, q], dim=2)
    assert_same(fa3.flash_attn_qkvpacked_func(qkv, 0.3), flash_ext.attention(q, q, q, softmax_scale=0.3))
    heads = torch.cat([q, k[:, :33], v[:, :33]], dim=2)
    grouped = fa3.flash_attn_qkvpacked_func(heads, 0.3, num_heads_q=4)
    assert_same(grouped, flash_ext.attention(q, k[:, :33], v[:, :33], softmax_scale=0.3))


@pytest.mark.parametrize("dense", ["neither", "queries", "keys"])
def test_3_varlen(names: None, dense: str, device: str) -> None:
    import flash_attn_interface as fa3

    lengths_q, lengths_k = ([20, 20], [32, 32]) if dense != "neither" else ([13, 27], [50, 14])
    q = random(40, 4, 32, device=device)
    k, v = (random(64, 2, 32, device=device) for _ in range(2))
    cu_q, cu_k = cumulative(lengths_q, device), cumulative(lengths_k, device)
    used = int32([11, 9], device)
    expected, expected_lse = flash_ext.attention(
        q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_k=used, return_lse=True
    )
    given: list[Any] = [q, k, v, cu_q, cu_k, max(lengths_q), max(lengths_k)]
    if dense == "queries":
        given[0], given[3], given[5] = q.unflatten(0, (2, 20)), None, None
        expected, expected_lse = expected.unflatten(0, (2, 20)), expected_lse.unflatten(1, (2, 20)).transpose(0, 1)
    if dense == "keys":
        given[1:3] = k.unflatten(0, (2, 32)), v.unflatten(0, (2, 32))
        given[4] = given[6] = None
    out, lse = fa3.flash_attn_varlen_func(*given, seqused_k=used, causal=True, return_attn_probs=True)
    assert_same(out, expected)
    assert_same(lse, expected_lse)


@pytest.mark.op("attention_decode_append")
@pytest.mark.parametrize("packed", [False, True])
def test_3_kvcache(names: None, packed: bool, device: str) -> None:
    import flash_attn_interface as fa3

    k, v = (random(2, 64, 2, 32, device=device) for _ in range(2))
    (k_pages, v_pages), page_table = into_pages((k, v), 16)
    cache_seqlens = int32([33, 7], device)
    metadata = fa3.get_scheduler_metadata(2, 1, 64, 4, 2, 32, cache_seqlens)
    options: dict[str, Any] = dict(causal=True, scheduler_metadata=metadata, return_softmax_lse=True)
    if packed:
        q, queries = random(5, 4, 32, device=device), dict(cu_seqlens_q=cumulative([2, 3], device), max_seqlen_q=3)
        found = fa3.flash_attn_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=cache_seqlens, page_table=page_table, **queries, **options
        )
        expected = flash_ext.decode(q, k, v, cache_seqlens=cache_seqlens, causal=True, return_lse=True, **queries)
    else:
        q, new = random(2, 1, 4, 32, device=device), random(2, 2, 1, 2, 32, device=device)
        found = fa3.flash_attn_with_kvcache(
            q, k_pages, v_pages, *new, cache_seqlens=cache_seqlens, rotary_seqlens=cache_seqlens, page_table=page_table,
            **options,
        )  # fmt: skip
        new_k, new_v = new
        expected = flash_ext.decode(
            q, k, v, k=new_k, v=new_v, cache_seqlens=cache_seqlens, causal=True, return_lse=True
        )
        swapped = fa3.flash_attn_with_kvcache(
            q.flip(0), k_pages, v_pages, cache_seqlens=cache_seqlens.flip(0) + 1, page_table=page_table, causal=True,
            cache_batch_idx=int32([1, 0], device),
        )  # fmt: skip
        longer = cache_seqlens + 1  # with the row that has been appended
        assert_same(swapped.flip(0), flash_ext.decode(q, k, v, cache_seqlens=longer, causal=True))
    out, lse, *rest = found
    assert_same(out, expected[0])
    assert_same(lse, expected[1])
    assert len(rest) == 2


@pytest.mark.op("attention_decode")
def test_3_kvcache_of_one_length_for_all(names: None, device: str) -> None:
    import flash_attn_interface as fa3

    q, k, v = (random(2, seqlen, 2, 16, device=device) for seqlen in (1, 9, 9))
    expected = flash_ext.decode(q, k, v, cache_seqlens=int32([5, 5], device))
    assert_same(fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=5), expected)
    for wrong, error in ((True, TypeError), (5.0, TypeError), (-1, ValueError), (2**31, ValueError)):
        with pytest.raises(error, match="cache_seqlens must be"):
            fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=wrong)


@pytest.mark.op("merge")
def test_3_combine(names: None, dtype: torch.dtype, device: str) -> None:
    import flash_attn_interface as fa3

    outs = torch.randn(6, 2, 4, 9, 32, device=device).transpose(2, 3)[:3]
    lses = torch.randn(3, 2, 8, 9, device=device).transpose(-1, -2)[..., :4]
    out, lse = fa3.flash_attn_combine(outs, lses, out_dtype=dtype)
    expected, expected_lse = reference.merge(outs, lses.transpose(-1, -2))
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype))
    assert_same(lse, expected_lse.transpose(-1, -2))
    buffer = torch.empty_like(out)
    assert fa3.flash_attn_combine(outs, lses, buffer)[0] is buffer
    torch.testing.assert_close(buffer, out)


def test_3_passes(names: None, device: str) -> None:
    import flash_attn_interface as fa3

    q = random(1, 24, 4, 16, device=device).requires_grad_()
    k, v = (random(1, 24, 2, 16, device=device).requires_grad_() for _ in range(2))
    dout = random(1, 24, 4, 16, device=device)
    out, lse, *_ = fa3._flash_attn_forward(q, k, v, softmax_scale=0.3, causal=True)
    assert not out.requires_grad
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=0.3, is_causal=True)
    expected = flash_ext.attention(q, k, v, softmax_scale=0.3, causal=True)
    for found, wanted in zip((dq, dk, dv), torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        assert_same(found, wanted)


def test_3_passes_by_the_names_of_earlier_releases(names: None, device: str) -> None:
    import flash_attn_interface as fa3

    q, k, v, dout = (random(1, 24, 4, 16, device=device) for _ in range(4))
    window = dict(causal=True, window_size=(5, 0), softmax_scale=0.3)
    out, lse, *_ = fa3._flash_attn_forward(q, k, v, out=None, **window)
    grads = dict(zip(("dq", "dk", "dv"), (torch.empty_like(x) for x in (q, k, v)), strict=True))
    fa3._flash_attn_backward(dout, q, k, v, out, lse, **grads, **window)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flash_ext.attention(*leaves, **window)
    for found, wanted in zip(
        (out, *grads.values()), (expected, *torch.autograd.grad(expected, leaves, dout)), strict=True
    ):
        assert_same(found, wanted)


def as_tensors(call: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.tensor(x) if name.startswith("max_seqlen") else x for name, x in call.items()}


@pytest.mark.parametrize("version", [2, 3])
def test_max_seqlens_may_be_tensors(names: None, version: int, device: str) -> None:
    """transformers gives the maximum of the lengths as it is, on the device."""
    from flash_attn import flash_attn_interface as fa2
    from flash_attn_interface import _flash_attn_backward, _flash_attn_forward, flash_attn_varlen_func

    q, k, v, dout = (random(24, 4, 16, device=device) for _ in range(4))
    cu = cumulative([9, 15], device)
    lengths = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=15, max_seqlen_k=15)
    score = dict(softmax_scale=0.3, causal=True)
    if version == 3:
        forward, backward, into = _flash_attn_forward, _flash_attn_backward, {}
        packed = [flash_attn_varlen_func(q, k, v, **given, **score) for given in (lengths, as_tensors(lengths))]
        assert torch.equal(*packed)
    else:
        score |= dict(dropout_p=0.0, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None)
        into = dict(deterministic=False)
        forward, backward = fa2._flash_attn_varlen_forward, fa2._flash_attn_varlen_backward
    found = []
    for given in (lengths, as_tensors(lengths)):
        out, lse, *_ = forward(q, k, v, **given, **score)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        backward(
            dout, q, k, v, out, lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)), **given, **score, **into
        )
        found.append([out, lse, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.op("attention_decode")
def test_3_longest_query_over_a_cache_may_be_a_tensor(names: None, device: str) -> None:
    import flash_attn_interface as fa3

    q, cache = random(7, 4, 16, device=device), random(2, 20, 2, 16, device=device)
    options = dict(cache_seqlens=int32([11, 20], device), cu_seqlens_q=cumulative([2, 5], device), causal=True)
    expected = fa3.flash_attn_with_kvcache(q, cache, cache, **options, max_seqlen_q=5)
    longest = torch.tensor(5, device=device)
    assert torch.equal(fa3.flash_attn_with_kvcache(q, cache, cache, **options, max_seqlen_q=longest), expected)


@pytest.mark.parametrize("argument", ["qv", "q_descale", "k_descale", "v_descale", "attention_chunk"])
def test_3_refuses_by_name(names: None, argument: str) -> None:
    import flash_attn_interface as fa3

    q = random(1, 8, 2, 16)
    value: Any = 4 if argument == "attention_chunk" else torch.ones(1, 2)
    lengths = (cumulative([8]), cumulative([8]), 8, 8)
    for call in (
        lambda **given: fa3.flash_attn_func(q, q, q, **given),
        lambda **given: fa3.flash_attn_varlen_func(q[0], q[0], q[0], *lengths, **given),
        lambda **given: fa3.flash_attn_with_kvcache(q, q, q, **given),
        lambda **given: fa3._flash_attn_forward(q, q, q, **given),
    ):
        with pytest.raises(NotImplementedError, match=f"flash_ext: {argument} is not supported, got .*: [a-z]"):
            call(**{argument: value})


# ---- Rotary and padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary(names: None, interleaved: bool, inplace: bool, device: str) -> None:
    from flash_attn.layers.rotary import apply_rotary_emb
    from flash_attn.ops.triton.rotary import apply_rotary

    x = random(2, 9, 3, 32, device=device)
    angle = torch.rand(40, 8, device=device) * 6
    cos, sin = angle.cos(), angle.sin()
    offsets = int32([3, 11], device)
    rows = torch.arange(9, device=device)
    expected = torch.stack([reference.rotate(x[b], cos, sin, rows + int(offsets[b]), interleaved) for b in range(2)])
    given = x.clone()
    found = apply_rotary_emb(given, cos, sin, interleaved, inplace, offsets)
    assert_same(found, expected)
    assert (found is given) == inplace
    back = apply_rotary(found.clone(), cos, sin, seqlen_offsets=offsets, interleaved=interleaved, conjugate=True)
    assert_same(back, x)

    packed = torch.cat([x[0, :4], x[1]])
    found = apply_rotary_emb(packed, cos, sin, interleaved, cu_seqlens=cumulative([4, 9], device))
    each = [apply_rotary_emb(part[None], cos, sin, interleaved)[0] for part in (x[0, :4], x[1])]
    assert_same(found, torch.cat(each))


def test_padding_of_concatenated_sequences(names: None) -> None:
    from flash_attn.bert_padding import index_put_first_axis, unpad_input_for_concatenated_sequences

    x = random(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :5], x[2]]))
    padded = index_put_first_axis(tokens, indices, 18).unflatten(0, (3, 6))
    assert torch.equal(padded[0, :5], x[0, :5]) and not padded[:2, 5].any()
    assert torch.equal(index_put_first_axis(tokens, indices.int(), 18), padded.flatten(0, 1))
    with pytest.raises(ValueError, match="indices must be int32 or int64"):
        index_put_first_axis(tokens, indices.float(), 18)


def test_dropout_of_the_passes_is_drawn(names: None) -> None:
    """The state that comes back is the one that dropped."""
    forward, _ = passes(False)
    q, k, v = (random(1, 24, 2, 16) for _ in range(3))
    out, _, _, rng_state = forward(q, k, v, 0.5, 0.25, False, -1, -1, 0.0, None, True)
    again = flash_ext.attention(q, k, v, softmax_scale=0.25, dropout_p=0.5, rng_state=rng_state)
    assert torch.equal(out, again)
    other = flash_ext.attention(q, k, v, softmax_scale=0.25, dropout_p=0.5, rng_state=random_rng())
    assert not torch.equal(out, other)
