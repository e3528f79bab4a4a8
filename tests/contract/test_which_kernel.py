"""The kernel that runs is the one that ``explain`` names, for every row of the plan on CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flash_ext
from tests.oracle import make_call

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="profiles CUDA kernels")

# The main kernel of each operation; what prepares it, clears and converts is beside the point.
MAIN_KERNEL = re.compile(
    r"flash_ext::(?P<arch>sm\d+)::(?P<name>forward(?:_options|_blocks|_f32)?|backward(?:_persistent|_wide|_short|_f32_halves|_f32)?|"
    r"slab_dq|bias_gradient|decode|weights(?:_d[qk])?)_kernel\b"
)
# Two rooms share a kernel, whose policies they are.
WITHOUT_OVERLAP = "sm90::BackwardConfig<"
ROOM = {
    "forward_options": "forward",
    "forward_blocks": "forward",
    "backward_f32_halves": "backward_f32",
    "slab_dq": "backward",
    "weights_dq": "weights",
    "weights_dk": "weights",
}


def room_of(kernel: str) -> str | None:
    """The path below csrc/kernels of a main kernel."""
    found = MAIN_KERNEL.search(kernel)
    if found is None:
        return None
    room = "backward_options" if WITHOUT_OVERLAP in kernel else ROOM.get(found["name"], found["name"])
    return f"{found['arch']}/{room}"


def kernels_of(run: Callable[[], object]) -> set[str]:
    """The main kernels that ran, as paths below csrc/kernels."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return {room for event in profile.events() if (room := room_of(event.name))}


def bias_of(dtype: torch.dtype, heads: int = 4) -> torch.Tensor:
    return torch.randn(2, heads, 256, 256, device="cuda", dtype=dtype)


OPTIONS: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "plain": lambda dtype: {},
    "causal": lambda dtype: {"causal": True},
    "window": lambda dtype: {"window_size": (64, 3)},
    "sink": lambda dtype: {"sink": torch.randn(4, device="cuda")},
    "softcap": lambda dtype: {"softcap": 20.0},
    "alibi": lambda dtype: {"alibi_slopes": torch.rand(4, device="cuda")},
    "bias": lambda dtype: {"bias": bias_of(dtype)},
    "float32 bias": lambda dtype: {"bias": bias_of(torch.float32)},
    "mask": lambda dtype: {"mask": torch.rand(2, 1, 256, 256, device="cuda") < 0.7},
    "bias and mask": lambda dtype: {
        "bias": bias_of(dtype),
        "mask": torch.rand(2, 1, 256, 256, device="cuda") < 0.7,
    },
    "block mask": lambda dtype: {"block_mask": flash_ext.BlockMask.causal(256, 256, device="cuda")},
    "dropout": lambda dtype: {"dropout_p": 0.1},
    "negative scale": lambda dtype: {"softmax_scale": -0.1},
    "deterministic": lambda dtype: {"deterministic": True},
}
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_attention(dtype: torch.dtype, head_dim: int, head_dim_v: int, option: str) -> None:
    call = make_call(2, 256, 256, 4, 2, head_dim, head_dim_v, dtype=dtype, device="cuda")
    options = OPTIONS[option](dtype)
    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v)]
    if "bias" in options:
        leaves.append(options["bias"].requires_grad_())
    out = None

    def forward() -> None:
        nonlocal out
        out = flash_ext.attention(call.q, call.k, call.v, **options)

    def backward() -> None:
        assert out is not None
        torch.autograd.grad(out.float().sum(), leaves)

    explained = flash_ext.explain(call.q, call.k, call.v, **options)
    assert kernels_of(forward) == {explained.plan.kernel}
    explained = flash_ext.explain(call.q, call.k, call.v, operation="backward", **options)
    expected = {explained.plan.kernel} | ({explained.plan.bias_kernel} - {""})
    assert kernels_of(backward) == expected


def test_the_kernel_family_of_a_test(device: str, kernel_family: str) -> None:
    """A GPU's own kernels, and those for all GPUs, as the fixture says."""
    call = make_call(2, 256, 256, 4, 2, 64, dtype=torch.bfloat16, device=device)
    explained = flash_ext.explain(call.q, call.k, call.v).plan.kernel
    assert explained == f"{kernel_family or 'cpu'}/forward"
    if device == "cuda":
        assert kernels_of(lambda: flash_ext.attention(call.q, call.k, call.v)) == {explained}


@pytest.mark.parametrize("seqlen", [64, 256, 257])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_short_sequences(seqlen: int, heads_kv: int) -> None:
    call = make_call(2, seqlen, seqlen, 4, heads_kv, 64, dtype=torch.bfloat16, device="cuda")
    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v)]
    explained = flash_ext.explain(call.q, call.k, call.v, operation="backward")
    out = flash_ext.attention(call.q, call.k, call.v)
    assert kernels_of(lambda: torch.autograd.grad(out.float().sum(), leaves)) == {explained.plan.kernel}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_gradient_of_bias(in_pieces: bool, deterministic: bool) -> None:
    """Whose rows are no pieces of 16 bytes and so are copied first, or beside a backward that needs no TMA for itself;
    and a gradient of out with strides of 0."""
    call = make_call(2, 256, 256, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(2, 4, 256, 264, device="cuda", dtype=torch.bfloat16)
    bias = (rows[..., :256] if in_pieces else rows[..., 1:257]).requires_grad_()
    explanation = flash_ext.explain(
        call.q, call.k, call.v, operation="backward", bias=bias, deterministic=deterministic
    )
    explained, problem = explanation.plan, explanation.problem
    out = flash_ext.attention(call.q, call.k, call.v, bias=bias, deterministic=deterministic)
    found = kernels_of(lambda: torch.autograd.grad(out.sum(), bias))
    assert explained.bias_kernel in found
    assert found <= {explained.kernel, explained.bias_kernel}
    if problem.compute_capability == 90 and problem.own_kernels:
        assert explained.bias_kernel == "sm90/bias_gradient"


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_strides_of_zero(which: str) -> None:
    call = make_call(2, 256, 256, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    setattr(call, which, getattr(call, which)[:1].expand(2, -1, -1, -1))
    explained = flash_ext.explain(call.q, call.k, call.v)
    assert kernels_of(lambda: flash_ext.attention(call.q, call.k, call.v)) == {explained.plan.kernel}


@pytest.mark.parametrize("seqlen_q", [1, 4, 64, 512])
def test_decode(dtype: torch.dtype, seqlen_q: int) -> None:
    q = torch.randn(4, seqlen_q, 8, 64, device="cuda", dtype=dtype)
    k_cache, v_cache = (torch.randn(4, 1024, 2, 64, device="cuda", dtype=dtype) for _ in range(2))
    explained = flash_ext.explain(q, k_cache, v_cache, operation="decode", causal=True)
    assert kernels_of(lambda: flash_ext.decode(q, k_cache, v_cache, causal=True)) == {explained.plan.kernel}


def test_weights() -> None:
    call = make_call(2, 100, 130, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    _, lse = flash_ext.attention(call.q, call.k, call.v, return_lse=True)
    explained = flash_ext.explain(call.q, call.k, call.v, operation="weights")
    assert kernels_of(lambda: flash_ext.attention_weights(call.q, call.k, lse)) == {explained.plan.kernel}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_weights(dtype: torch.dtype) -> None:
    call = make_call(2, 100, 130, 4, 2, 64, dtype=dtype, device="cuda")
    q, k = call.q.requires_grad_(), call.k.requires_grad_()
    weights = flash_ext.attention_weights(q, k, torch.full((2, 4, 100), 5.0, device="cuda"))
    explained = flash_ext.explain(call.q, call.k, call.v, operation="weights_backward")
    assert kernels_of(lambda: torch.autograd.grad(weights.float().sum(), (q, k))) == {explained.plan.kernel}


def test_appending(dtype: torch.dtype) -> None:
    q, new = torch.randn(4, 1, 8, 64, device="cuda", dtype=dtype), torch.randn(4, 1, 2, 64, device="cuda", dtype=dtype)
    caches = [torch.randn(4, 1024, 2, 64, device="cuda", dtype=dtype) for _ in range(2)]
    lengths = torch.full((4,), 500, dtype=torch.int32, device="cuda")
    explained = flash_ext.explain(q, *caches, operation="decode", cache_seqlens=lengths)
    found = kernels_of(lambda: flash_ext.decode(q, *caches, k=new, v=new, cache_seqlens=lengths))
    assert found == {explained.plan.kernel}
