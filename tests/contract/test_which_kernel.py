"""The kernel that runs is the one that ``explain`` names, and the variant of it, for every row of the plan on CUDA.

Which kernels and variants the calls of this page reach is known without a GPU: the plan says it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flash_ext
from flash_ext import _plan
from flash_ext.planning import problem_of
from tests.build.plans import SHARED
from tests.decode_oracle import Decode, make_decode, paged
from tests.oracle import Call, int32, make_call

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="profiles CUDA kernels")

# What a kernel of the plan is in a profile: the functions that do its work. What prepares, clears, converts or combines
# is beside the point.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "sm90/forward": ("forward_kernel",),
    "sm90/forward_short": ("forward_short_kernel",),
    "sm90/forward_f32": ("forward_f32_kernel",),
    "sm90/backward": ("backward_kernel",),
    "sm90/backward_options": ("backward_kernel",),
    "sm90/backward_persistent": ("backward_persistent_kernel",),
    "sm90/backward_wide": ("backward_wide_kernel",),
    "sm90/backward_short": ("backward_short_kernel",),
    "sm90/backward_f32": ("backward_f32_kernel", "backward_f32_halves_kernel"),
    "sm90/bias_gradient": ("bias_gradient_kernel",),
    "sm80/forward": ("forward_kernel",),
    "sm80/decode": ("decode_kernel",),
    "sm80/backward": ("backward_kernel", "slab_dq_kernel", "slab_dkv_kernel"),
    "sm80/weights": ("weights_kernel", "weights_dq_kernel", "weights_dk_kernel"),
    "sm80/bias_gradient": ("bias_gradient_kernel",),
}
# Two kernels of the plan share a function, and differ in its policies.
OF_BACKWARD_OPTIONS = "sm90::BackwardUnpipelinedConfig<"


def forward_of(number: int) -> str:
    return rf"ForwardConfig<.*\(flash_ext::sm\d0::ForwardVariant\){number}\b"


def backward_of(step_flags: int) -> str:
    """Whose options are these flags (variant.h), of the loop without overlap."""
    return rf"OptionsConfig<[^<>]*<[^<>]*>, {step_flags}>"


def pipelined_of(step_flags: int, turns: int) -> str:
    """The same of the pipelined loop, with a TurnTaking (turns.cuh)."""
    return rf"PipelinedOptionsConfig<[^<>,]*, \d+, {step_flags}, \(flash_ext::TurnTaking\){turns}>"


def wide_of(step_flags: int) -> str:
    """The same of the kernel for wide heads."""
    return rf"BackwardWideOptionsConfig<\w+, \d+, {step_flags}>"


FLAGS_OF_BACKWARD = {
    "masks alone": 4,
    "bias alone": 8,
    "softcap alone": 16,
    "dropout alone": 32,
    "ALiBi alone": 64,
    "per-key bias or key-padding mask alone": 128,
    "bias and key-padding mask alone": 8 | 128,
    "dropout and key-padding mask alone": 32 | 128,
}
OF_PERSISTENT = (16, 64, 128)  # those that persistent CTAs serve
OF_WIDE = {
    **FLAGS_OF_BACKWARD,
    "ALiBi and key-padding mask alone": 64 | 128,
    "softcap and key-padding mask alone": 16 | 128,
    "bias by elements alone": 8 | 256,
}
IN_TURNS = ", in turns where dQ is asked for"

# What the name of the function has to have in it, by the kernel and the variant that the plan names.
VARIANTS: dict[str, dict[str, str]] = {
    "sm90/forward": {
        "scaled products": forward_of(0),
        "softcap, ALiBi and any scale": forward_of(1),
        "bias alone": forward_of(2),
        "masks alone": forward_of(3),
        "all options but dropout": forward_of(4),
        "all options": forward_of(5),
        "block mask alone": forward_of(6),
        "a cache, contiguous or paged": forward_of(7),
        "scaled products and max_logit": forward_of(8),
    },
    "sm90/forward_f32": {
        "scaled products": r"ForwardF32Config<\d+, false>",
        "softcap, ALiBi and any scale": r"ForwardF32Config<\d+, true>",
    },
    "sm90/backward": {
        "scaled products": r"BackwardRolesOf<flash_ext::sm90::BackwardPipelinedConfig<\w+, \d+, false, false>",
        "block mask alone": r"BackwardRolesOf<flash_ext::sm90::BackwardPipelinedConfig<\w+, \d+, true, false>",
        **{name: pipelined_of(flags, 0) for name, flags in FLAGS_OF_BACKWARD.items()},
        **{name + IN_TURNS: pipelined_of(flags, 2) for name, flags in FLAGS_OF_BACKWARD.items() if flags != 4},
    },
    "sm90/backward_options": {
        **{name: backward_of(flags) for name, flags in FLAGS_OF_BACKWARD.items() if flags not in OF_PERSISTENT},
        "all options": backward_of(-1),
    },
    "sm90/backward_persistent": {
        "scaled products": r"BackwardPersistentConfig<\w+, \d+, \(flash_ext::TurnTaking\)0>",
        "scaled products" + IN_TURNS: r"BackwardPersistentConfig<\w+, \d+, \(flash_ext::TurnTaking\)2>",
        "block mask alone": r"BackwardPersistentBlocksConfig<",
        **{
            name: rf"PersistentOptionsConfig<\w+, \d+, {flags}>"
            for name, flags in FLAGS_OF_BACKWARD.items()
            if flags in OF_PERSISTENT
        },
    },
    "sm90/backward_wide": {
        "wide heads": r"BackwardWideConfig<\w+, \d+, \(flash_ext::TurnTaking\)",
        **{name: wide_of(flags) for name, flags in OF_WIDE.items()},
        "all options": wide_of(-1),
    },
    "sm90/backward_f32": {
        "scaled products": r"BackwardF32Config<\d+, false>",
        "softcap, ALiBi and any scale": r"BackwardF32Config<\d+, true>",
    },
    "sm80/forward": {
        "scaled products": forward_of(0),
        "softcap, ALiBi, dropout and any scale": forward_of(1),
        "all options and pages": forward_of(2),
        "bias alone": forward_of(3),
        "float32 bias alone": forward_of(4),
        "mask alone": forward_of(5),
        "dropout alone": forward_of(6),
    },
    "sm80/backward": {
        "scaled products": r"BackwardConfig<.*, \d+, false, false>",
        "all options": r"BackwardConfig<.*, \d+, true, false>",
        "all options in little shared memory": r"BackwardConfig<.*, \d+, true, true>",
        "all options in slabs of columns": r"slab_d\w+_kernel<",
    },
}
# Those that only GPUs with less shared memory run.
NOT_EVERYWHERE = {
    ("sm80/backward", "all options in little shared memory"),
    ("sm80/backward", "all options in slabs of columns"),
}


# ---- What ran -------------------------------------------------------------------------------------------------------


def functions_of(run: Callable[[], object]) -> set[tuple[str, str]]:
    """The folder and the whole name of each function of ours that ran: ("sm90", "void flash_ext::sm90::...")."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = ((re.search(r"\bflash_ext::(sm\d+)::", event.name), event.name) for event in profile.events())
    return {(folder[1], name) for folder, name in found if folder}


def kernel_of(folder: str, name: str) -> str | None:
    """The plan's name of the kernel that a function belongs to; None: it is beside the point."""
    function = re.search(rf"\bflash_ext::{folder}::(\w+)", name)
    if function is None:
        return None
    if function[1] == "backward_kernel" and OF_BACKWARD_OPTIONS in name:
        return "sm90/backward_options"
    kernels = (k for k, functions in FUNCTIONS.items() if k.startswith(f"{folder}/") and function[1] in functions)
    of_its_name = f"{folder}/{function[1].removesuffix('_kernel')}"
    return next(kernels, of_its_name if of_its_name in _plan.KERNELS else None)


def assert_runs(run: Callable[[], object], plan: _plan.Plan, also: set[str] | None = None) -> None:
    """The planned kernel and no other, but for those that are named; every function of it is of the planned variant."""
    ran = functions_of(run)
    found = {(kernel, name) for folder, name in ran if (kernel := kernel_of(folder, name)) is not None}
    assert {kernel for kernel, _name in found} == {plan.kernel} | (also or set()), ran
    assert_variant(plan, [name for kernel, name in found if kernel == plan.kernel])


def assert_variant(plan: _plan.Plan, names: list[str]) -> None:
    patterns = VARIANTS.get(plan.kernel, {})
    if plan.variant in patterns:
        assert all(re.search(patterns[plan.variant], name) for name in names), (plan.variant, names)


# ---- Calls ----------------------------------------------------------------------------------------------------------


def bias_of(device: str, dtype: torch.dtype, queries: int = 256) -> torch.Tensor:
    return torch.randn(2, 4, queries, 256, device=device, dtype=dtype)


def mask_of(device: str, queries: int = 256) -> torch.Tensor:
    return torch.rand(2, 1, queries, 256, device=device) < 0.7


OPTIONS: dict[str, Callable[[torch.dtype, str], dict[str, Any]]] = {
    "plain": lambda dtype, device: {},
    "causal": lambda dtype, device: {"causal": True},
    "window": lambda dtype, device: {"window_size": (64, 3)},
    "sink": lambda dtype, device: {"sink": torch.randn(4, device=device)},
    "softcap": lambda dtype, device: {"softcap": 20.0},
    "large softcap": lambda dtype, device: {"softcap": 5e4},
    "alibi": lambda dtype, device: {"alibi_slopes": torch.rand(4, device=device)},
    "bias": lambda dtype, device: {"bias": bias_of(device, dtype)},
    "float32 bias": lambda dtype, device: {"bias": bias_of(device, torch.float32)},
    "per-key bias": lambda dtype, device: {"bias": bias_of(device, dtype, 1)},
    "mask": lambda dtype, device: {"mask": mask_of(device)},
    "key padding": lambda dtype, device: {"mask": mask_of(device, 1)},
    "bias and mask": lambda dtype, device: {"bias": bias_of(device, dtype), "mask": mask_of(device)},
    "softcap and key padding": lambda dtype, device: {"softcap": 20.0, "mask": mask_of(device, 1)},
    "alibi and key padding": lambda dtype, device: {
        "alibi_slopes": torch.rand(4, device=device),
        "mask": mask_of(device, 1),
    },
    "bias and key padding": lambda dtype, device: {"bias": bias_of(device, dtype), "mask": mask_of(device, 1)},
    "block mask": lambda dtype, device: {"block_mask": flash_ext.BlockMask.causal(256, 256, device=device)},
    "blocks of 64": lambda dtype, device: {
        "block_mask": flash_ext.BlockMask.causal(256, 256, block_size=(64, 64), device=device)
    },
    "small blocks": lambda dtype, device: {
        "block_mask": flash_ext.BlockMask.causal(256, 256, block_size=(32, 64), device=device)
    },
    "dropout": lambda dtype, device: {"dropout_p": 0.1},
    "dropout and key padding": lambda dtype, device: {"dropout_p": 0.1, "mask": mask_of(device, 1)},
    "negative scale": lambda dtype, device: {"softmax_scale": -0.1},
    "deterministic": lambda dtype, device: {"deterministic": True},
    "max_logit": lambda dtype, device: {"return_max_logit": True},
}
# Beside which the kernel for Hopper adds to dq in turns, at head_dim 65 to 128.
OPTIONS_IN_TURNS = [
    "softcap",
    "alibi",
    "bias",
    "per-key bias",
    "key padding",
    "bias and key padding",
    "dropout",
    "dropout and key padding",
]
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@needs_gpu
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(
    device: str, kernel_family: str, dtype: torch.dtype, head_dim: int, head_dim_v: int, option: str
) -> None:
    if device == "cpu":
        pytest.skip("profiles CUDA kernels")
    call = make_call(2, 256, 256, 4, 2, head_dim, head_dim_v, dtype=dtype, device=device)
    assert_attention_runs(call, OPTIONS[option](dtype, device))


def assert_attention_runs(call: Call, options: dict[str, Any]) -> None:
    """The kernels that are planned for a forward and its backward."""
    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v)]
    if "bias" in options:
        leaves.append(options["bias"].requires_grad_())
    out = None

    def forward() -> None:
        nonlocal out
        out = flash_ext.attention(call.q, call.k, call.v, **options)
        if options.get("return_max_logit"):
            out = out[0]

    def backward() -> None:
        assert out is not None
        torch.autograd.grad(out.float().sum(), leaves)

    assert_runs(forward, flash_ext.explain(call.q, call.k, call.v, **options).plan)
    plan = flash_ext.explain(call.q, call.k, call.v, operation="backward", **options).plan
    assert_runs(backward, plan, {plan.bias_kernel} - {""})


@needs_gpu
@pytest.mark.parametrize("option", OPTIONS_IN_TURNS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_options_in_turns(option: str, dtype: torch.dtype) -> None:
    call = make_call(2, 256, 256, 4, 2, 128, dtype=dtype, device="cuda")
    assert_attention_runs(call, OPTIONS[option](dtype, "cuda") | {"deterministic": True})


@needs_gpu
def test_nothing_takes_turns_where_dq_is_not_asked_for() -> None:
    call = make_call(2, 256, 256, 4, 2, 128, dtype=torch.bfloat16, device="cuda")
    k = call.k.requires_grad_()
    out = flash_ext.attention(call.q, k, call.v, softcap=20.0, deterministic=True)
    names = [name for _folder, name in functions_of(lambda: torch.autograd.grad(out.float().sum(), k))]
    assert any(re.search(pipelined_of(FLAGS_OF_BACKWARD["softcap alone"], 0), name) for name in names)


def test_the_kernel_family_of_a_test(device: str, kernel_family: str) -> None:
    """A GPU's own kernels, and those for all GPUs, as the fixture says."""
    call = make_call(2, 800, 800, 4, 2, 64, dtype=torch.bfloat16, device=device)
    plan = flash_ext.explain(call.q, call.k, call.v).plan
    assert plan.kernel == f"{kernel_family or 'cpu'}/forward"
    if device == "cuda":
        assert_runs(lambda: flash_ext.attention(call.q, call.k, call.v), plan)


@needs_gpu
@pytest.mark.parametrize("seqlen", [64, 256, 257])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_short_sequences(seqlen: int, heads_kv: int) -> None:
    call = make_call(2, seqlen, seqlen, 4, heads_kv, 64, dtype=torch.bfloat16, device="cuda")
    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v)]
    plan = flash_ext.explain(call.q, call.k, call.v, operation="backward").plan
    out = flash_ext.attention(call.q, call.k, call.v)
    assert_runs(lambda: torch.autograd.grad(out.float().sum(), leaves), plan)


@needs_gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_gradient_of_bias(in_chunks: bool, deterministic: bool) -> None:
    """Whose rows are no 16-byte chunks and so are copied first, or beside a backward that needs no TMA for itself;
    and a gradient of out with strides of 0."""
    call = make_call(2, 256, 256, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(2, 4, 256, 264, device="cuda", dtype=torch.bfloat16)
    bias = (rows[..., :256] if in_chunks else rows[..., 1:257]).requires_grad_()
    explanation = flash_ext.explain(
        call.q, call.k, call.v, operation="backward", bias=bias, deterministic=deterministic
    )
    plan, problem = explanation.plan, explanation.problem
    out = flash_ext.attention(call.q, call.k, call.v, bias=bias, deterministic=deterministic)
    found = {kernel_of(*function) for function in functions_of(lambda: torch.autograd.grad(out.sum(), bias))} - {None}
    assert plan.bias_kernel in found
    assert found <= {plan.kernel, plan.bias_kernel}
    if problem.compute_capability == 90 and problem.own_kernels:
        assert plan.bias_kernel == "sm90/bias_gradient"


@needs_gpu
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_strides_of_zero(which: str) -> None:
    call = make_call(2, 256, 256, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    setattr(call, which, getattr(call, which)[:1].expand(2, -1, -1, -1))
    plan = flash_ext.explain(call.q, call.k, call.v).plan
    assert_runs(lambda: flash_ext.attention(call.q, call.k, call.v), plan)


@dataclass(frozen=True)
class Decoding:
    seqlen_q: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    page_size: int = 0  # 0: contiguous

    def call(self, dtype: torch.dtype, device: str) -> Decode:
        call = make_decode(4, self.seqlen_q, 1024, 8, 2, 64, dtype=dtype, device=device)
        call.options["cache_seqlens"] = int32([1024, 700, 1000, 900], device)
        return paged(call, self.page_size) if self.page_size else call

    def arguments(self, call: Decode) -> dict[str, Any]:
        return {**call.options, "causal": True, **dict(self.options)}


DECODINGS = {
    "one query": Decoding(),
    "few queries": Decoding(4),
    "queries of a tile": Decoding(64),
    "a prompt": Decoding(768),
    "pages": Decoding(page_size=16),
    "pages of a prompt": Decoding(768, page_size=64),
    "no splits": Decoding(options=(("num_splits", 1),)),
    "splits": Decoding(options=(("num_splits", 4),)),
    "splits of a prompt": Decoding(768, options=(("num_splits", 4),)),
    "batch_invariant": Decoding(options=(("batch_invariant", True),)),
    "batch_invariant, a prompt": Decoding(768, options=(("batch_invariant", True),)),
    "softcap": Decoding(options=(("softcap", 20.0),)),
}


@needs_gpu
@pytest.mark.op("attention_decode")
@pytest.mark.parametrize("case", DECODINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode(device: str, kernel_family: str, dtype: torch.dtype, case: str) -> None:
    """With splits their results are combined, without there is nothing to combine."""
    if device == "cpu":
        pytest.skip("profiles CUDA kernels")
    call = DECODINGS[case].call(dtype, device)
    options = DECODINGS[case].arguments(call)
    plan = flash_ext.explain(call.q, call.k_cache, call.v_cache, operation="decode", **options).plan

    def run() -> object:
        return flash_ext.decode(call.q, call.k_cache, call.v_cache, **options)

    assert_runs(run, plan)
    if plan.kernel == "sm80/decode":
        combines = any("sm80::combine_kernel<" in name for _folder, name in functions_of(run))
        assert combines == (plan.num_splits > 1)


@needs_gpu
def test_weights() -> None:
    call = make_call(2, 100, 130, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    _, lse = flash_ext.attention(call.q, call.k, call.v, return_lse=True)
    plan = flash_ext.explain(call.q, call.k, call.v, operation="weights").plan
    assert_runs(lambda: flash_ext.attention_weights(call.q, call.k, lse), plan)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_weights(dtype: torch.dtype) -> None:
    call = make_call(2, 100, 130, 4, 2, 64, dtype=dtype, device="cuda")
    q, k = call.q.requires_grad_(), call.k.requires_grad_()
    weights = flash_ext.attention_weights(q, k, torch.full((2, 4, 100), 5.0, device="cuda"))
    plan = flash_ext.explain(call.q, call.k, call.v, operation="weights_backward").plan
    assert_runs(lambda: torch.autograd.grad(weights.float().sum(), (q, k)), plan)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_appending(dtype: torch.dtype) -> None:
    q, new = torch.randn(4, 1, 8, 64, device="cuda", dtype=dtype), torch.randn(4, 1, 2, 64, device="cuda", dtype=dtype)
    caches = [torch.randn(4, 1024, 2, 64, device="cuda", dtype=dtype) for _ in range(2)]
    lengths = torch.full((4,), 500, dtype=torch.int32, device="cuda")
    plan = flash_ext.explain(q, *caches, operation="decode", cache_seqlens=lengths).plan
    assert_runs(lambda: flash_ext.decode(q, *caches, k=new, v=new, cache_seqlens=lengths), plan)


# ---- What they reach, by the plan -----------------------------------------------------------------------------------


def problems_of_this_page() -> Iterator[_plan.Problem]:
    """Of the calls above, described on a CPU."""
    for dtype in DTYPES:
        for head_dims in HEAD_DIMS:
            call = make_call(2, 256, 256, 4, 2, *head_dims, dtype=dtype)
            for option in OPTIONS.values():
                for operation in ("forward", "backward"):
                    yield problem_of(call.q, call.k, call.v, operation, **option(dtype, "cpu"))
        call = make_call(2, 256, 256, 4, 2, 128, dtype=dtype)
        for name in OPTIONS_IN_TURNS:
            yield problem_of(call.q, call.k, call.v, "backward", **OPTIONS[name](dtype, "cpu"), deterministic=True)
        call = make_call(2, 64, 64, 4, 4, 64, dtype=dtype)
        for operation in ("backward", "weights", "weights_backward"):
            yield problem_of(call.q, call.k, call.v, operation)
        for decoding in DECODINGS.values():
            step = decoding.call(dtype, "cpu")
            yield problem_of(step.q, step.k_cache, step.v_cache, "decode", **decoding.arguments(step))


def on_an_h200(problem: _plan.Problem, own_kernels: bool) -> _plan.Plan:
    """By its own kernels, or by those for all GPUs."""
    problem.device, problem.compute_capability, problem.num_workers = "cuda", 90, 132
    problem.shared_bytes_per_cta, problem.shared_bytes_per_sm = SHARED[90]
    problem.own_kernels = own_kernels
    return _plan.make_plan(problem)


def test_the_calls_of_this_page_reach_every_kernel_and_variant() -> None:
    plans = [on_an_h200(problem, own) for problem in problems_of_this_page() for own in (True, False)]
    cuda = {kernel for kernel in _plan.KERNELS if kernel.startswith(("sm80/", "sm90/"))}
    assert {plan.kernel for plan in plans} | {plan.bias_kernel for plan in plans} - {""} == cuda == FUNCTIONS.keys()
    reached = {(plan.kernel, plan.variant) for plan in plans if plan.variant}
    known = {(kernel, variant) for kernel, variants in VARIANTS.items() for variant in variants}
    assert known - reached <= NOT_EVERYWHERE
    assert reached <= known


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        ("a prompt", "forward"),
        ("pages of a prompt", "forward"),
        ("queries of a tile", "decode"),
        ("splits of a prompt", "decode"),
    ],
)
def test_prompts_of_this_page_run_the_forward(case: str, kernel: str) -> None:
    """Of either family; they are long enough for it, and nothing asks for splits."""
    step = DECODINGS[case].call(torch.bfloat16, "cpu")
    problem = problem_of(step.q, step.k_cache, step.v_cache, "decode", **DECODINGS[case].arguments(step))
    assert on_an_h200(problem, own_kernels=True).kernel.endswith(f"/{kernel}")
    assert on_an_h200(problem, own_kernels=False).kernel == f"sm80/{kernel}"


@pytest.mark.parametrize(
    ("kernel", "variant", "of_it", "of_another"),
    [
        ("sm90/forward", "masks alone",
         "forward_kernel<flash_ext::sm90::ForwardConfig<__half, 64, 64, (flash_ext::sm90::ForwardVariant)3, (fl",
         "forward_kernel<flash_ext::sm90::ForwardConfig<__half, 64, 64, (flash_ext::sm90::ForwardVariant)4, (fl"),
        ("sm90/backward", "bias alone",
         "BackwardRolesOf<flash_ext::sm90::BackwardPipelinedOptionsConfig<__half, 128, 8, (flash_ext::TurnTaking)0>",
         "BackwardRolesOf<flash_ext::sm90::BackwardPipelinedOptionsConfig<__half, 128, 136, (flash_ext::TurnTaking)0>"),
        ("sm90/backward", "bias alone" + IN_TURNS,
         "BackwardRolesOf<flash_ext::sm90::BackwardPipelinedOptionsConfig<__half, 128, 8, (flash_ext::TurnTaking)2>, f",
         "BackwardRolesOf<flash_ext::sm90::BackwardPipelinedOptionsConfig<__half, 128, 8, (flash_ext::TurnTaking)0>"),
        ("sm90/backward_options", "all options",
         "BackwardOptionsConfig<flash_ext::sm90::BackwardUnpipelinedConfig<__half, 64>, -1> >",
         "BackwardOptionsConfig<flash_ext::sm90::BackwardUnpipelinedConfig<__half, 64>, 16> >"),
        ("sm90/backward", "scaled products",
         "BackwardRolesOf<flash_ext::sm90::BackwardPipelinedConfig<__half, 128, false, false>, flash_ext",
         "BackwardRolesOf<flash_ext::sm90::BackwardPipelinedConfig<__half, 128, true, false>, flash_ext"),
        ("sm90/backward_persistent", "scaled products" + IN_TURNS,
         "BackwardPersistentConfig<__half, 64, (flash_ext::TurnTaking)2>, flash_ext::sm90::BackwardPersistentTurnsDq<",
         "BackwardPersistentConfig<__half, 64, (flash_ext::TurnTaking)0>, flash_ext::sm90::BackwardPersistentDq<"),
        ("sm80/backward", "all options",
         "backward_kernel<flash_ext::sm80::BackwardConfig<float, 64, true, false> >(",
         "backward_kernel<flash_ext::sm80::BackwardConfig<float, 64, false, false> >("),
    ],
)  # fmt: skip
def test_names_tell_variants_apart(kernel: str, variant: str, of_it: str, of_another: str) -> None:
    """As they stand in the library; a pattern that fits any name would let any variant pass."""
    assert re.search(VARIANTS[kernel][variant], of_it)
    assert not re.search(VARIANTS[kernel][variant], of_another)
