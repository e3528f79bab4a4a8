"""What calls SDPA, in torch and beside it, with this library's kernels below: modules, tracers, transforms, graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import flash_ext
from flash_ext.integrations import sdpa_provider
from tests.integration.test_sdpa_provider import (
    SDPA,
    active,  # noqa: F401  a fixture
    by_hand,
    gradients,
    make_mask,
    qkv,
    served,
)
from tests.oracle import cumulative, random


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_multihead_attention_in_training(device: str, batch_first: bool, masked: bool) -> None:
    module = nn.MultiheadAttention(32, 4, batch_first=batch_first, device=device)
    x = torch.randn(3, 9, 32, device=device)
    padding = torch.arange(9, device=device) >= torch.tensor([9, 5, 7], device=device)[:, None] if masked else None
    x = x if batch_first else x.transpose(0, 1)
    expected, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
    with flash_ext.activated():
        sdpa_provider.forget_calls()
        found, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
        assert served()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.stride() == expected.stride()


def test_transformer_layer_in_training(device: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True, device=device)
    x = torch.randn(2, 9, 32, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    with flash_ext.activated():
        sdpa_provider.forget_calls()
        (found,) = torch.autograd.grad(layer(x).square().sum(), x)
        assert served()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("active")
def test_autocast(device: str) -> None:
    q, k, v = qkv(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    assert out.dtype == dropped.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), by_hand(q, k, v, is_causal=True), rtol=3e-2, atol=3e-2)
    assert served() >= {SDPA}


@pytest.mark.usefixtures("active")
def test_operators_keep_their_dtype_under_autocast() -> None:
    q, k, v = qkv("cpu", requires_grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    assert out.dtype == torch.float32


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpointing(device: str, use_reentrant: bool, dropout_p: float) -> None:
    q, k, v = qkv(device)

    def attend(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, dropout_p=dropout_p)

    torch.manual_seed(5)
    expected = gradients(attend(q, k, v), (q, k, v))
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
    for found, right in zip(gradients_by_backward(out, (q, k, v)), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def gradients_by_backward(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """As ``gradients``; checkpointing of the reentrant kind works with ``backward()`` alone."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    (out * weight).sum().backward()
    return [leaf.grad for leaf in leaves]


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_who_looks_on_sees_torchs_operators(device: str, kind: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = qkv(device, dtype)
    mask = make_mask(kind, device, dtype, (37, 53))
    with Names() as names:
        F.scaled_dot_product_attention(q, k, v, mask)
    assert any(name.startswith("aten::_scaled_dot_product_") for name in names.seen)
    assert not any(name.startswith("flash_ext") for name in names.seen)
    assert served()


@pytest.mark.usefixtures("active", "inductor")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("options", ["plain", "causal", "bool", "bias", "dims", "gqa"])
def test_compile(device: str, backend: str, options: str) -> None:
    if backend == "inductor" and device == "cpu" and options not in ("plain", "bias"):
        pytest.skip("compiling takes seconds")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads = (4, 2) if options == "gqa" else (4, 4)
    q, k, v = qkv(device, dtype, dims=(16, 24 if options == "dims" else 16), order="heads", heads=heads)
    mask = make_mask({"bool": "bool", "bias": "float"}.get(options, "none"), device, dtype, (1, 4, 37, 53))
    leaves = [q, k, v] if mask is None or options == "bool" else [q, k, v, mask.requires_grad_()]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return 2 * F.scaled_dot_product_attention(
            q + 1, k, v, mask, is_causal=options == "causal", enable_gqa=options == "gqa"
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    out, expected = compiled(q, k, v, mask), attend(q, k, v, mask)
    assert out.stride() == expected.stride()
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if device == "cpu" else {"rtol": 5e-2, "atol": 5e-2}
    for found, right in zip([out, *gradients(out, leaves)], [expected, *gradients(expected, leaves)], strict=True):
        torch.testing.assert_close(found, right, **tolerance)
    assert served()


@pytest.mark.usefixtures("active")
def test_compile_with_dropout_survives_deactivation(device: str) -> None:
    q, k, _ = qkv(device, seqlens=(64, 64))
    v = torch.ones_like(k).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    out = compiled(q, k, v)
    assert served() == {SDPA}
    assert not torch.equal(compiled(q, k, v), out)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(gradient.sum(), out.sum(), rtol=1e-4, atol=1e-2)
    flash_ext.deactivate()
    assert abs(compiled(q, k, v).mean().item() - 1.0) < 0.05


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask) + F.scaled_dot_product_attention(q, k, v)


def test_export_is_what_it_is_without(device: str) -> None:
    q, k, v = qkv(device, requires_grad=False)
    inputs = (q, k, v, torch.rand(37, 53, device=device) < 0.9)
    graphs = []
    for activate in (False, True):
        if activate:
            flash_ext.activate()
        try:
            program = torch.export.export(Attention(), inputs)
            decomposed = program.run_decompositions()
            torch.testing.assert_close(decomposed.module()(*inputs), Attention()(*inputs), rtol=1e-3, atol=1e-3)
        finally:
            flash_ext.deactivate()
        graphs.append([[str(node.target) for node in p.graph.nodes] for p in (program, decomposed)])
    assert graphs[0] == graphs[1]


@pytest.mark.usefixtures("active")
def test_transforms(device: str) -> None:
    q, k, v = qkv(device, requires_grad=False)

    def loss(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(by_hand(leaf, k, v, is_causal=True).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), expected, rtol=1e-3, atol=1e-3)
    samples = torch.stack([q, q + 1])
    out = torch.vmap(lambda q: F.scaled_dot_product_attention(q, k, v))(samples)
    torch.testing.assert_close(out, torch.stack([by_hand(x, k, v) for x in samples]), rtol=1e-3, atol=1e-3)
    with sdpa_kernel(SDPBackend.MATH):
        _, tangent = torch.func.jvp(loss, (q,), (q,))
    torch.testing.assert_close(tangent, (expected * q).sum(), rtol=1e-3, atol=1e-1)


@pytest.mark.usefixtures("active")
def test_inference_mode(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.inference_mode():
        q, k, v = qkv(device, dtype, requires_grad=False)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(out, by_hand(q, k, v, is_causal=True), rtol=3e-2, atol=3e-2)
    assert served()


@pytest.mark.parametrize("is_causal", [False, True])
def test_nested_tensors(device: str, is_causal: bool) -> None:
    if is_causal and device == "cpu":
        pytest.skip("torch has no causal attention of nested tensors on a CPU")
    for dtype in (torch.float32,) if device == "cpu" else (torch.bfloat16, torch.float32):
        offsets = cumulative([5, 11, 3], device).long()
        leaves = [random(19, 4, 16, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
        results = []
        for activate in (False, True):
            if activate:
                flash_ext.activate()
                sdpa_provider.forget_calls()
            try:
                nested = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in leaves]
                out = F.scaled_dot_product_attention(*nested, is_causal=is_causal).transpose(1, 2).values()
                results.append([out, *gradients(out, leaves)])
                if activate and device == "cuda":
                    assert served()
            finally:
                flash_ext.deactivate()
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("active")
def test_cuda_graph() -> None:
    q, k, v = qkv("cuda", torch.bfloat16, seqlens=(128, 128), dims=(64, 64))

    def step() -> list[Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(random(2, 4, 128, 64, device="cuda"))
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
