"""Names that torch does not promise, and the tensors and contexts of torch.distributed that they stand for."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext
from flash_ext import torch_private
from tests.oracle import random

needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="of torch.distributed")


@pytest.mark.parametrize("name", ["CAUSAL_BIAS", "FLEX_BLOCK_MASK", "MASKED_TENSOR", "NESTED_TENSOR"])
def test_names_of_classes(name: str) -> None:
    assert_names_a_class(getattr(torch_private, name))


@needs_distributed
def test_name_of_dtensor() -> None:
    assert_names_a_class(torch_private.DTENSOR)


def assert_names_a_class(full_name: str) -> None:
    module, _, name = full_name.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    assert torch_private.full_name(cls) == full_name


def test_torchs_function() -> None:
    assert F.scaled_dot_product_attention is torch_private.TORCH_SDPA
    assert not torch_private.in_context_parallel()


def test_another_function_in_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own, as those do it who cannot change a model."""
    query, key, value = (random(2, 2, 3, 8) for _ in range(3))
    expected = flash_ext.scaled_dot_product_attention(query, key, value)
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash_ext.scaled_dot_product_attention)
    assert not torch_private.in_context_parallel()
    assert torch.equal(F.scaled_dot_product_attention(query, key, value), expected)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def calls(x: Tensor) -> dict[str, Any]:
    """Of each function that attends."""
    lse, packed = torch.zeros(1, 2, 4), x[0]
    cu = torch.tensor([0, 4], dtype=torch.int32)
    module = flash_ext.MultiheadAttention(16, 2)
    rows = torch.zeros(4, 16)
    return {
        "attention": lambda: flash_ext.attention(x, x, x),
        "attention_weights": lambda: flash_ext.attention_weights(x, x, lse),
        "decode": lambda: flash_ext.decode(x, x, x),
        "scaled_dot_product_attention": lambda: flash_ext.scaled_dot_product_attention(x, x, x),
        "flash_attn_func": lambda: flash_ext.flash_attn_func(x, x, x),
        "flash_attn_varlen_func": lambda: flash_ext.flash_attn_varlen_func(packed, packed, packed, cu, cu, 4, 4),
        "flash_attn_with_kvcache": lambda: flash_ext.flash_attn_with_kvcache(x, x, x),
        "MultiheadAttention": lambda: module(rows, rows, rows),
    }


@needs_distributed
def test_context_parallel_is_refused(mesh: Any) -> None:
    from torch.distributed.tensor.experimental import context_parallel

    x = random(1, 4, 2, 8)
    compiled = torch.compile(flash_ext.attention, backend="aot_eager")
    expected = compiled(x, x, x)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        assert torch_private.in_context_parallel()
        for name, call in {**calls(x), "compiled": lambda: compiled(x, x, x)}.items():
            with pytest.raises(RuntimeError, match=r"context_parallel, .* flash_ext\.merge"):
                call()
                pytest.fail(f"{name} attends")
        ok, reason = flash_ext.supports(x, x, x)
        assert not ok and "context_parallel" in reason
    for call in calls(x).values():
        call()
    torch.testing.assert_close(compiled(x, x, x), expected)


@needs_distributed
@pytest.mark.parametrize("argument", ["q", "k", "v", "bias", "sink"])
def test_dtensors_are_refused(mesh: Any, argument: str) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    x = random(1, 4, 2, 8)
    arguments = dict(q=x, k=x, v=x, bias=random(1, 1, 4, 4), sink=random(2))
    flash_ext.attention(**arguments)
    arguments[argument] = DTensor.from_local(arguments[argument], mesh, [Replicate()])
    with pytest.raises(TypeError, match=rf"^{argument} must be a Tensor.* got a DTensor: pass its to_local\(\)"):
        flash_ext.attention(**arguments)


@needs_distributed
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 renames the collective
def test_results_of_collectives_are_waited_for(mesh: Any) -> None:
    """AsyncCollectiveTensor: a class of its own, whose operators wait for what it stands for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor_autograd

    x = random(1, 4, 2, 8).requires_grad_()
    gathered = [all_gather_tensor_autograd(x, 0, mesh) for _ in range(3)]
    assert all(isinstance(t, AsyncCollectiveTensor) for t in gathered)
    out = flash_ext.attention(*gathered, causal=True)
    expected = flash_ext.attention(x, x, x, causal=True)
    torch.testing.assert_close(out + 0, expected)
    found, wanted = (torch.autograd.grad(t.square().sum(), x)[0] for t in (out, expected))
    torch.testing.assert_close(found, wanted)


def test_nothing_heavy_is_imported() -> None:
    """The compiler and DTensor take seconds; whoever has an object of theirs has imported them."""
    heavy = ("torch._dynamo", "torch.distributed.tensor", "torch.nn.attention.bias")
    code = f"import flash_ext, sys; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
