"""float32 on CUDA: accurate by default, TF32 where torch's float32 matmul setting allows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_ext
import flash_ext._plan as _plan
from flash_ext.ops import ScoreOptions
from tests.oracle import Call, assert_matches_oracle, make_call, run_library, run_reference

MATMUL = torch.backends.cuda.matmul
TF32_EPS = 2.0**-11


@pytest.fixture
def restored_precision() -> Iterator[None]:
    before = MATMUL.fp32_precision
    yield
    torch.set_float32_matmul_precision("high" if before == "tf32" else "highest")


class Spy(TorchDispatchMode):
    """What the operators are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        if func.namespace == "flash_ext" and "allow_tf32" in names:
            allowed = dict(zip(names, args, strict=False)).get("allow_tf32", False)  # defaults at the end are left out
            self.seen.append((func._schema.name.removeprefix("flash_ext::"), allowed))
        return func(*args, **(kwargs or {}))


def allow_tf32_by(setting: str) -> None:
    match setting:
        case "set_float32_matmul_precision":
            torch.set_float32_matmul_precision("high")
        case "allow_tf32":
            MATMUL.allow_tf32 = True
        case "fp32_precision":
            MATMUL.fp32_precision = "tf32"


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize("setting", ["set_float32_matmul_precision", "allow_tf32", "fp32_precision"])
def test_the_setting_reaches_every_operator(device: str, dtype: torch.dtype, setting: str) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, device=device, dtype=dtype) for _ in range(3))
    expected = device == "cuda" and dtype == torch.float32
    for allowed in (False, True):
        torch.set_float32_matmul_precision("highest")
        if allowed:
            allow_tf32_by(setting)
        with Spy() as spy:
            _, lse = flash_ext.attention(q, k, v, return_lse=True)
            flash_ext.attention_weights(q, k, lse)
            flash_ext.decode(q, k, v)
        assert len(spy.seen) == 3
        assert {value for _, value in spy.seen} == {allowed and expected}


@pytest.mark.usefixtures("restored_precision")
def test_the_backward_does_as_the_forward_did(device: str) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, device=device, requires_grad=True) for _ in range(3))
    seen = []
    for before, after in (("highest", "high"), ("high", "highest")):
        torch.set_float32_matmul_precision(before)
        out, lse = flash_ext.attention(q, k, v, return_lse=True)
        loss = out.sum() + flash_ext.attention_weights(q, k, lse.detach()).sum()
        torch.set_float32_matmul_precision(after)
        with Spy() as spy:
            loss.backward()
        assert {name for name, _ in spy.seen} == {"attention_backward", "attention_weights_backward"}
        seen.append({value for _, value in spy.seen})
    assert seen == [{False}, {device == "cuda"}]


@pytest.mark.usefixtures("restored_precision")
def test_compiled_code_follows_the_setting(device: str) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, device=device) for _ in range(3))
    given: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        given.extend(
            ScoreOptions(*node.args[3:]).allow_tf32
            for node in graph.graph.nodes
            if node.target is torch.ops.flash_ext.attention_forward.default
        )
        return graph

    compiled = torch.compile(flash_ext.attention, fullgraph=True, backend=backend)
    for precision in ("highest", "high", "highest"):
        torch.set_float32_matmul_precision(precision)
        compiled(q, k, v)
    assert given[:2] == [False, device == "cuda"]


def wide_call(head_dim: int, device: str) -> Call:
    return make_call(1, 300, 2500, 2, 1, head_dim, dtype=torch.float32, device=device).with_random_gradients()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_float32_is_as_accurate_as_a_float32_matmul(device: str, head_dim: int) -> None:
    """Against float64, over enough keys for sums that drift to show."""
    assert_matches_oracle(wide_call(head_dim, device))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float32_does_not_drift_over_many_keys(device: str, head_dim: int) -> None:
    """Tensor cores round sums towards zero: values of one sign and even weights show it where such sums grow long."""
    seqlen_k = 2048 if device == "cpu" else 32768
    q, k, v = (torch.randn(1, seqlen, 2, head_dim, device=device) for seqlen in (64, seqlen_k, seqlen_k))
    call = Call(0.2 * q, k, v + 1.0)
    ref = run_reference(call, torch.float64)["out"]
    error = run_library(call)["out"].double() - ref
    rounding = 2.0**-24 * ref.abs().mean()
    assert error.mean().abs() <= 4 * rounding
    assert error.square().mean().sqrt() <= seqlen_k**0.5 / 2 * rounding  # what a chain of FMA would have


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float32_gradients_do_not_drift_over_many_queries(device: str, head_dim: int) -> None:
    seqlen_q = 2048 if device == "cpu" else 16384
    q, k, v, grad_out = (torch.randn(1, seqlen, 2, head_dim, device=device) for seqlen in (seqlen_q, 64, 64, seqlen_q))
    call = Call(0.2 * q, k, v, grad_out=grad_out + 1.0)
    ref = run_reference(call, torch.float64, ("v",))["dv"]
    error = run_library(call, ("v",))["dv"].double() - ref
    rounding = 2.0**-24 * ref.abs().mean()
    assert error.mean().abs() <= 4 * rounding
    assert error.square().mean().sqrt() <= seqlen_q**0.5 / 2 * rounding


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tf32_is_as_accurate_as_tf32(device: str, head_dim: int) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no TF32")
    call = wide_call(head_dim, device)
    names = ("q", "k", "v")
    ref = run_reference(call, torch.float64, names)
    torch.set_float32_matmul_precision("highest")
    accurate = run_library(call, names)
    torch.set_float32_matmul_precision("high")
    coarse = run_library(call, names)
    for name, expected in ref.items():
        scale = expected.abs().max().item()
        error, accurate_error = ((result[name].double() - expected).abs().max().item() for result in (coarse, accurate))
        assert error <= 16 * TF32_EPS * max(1.0, scale), name
        assert accurate_error < error, name


def test_plans_say_which_products_run() -> None:
    def said(**fields: Any) -> str:
        return " ".join(_plan.make_plan(_plan.Problem(**fields)).reasons)

    cuda = dict(device="cuda", compute_capability=90, dtype="float32")
    for allow_tf32 in (False, True):
        assert "as accurate as float32" in said(**cuda, operation="decode", allow_tf32=allow_tf32)
    assert "as accurate as float32" in said(**cuda)
    assert "in TF32" in said(**cuda, allow_tf32=True)
    assert "TF32" not in said(**cuda | {"dtype": "bfloat16"}) + said(dtype="float32", allow_tf32=True)
