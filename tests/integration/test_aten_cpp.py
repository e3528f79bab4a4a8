"""The kernels in C++ of aten's fused attention operators: they do what those in Python do, bit for bit, and hand on
what they do not take. Registered for the device at hand, so that a CPU runs those of CUDA's operators too.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import flash_ext
from flash_ext.integrations import aten_attention, aten_cpp, sdpa_provider
from flash_ext.integrations.aten_calls import NotServed
from flash_ext.integrations.sdpa_routing import is_torchs
from tests.integration.test_aten_attention import low_precision, strides
from tests.integration.test_sdpa_provider import CPU_FLASH, ORDERS, SDPA, gradients, qkv
from tests.oracle import random

KINDS = ("flash", "efficient", "cudnn", "cpu")
OPERATORS = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "cpu": CPU_FLASH,
}


def python_kernel(name: str) -> Callable[..., Any]:
    """Of one of aten's operators."""
    kernels = {operator: kernel for of_key in sdpa_provider.KERNELS.values() for operator, kernel in of_key.items()}
    kernel: Callable[..., Any] = getattr(aten_attention, kernels[name])
    return kernel


@pytest.fixture
def deterministic() -> Iterator[None]:
    """So that two backwards on CUDA give the same bits."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def handed_on(device: str, deterministic: None) -> Iterator[list[str]]:
    """All kernels in C++, for the device at hand; the names of the operators whose calls they handed on to Python."""
    names: list[str] = []

    def recording(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            results = python_kernel(name)(*args, **kwargs)
            if type(results) is NotServed:
                raise NotImplementedError(f"nobody computes {name}")
            return results

        return run

    assert not sdpa_provider.is_active()
    aten_cpp.forget_calls()
    try:
        for name in aten_cpp.SCHEMAS:
            aten_cpp.override(name, device.upper(), recording(name))
        yield names
    finally:
        aten_cpp.restore()


def operator(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


def forward_args(kind: str, tensors: list[Tensor], bias: Tensor | None, is_causal: bool) -> tuple[Any, ...]:
    if kind in ("efficient", "cudnn"):
        return (*tensors, bias, True, 0.0, is_causal)
    return (*tensors, 0.0, is_causal)


def backward_args(
    kind: str, grad_out: Tensor, tensors: list[Tensor], bias: Tensor | None, results: Any, is_causal: bool
) -> tuple[Any, ...]:
    if kind == "cpu":
        return (grad_out, *tensors, *results, 0.0, is_causal)
    if kind == "flash":
        return (grad_out, *tensors, *results[:6], 0.0, is_causal, results[6], results[7])
    if kind == "cudnn":
        return (grad_out, *tensors, *results[:2], *results[6:8], bias, *results[2:6], 0.0, is_causal)
    return (grad_out, *tensors, bias, *results, 0.0, [True, True, True, False], is_causal)


def options_of(kind: str, bias: Tensor | None) -> dict[str, Any]:
    return {"attn_mask": bias, "scale": 0.3} if kind == "cpu" else {"scale": 0.3}


def assert_same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for ours, right in zip(found, expected, strict=True):
        if not isinstance(right, Tensor):
            assert ours == right
        else:
            assert (ours.shape, ours.dtype, strides(ours)) == (right.shape, right.dtype, strides(right))
            has_values = right.dtype.is_floating_point and right.dim() > 0
            assert not has_values or torch.equal(ours, right)


# ---- What they take -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("bias_shape", [None, (37, 53), (1, 1, 1, 53), (2, 4, 37, 53)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_bits_of_python(
    device: str,
    handed_on: list[str],
    kind: str,
    order: str,
    heads: tuple[int, int],
    bias_shape: tuple[int, ...] | None,
    is_causal: bool,
) -> None:
    if bias_shape is not None and (kind == "flash" or (len(bias_shape) == 4 and bias_shape[1] > heads[0])):
        pytest.skip("no such bias")
    name = OPERATORS[kind]
    dtypes = {low_precision(device), torch.bfloat16}
    for dtype in dtypes:
        tensors = qkv(device, dtype, heads=heads, order=order, dims=(16, 24), requires_grad=False)
        if kind in ("flash", "cpu"):
            tensors[2] = tensors[2][..., :16].clone(memory_format=torch.preserve_format)
        bias = None if bias_shape is None else random(*bias_shape, dtype=dtype, device=device)
        args, options = forward_args(kind, tensors, bias, is_causal), options_of(kind, bias)
        results = python_kernel(name)(*args, **options)
        assert_same(operator(name)(*args, **options), results)

        grad_out = torch.randn_like(results[0])
        args = backward_args(kind, grad_out, tensors, bias, results, is_causal)
        expected = python_kernel(f"{name}_backward")(*args, **options)
        assert_same(operator(f"{name}_backward")(*args, **options), expected)
    assert not handed_on
    assert aten_cpp.calls() == {name: len(dtypes), f"{name}_backward": len(dtypes)}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sizes", [(1, 7), (64, 1), (32, 32), (5, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes(device: str, handed_on: list[str], kind: str, sizes: tuple[int, int], batch: int) -> None:
    name, tensors = OPERATORS[kind], qkv(device, low_precision(device), batch=batch, seqlens=sizes, requires_grad=False)
    args = forward_args(kind, tensors, None, False)
    results = python_kernel(name)(*args)
    assert_same(operator(name)(*args), results)
    args = backward_args(kind, torch.randn_like(results[0]), tensors, None, results, False)
    assert_same(operator(f"{name}_backward")(*args), python_kernel(f"{name}_backward")(*args))
    assert not handed_on


def test_without_a_log_sum_exp(device: str, handed_on: list[str]) -> None:
    args = (*qkv(device, low_precision(device), requires_grad=False), None, False)
    name = OPERATORS["efficient"]
    assert_same(operator(name)(*args), python_kernel(name)(*args))
    assert not handed_on


@pytest.mark.parametrize("kind", KINDS)
def test_autograds_formulas(device: str, handed_on: list[str], kind: str) -> None:
    """Which give undefined tensors where Python has None."""
    tensors = qkv(device, low_precision(device))
    out = operator(OPERATORS[kind])(*forward_args(kind, tensors, None, False))[0]
    found = torch.autograd.grad(out, tensors, torch.ones_like(out))
    expected = flash_ext.attention(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)
    for ours, right in zip(found, torch.autograd.grad(expected, tensors, torch.ones_like(out)), strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)
    assert not handed_on
    assert aten_cpp.calls() == {OPERATORS[kind]: 1, f"{OPERATORS[kind]}_backward": 1}


# ---- What they hand on ----------------------------------------------------------------------------------------------


def exceptions(device: str) -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(kind, arguments, options) of calls that Python has to see, by what is special about them."""
    q, k, v = qkv(device, low_precision(device), requires_grad=False)
    bias = torch.zeros(37, 53, dtype=q.dtype, device=device)
    out = torch.zeros_like(q)
    lse = torch.zeros(2, 4, 64, device=device)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    backward = (q, k, v, out, lse[..., :37].contiguous())
    shared = (out.sum().expand_as(q), *backward)
    return {
        "head_dim": ("flash", (q[..., :12], k[..., :12], v[..., :12]), {}),
        "expanded query": ("flash", (q[:1].expand(2, -1, -1, -1), k, v), {}),
        "transposed": ("flash", (q, k.transpose(2, 3).contiguous().transpose(2, 3), v), {}),
        "grad_out of a sum": ("cpu_backward", (*shared, 0.0, False), {}),
        "gradient of a bias": (
            "efficient_backward",
            (out, q, k, v, bias, out, lse, seed, seed, 0.0, [True] * 4),
            {},
        ),
        "lse of four dimensions": (
            "flash_backward",
            (out, *backward[:4], lse[..., :37].unsqueeze(0), None, None, 37, 53, 0.0, False, None, None),
            {},
        ),
    }


@pytest.mark.parametrize("name", exceptions("cpu"))
def test_handed_on(device: str, handed_on: list[str], name: str) -> None:
    kind, args, options = exceptions(device)[name]
    op = OPERATORS[kind.removesuffix("_backward")] + ("_backward" if kind.endswith("_backward") else "")
    args = tuple(torch.Tensor() if a is None and kind == "flash_backward" else a for a in args)
    try:
        expected = python_kernel(op)(*args, **options)
    except RuntimeError as error:
        with pytest.raises(type(error)) as found:
            operator(op)(*args, **options)
        assert str(found.value) == str(error)
    else:
        assert_same(operator(op)(*args, **options), expected)
    assert handed_on == [op]
    assert not aten_cpp.calls()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("flash", {"dropout_p": 0.1}),
        ("flash", {"return_debug_mask": True}),
        ("flash", {"key": (2, 3, 53, 16)}),
        ("flash", {"query": (2, 4, 37, 264), "key": (2, 4, 53, 264)}),
        ("cpu", {"dropout_p": 0.1}),
        ("cpu", {"attn_mask": (4, 37, 53)}),
        ("efficient", {"dropout_p": 0.1}),
        ("cudnn", {"dropout_p": 0.1}),
        ("cudnn", {"return_debug_mask": True}),
    ],
    ids=str,
)
def test_the_exception_of_python_arrives(device: str, handed_on: list[str], kind: str, change: dict[str, Any]) -> None:
    q, k, v = qkv(device, low_precision(device), requires_grad=False)
    arguments: dict[str, Any] = {"query": q, "key": k, "value": v}
    if kind in ("efficient", "cudnn"):
        arguments |= {"attn_bias": None, "compute_log_sumexp": True}
    for name, value in change.items():
        arguments[name] = q.new_zeros(value) if isinstance(value, tuple) else value
    with pytest.raises(NotImplementedError, match=f"nobody computes {OPERATORS[kind]}"):
        operator(OPERATORS[kind])(**arguments)
    assert handed_on == [OPERATORS[kind]]


class StopHere(Exception):
    pass


EXCEPTIONS = [
    torch.OutOfMemoryError("no memory"),
    NotImplementedError("not here"),
    RuntimeError(),
    ValueError("wrong value"),
    IndexError("wrong index"),
    TypeError("wrong type"),
    KeyError("a", 1),
    KeyboardInterrupt(),
    StopHere("stop", {"here": 1}),
]


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_exceptions_are_the_same_objects(device: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the operators, of SDPA and of autograd's backward, which has a thread of its own on CUDA."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    def raised_by(call: Callable[[], Any]) -> BaseException:
        with pytest.raises(type(error)) as found:
            call()
        return found.value

    kind = "cpu" if device == "cpu" else "flash"
    name = OPERATORS[kind]
    q, k, v = qkv(device, low_precision(device))
    with flash_ext.activated():
        monkeypatch.setitem(aten_cpp._python_kernels, (name, device.upper()), fail)
        monkeypatch.setitem(aten_cpp._python_kernels, (f"{name}_backward", device.upper()), fail)
        assert raised_by(lambda: operator(name)(q, k, v, 0.1)) is error
        backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION
        for context in (nullcontext, torch.no_grad, torch.inference_mode):
            with context(), torch.nn.attention.sdpa_kernel([backend]):  # no scale of ours: torch's fused operator
                assert raised_by(lambda: F.scaled_dot_product_attention(q, k, v, scale=math.inf)) is error
        out = operator(name)(q, k, v)[0]
        # Nothing is known of the order of what repeats an element.
        shared = (out, torch.ones_like(out).transpose(2, 3).contiguous().transpose(2, 3))
        assert raised_by(lambda: torch.autograd.grad(shared[0], q, shared[1])) is error


def test_exceptions_are_not_kept(device: str) -> None:
    error, name = StopHere(), OPERATORS["cpu" if device == "cpu" else "flash"]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    q, k, v = qkv(device, low_precision(device), requires_grad=False)
    counts = []
    try:
        aten_cpp.override(name, device.upper(), fail)
        for _ in range(3):
            with pytest.raises(StopHere):
                operator(name)(q, k, v, 0.1)
            error.__traceback__ = None
            gc.collect()
            counts.append(sys.getrefcount(error))
    finally:
        aten_cpp.restore()
    assert len(set(counts)) == 1


def test_an_operator_with_other_arguments_stays_with_python(monkeypatch: pytest.MonkeyPatch) -> None:
    name = OPERATORS["flash"]
    assert all(aten_cpp.has_cpp_kernel(each) for each in aten_cpp.SCHEMAS)
    assert not aten_cpp.has_cpp_kernel(SDPA)
    monkeypatch.setitem(aten_cpp.SCHEMAS, name, aten_cpp.SCHEMAS[name].replace("float dropout_p", "float dropout"))
    assert not aten_cpp.has_cpp_kernel(name)


def test_settings_that_are_asked_for(request: pytest.FixtureRequest) -> None:
    assert aten_cpp._torch_settings(False) % 2 == torch.are_deterministic_algorithms_enabled()
    request.getfixturevalue("deterministic")
    assert aten_cpp._torch_settings(False) % 2 == 1


def test_tf32_is_asked_for_float32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten_cpp, "torch_allows_tf32", lambda: True)
    assert aten_cpp._torch_settings(True) // 2 == 1
    assert aten_cpp._torch_settings(False) // 2 == 0


# ---- Under activate() -----------------------------------------------------------------------------------------------


def test_calls_do_not_come_to_python(device: str) -> None:
    q, k, v = qkv(device, low_precision(device))
    for _ in range(2):  # activation, and the next one
        with flash_ext.activated():
            sdpa_provider.forget_calls()
            out = F.scaled_dot_product_attention(q, k, v)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            assert aten_cpp.calls() == sdpa_provider.calls_served()
            assert sum(aten_cpp.calls().values()) == 2
            sdpa_provider.forget_calls()
        out = F.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert not aten_cpp.calls()


@pytest.mark.usefixtures("deterministic")
def test_threads(device: str) -> None:
    """They have the bits that one of them has alone."""
    q, k, v = qkv(device, low_precision(device))

    def step() -> list[Tensor]:
        out = F.scaled_dot_product_attention(q, k, v)
        return [out, *gradients(out, (q, k, v))]

    found: list[list[Tensor]] = []
    with flash_ext.activated():
        expected = step()
        sdpa_provider.forget_calls()
        threads = [threading.Thread(target=lambda: found.extend(step() for _ in range(20))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(aten_cpp.calls().values()) == {60}
    assert len(found) == 60
    for n, results in enumerate(found):
        for name, ours, right in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
            assert torch.equal(ours, right), f"{name} of step {n}: off by {(ours - right).abs().max().item():.2e}"


# ---- The way to the operators ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
def test_results_of_sdpa_are_those_of_the_way_by_python(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(device, torch.bfloat16, order="heads")

    def step() -> list[Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, scale=0.3)
        return [out, *gradients(out, (q, k, v))]

    with flash_ext.activated():
        found = step()
    monkeypatch.setattr(aten_cpp, "override", lambda *args: None)
    with flash_ext.activated():
        sdpa_provider.forget_calls()
        expected = step()
        assert sdpa_provider.calls_served() and not aten_cpp.calls()
    assert_same(found, expected)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_exceptions_of_hooks_pass(device: str, dropout_p: float) -> None:
    def stop(x: Tensor) -> Tensor:
        raise StopHere

    q, k, v = qkv(device, low_precision(device))
    with flash_ext.activated(), torch.autograd.graph.saved_tensors_hooks(stop, lambda x: x), pytest.raises(StopHere):
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)


def test_sizes_that_are_traced_are_not_compared(device: str) -> None:
    """As often compiled with as without."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    counts = []
    for activate in (False, True):
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(
            F.scaled_dot_product_attention, dynamic=True, backend=aot_autograd(fw_compiler=backend)
        )
        with flash_ext.activated() if activate else nullcontext():
            for seqlens in ((9, 9), (16, 16), (7, 12)):
                q, k, v = qkv(device, low_precision(device), seqlens=seqlens, requires_grad=False)
                compiled(q, k, v)
        counts.append(len(graphs))
    assert counts[0] == counts[1]


def test_common_calls_are_torchs_at_once() -> None:
    q, k, v = qkv("cpu", seqlens=(37, 37), requires_grad=False)
    shorter = k[:, :, :9]
    assert is_torchs("cpu", q, k, v)
    assert is_torchs("cpu", q, k, v, None, 0.0, True)
    assert is_torchs("cpu", q, shorter, shorter)
    mask = torch.ones(37, 37, dtype=torch.bool)
    others: list[tuple[Any, ...]] = [
        (q, k, v, mask),
        (q, k, v, None, 0.1),
        (q, shorter, shorter, None, 0.0, True),
        (q, k[:, :2], v[:, :2]),
        (q, k[:1], v[:1]),
        (q, k, v[..., :8]),
        (q[0], k[0], v[0]),
        (q.transpose(2, 3).contiguous().transpose(2, 3), k, v),
        (torch.nn.Parameter(q), k, v),
    ]
    assert not any(is_torchs("cpu", *args) for args in others)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not is_torchs("cpu", q, k, v)  # its calls are counted


def test_common_calls_on_cuda_need_the_operator_that_takes_them_all() -> None:
    q, k, v = qkv("cpu", seqlens=(37, 37), requires_grad=False)
    assert is_torchs("cuda", q, k, v)
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
        assert not is_torchs("cuda", q, k, v)
