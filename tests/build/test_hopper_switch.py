"""FLASH_EXT_HOPPER leaves out the kernels for compute capability 9.0, in the operators and in what explain() says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import flash_ext

CALL = """
import sys, torch, flash_ext
dtype, head_dim = getattr(torch, sys.argv[1]), int(sys.argv[2])
q, k, v = (torch.randn(1, 300, 2, head_dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
out = flash_ext.attention(q, k, v)
scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * head_dim**-0.5
expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.float())
assert (out.float() - expected).abs().max() < 0.02
gradients = (torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (out, expected))
assert all((a.float() - b.float()).abs().max() < 0.05 for a, b in zip(*gradients))
for operation in ("forward", "backward"):
    print(flash_ext.explain(q, k, v, operation=operation))
"""


def is_hopper_with_kernels() -> bool:
    if not torch.cuda.is_available() or "90a" not in flash_ext.build_info()["cuda_archs"]:
        return False
    return torch.cuda.get_device_capability() == (9, 0)


pytestmark = pytest.mark.skipif(not is_hopper_with_kernels(), reason="kernels for Hopper, on a GPU of that kind")


def run_with(value: str, dtype: str = "bfloat16", head_dim: int = 64) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FLASH_EXT_HOPPER": value}
    return subprocess.run(
        [sys.executable, "-c", CALL, dtype, str(head_dim)], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("dtype", "head_dim", "forward", "backward"),
    [
        ("bfloat16", 64, "sm90/forward", "sm90/backward_persistent"),
        ("bfloat16", 128, "sm90/forward", "sm90/backward"),
        ("bfloat16", 256, "sm90/forward", "sm90/backward_wide"),
        ("float32", 64, "sm90/forward_f32", "sm90/backward_f32"),
        ("float32", 256, "sm90/forward_f32", "sm90/backward_f32"),
    ],
)
@pytest.mark.parametrize("value", ["1", "", "0"])
def test_the_switch_chooses(value: str, dtype: str, head_dim: int, forward: str, backward: str) -> None:
    run = run_with(value, dtype, head_dim)
    assert run.returncode == 0, run.stderr
    for operation, hopper in (("forward", forward), ("backward", backward)):
        kernel = f"sm80/{operation}" if value == "0" else hopper
        assert f"{kernel} " in run.stdout


def test_it_is_0_or_1() -> None:
    run = run_with("2")
    assert run.returncode != 0 and "FLASH_EXT_HOPPER must be 0 or 1, got 2" in run.stderr
