"""Names that torch does not promise, and the tensors and contexts of torch.distributed that they stand for."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flash_ext
from flash_ext import torch_private
from tests.oracle import random

needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="of torch.distributed")


@pytest.mark.parametrize("name", ["CAUSAL_BIAS", "FLEX_BLOCK_MASK", "MASKED_TENSOR", "NESTED_TENSOR"])
def test_names_of_classes(name: str) -> None:
    assert_names_a_class(getattr(torch_private, name))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_what_is_scripted_instead() -> None:
    def add(x: Tensor) -> Tensor:
        return x + 2

    other = add

    def add(x: Tensor) -> Tensor:  # type: ignore[no-redef]
        return x + 1

    torch_private.script_instead(add, other)

    def caller(x: Tensor) -> Tensor:
        return add(x)

    assert torch.jit.script(caller)(torch.tensor(1)) == 3 and caller(torch.tensor(1)) == 2


@needs_distributed
def test_name_of_dtensor() -> None:
    assert_names_a_class(torch_private.DTENSOR)


def assert_names_a_class(full_name: str) -> None:
    module, _, name = full_name.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    assert torch_private.full_name(cls) == full_name


# ---- Every other name, by what it is used for -----------------------------------------------------------------------


def test_tracing_and_transforms_are_seen() -> None:
    seen: dict[str, bool] = {}

    def traced(x: Tensor) -> Tensor:
        seen["trace"] = torch_private.is_tracing()
        return x + 1

    def transformed(x: Tensor) -> Tensor:
        seen["vmap"] = torch_private.is_functorch_active()
        return x + 1

    def sampled(x: Tensor) -> Tensor:
        seen["sample"] = torch_private.is_vmapped(x)
        return x.sum()

    def recorded(x: Tensor) -> Tensor:
        seen["make_fx"] = torch_private.is_proxy_tracing()
        return x + 1

    torch.jit.trace(traced, (torch.zeros(2),), check_trace=False)
    torch.func.vmap(transformed)(torch.zeros(2))
    torch.func.vmap(torch.func.grad(sampled))(torch.zeros(2, 3))
    make_fx(recorded)(torch.zeros(2))
    with FakeTensorMode():
        seen["fakes"] = torch_private.is_fake_mode()
    assert seen == dict.fromkeys(("trace", "vmap", "sample", "make_fx", "fakes"), True)
    assert not torch_private.is_tracing() and not torch_private.is_functorch_active()
    assert not torch_private.is_vmapped(torch.zeros(2))
    assert not torch_private.is_proxy_tracing() and not torch_private.is_fake_mode()


def test_forward_mode_is_seen() -> None:
    assert not torch_private.is_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.is_forward_mode()
        x = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with torch_private.set_forward_mode(False):
            assert torch.autograd.forward_ad.unpack_dual(x * 2).tangent is None
        with torch_private.set_forward_mode(True):
            assert torch.autograd.forward_ad.unpack_dual(x * 2).tangent is not None


def test_modes_autocast_and_gradients_are_seen() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    assert torch_private.num_dispatch_modes() == 0 and not torch_private.is_any_autocast_enabled()
    with TorchDispatchMode():
        assert torch_private.num_dispatch_modes() == 1
    with torch.autocast("cpu"):
        assert torch_private.is_any_autocast_enabled()
    x = torch.zeros(1)
    assert not torch_private.any_requires_grad(x, None, 3)
    assert torch_private.any_requires_grad(1.5, x.requires_grad_())


def test_hooks_of_all_modules_are_seen() -> None:
    assert not torch_private.has_any_global_hook()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert torch_private.has_any_global_hook()
    handle.remove()
    assert not torch_private.has_any_global_hook()


def test_a_torch_function_that_does_nothing() -> None:
    class Plain(Tensor):
        __torch_function__ = torch_private.without_torch_function  # type: ignore[assignment]

    assert type(torch.ones(2).as_subclass(Plain) + 1) is Tensor


def test_calls_that_begin_behind_a_key() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch_private.BelowAutograd():
        assert (x * 2).grad_fn is None
    version = x._version
    with torch.no_grad(), torch_private.BelowInplaceOrView():
        torch.ops.aten.add_.Scalar(x, 1)
    assert x._version == version
    autocast = torch_private.DispatchKeySet(torch_private.DispatchKey.AutocastCPU)
    with torch.autocast("cpu"), torch_private.WithoutKeys(autocast):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_sets_of_keys() -> None:
    key = torch_private.DispatchKey
    keys = torch_private.DispatchKeySet(key.CPU) | torch_private.DispatchKeySet(key.AutogradCPU)
    keys = keys | torch_private.DispatchKeySet(key.ADInplaceOrView)
    below_autograd = keys & torch_private.KEYS_BELOW_AUTOGRAD
    assert below_autograd.has(key.CPU) and below_autograd.has(key.ADInplaceOrView)
    assert not below_autograd.has(key.AutogradCPU)
    below_both = keys & torch_private.KEYS_BELOW_INPLACE_OR_VIEW
    assert below_both.has(key.CPU) and not below_both.has(key.ADInplaceOrView)


def test_a_function_of_autograd_below_torch_func() -> None:
    class Double(torch_private.SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    assert issubclass(torch.autograd.Function, torch_private.SingleLevelFunction)
    x = torch.ones(2, requires_grad=True)
    with torch_private.enable_single_level_autograd_function():
        Double.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_operators() -> None:
    op = torch.ops.aten.add.Tensor
    names = [argument.name for argument in torch_private.arguments_of(op)]
    assert names == ["self", "other", "alpha"]
    alpha = torch_private.arguments_of(op)[2]
    assert alpha.has_default_value() and alpha.default_value == 1
    x = torch.ones(2)
    keys = torch_private.DispatchKeySet(torch_private.DispatchKey.CPU)
    assert torch.equal(torch_private.handle_of(op).redispatch_boxed(keys, x, x), x + x)
    assert torch.equal(op._op(x, x), x + x)  # in the fast path, where a function would cost a frame
    torch_private.forget_dispatch(op)
    assert torch.equal(op(x, x), x + x)
    assert torch_private.has_kernel("aten::add.Tensor", "CPU")
    assert not torch_private.has_kernel("flash_ext::attention_forward", "MPS")


def test_backends_of_sdpa() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = torch_private.sdp_priority_order()
    assert SDPBackend.MATH.value in order and SDPBackend.FLASH_ATTENTION.value in order
    enabled = (
        torch_private.is_flash_sdp_enabled,
        torch_private.is_efficient_sdp_enabled,
        torch_private.is_cudnn_sdp_enabled,
    )
    with sdpa_kernel(SDPBackend.MATH):
        assert not any(each() for each in enabled)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        assert all(each() for each in enabled)
    query = torch.ones(1, 1, 2, 8)
    assert torch_private.SDP_CHOICE(query, query, query) in order


def test_the_registry_of_implementations() -> None:
    registry = torch_private.attention_registry
    assert all(hasattr(registry, f"{verb}_flash_attention_impl") for verb in ("register", "activate", "current"))
    assert registry.current_flash_attention_impl() is None


@pytest.mark.skipif(
    hasattr(torch_private.attention_registry, "restore_flash_attention_impl"), reason="this torch restores by itself"
)
def test_the_registry_forgets() -> None:
    registry = torch_private.attention_registry
    before, registry._FLASH_ATTENTION_ACTIVE = registry._FLASH_ATTENTION_ACTIVE, "somebody's"
    assert registry.current_flash_attention_impl() == "somebody's"
    torch_private.forget_attention_implementation()
    assert registry.current_flash_attention_impl() is None
    registry._FLASH_ATTENTION_ACTIVE = before


@pytest.mark.parametrize("use_gelu", [False, True])
def test_a_product_that_activates(use_gelu: bool) -> None:
    bias, x, weight = random(5), random(3, 4), random(4, 5)
    expected = F.gelu(bias + x @ weight, approximate="tanh") if use_gelu else F.relu(bias + x @ weight)
    found = torch_private.addmm_activation(bias, x, weight, use_gelu=use_gelu)
    # On a CPU it has the exact form of GELU.
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_a_function_of_all_values_of_a_type() -> None:
    found = torch_private.tree_map_only(int, str, ([1, "one"], {"two": (2, None)}))
    assert found == (["1", "one"], {"two": ("2", None)})


def test_jagged_tensors() -> None:
    x = torch.nested.nested_tensor_from_jagged(random(7, 2, 4), torch.tensor([0, 3, 7]), min_seqlen=3, max_seqlen=4)
    assert torch_private.jagged_dim(x) == 1
    assert torch_private.jagged_dim(x.transpose(1, 2)) == 2
    assert torch_private.known_seqlens(x) == (3, 4)
    unknown = torch.nested.nested_tensor_from_jagged(random(7, 2, 4), torch.tensor([0, 3, 7]))
    assert torch_private.known_seqlens(unknown) == (None, None)


# What of torch is named elsewhere: public, or a name that is tested above.
PRIVATE = re.compile(
    r"torch\._C\b|\btorch\._(?!_version__)\w|from torch[\w.]* import [^\n]*(?<![\w.])_\w|from torch[\w.]*\._\w"
    r"|forward_ad\._|\._(ragged_idx|maybe_\w+_seqlen|schema|handle|dispatch_cache|FLASH_ATTENTION_ACTIVE)\b"
)


def test_no_other_file_has_such_names() -> None:
    package = Path(flash_ext.__file__).parent
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line.partition("#")[0])
    ]
    assert not found, "\n".join(found)


# ---- torch's function -----------------------------------------------------------------------------------------------


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
            with pytest.raises(RuntimeError, match=r"context_parallel, .* context_parallel_attention"):
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
    with pytest.raises(TypeError, match=r"got a DTensor: pass its to_local\(\).* or call register_dtensor\(\)"):
        flash_ext.explain(**arguments)
    ok, reason = flash_ext.supports(**arguments)
    assert not ok and f"{argument} must be a Tensor" in reason and "register_dtensor()" in reason


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
