"""How a call of the library is held against the oracle of ``reference.py``.

With ``ref`` the reference in float64 and ``low`` the same mathematics done by plain PyTorch in the input dtype, the
error of the library may be twice that of ``low`` (three times with softcap) plus a rounding term. This holds for the
largest error and, for gradients in float16 and bfloat16 of more than a few rows, for the root mean square too.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext.planning import Explanation

from . import reference

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Units in the last place that are no error. In float64 ``low`` is ``ref`` itself, so this is all there is.
ROUNDING = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 16, torch.float64: 4096}
LARGE_SCORE = 8.0  # from here on the last bits of a score are more than the units above
SINGLE_KEY = 0.9  # the weight of a key that has nearly all of its row
# Errors of a row go together: each adds up to one sample. Twice an RMS of n samples is exceeded by another one of the
# same law with a chance of 20 % for two of them, 3 % for 8 and 0.4 % for 16 (F distribution).
ROWS_OF_RMS = 16
INPUTS = ("q", "k", "v", "bias", "sink")  # what can have a gradient


def dtypes_of(device: str) -> tuple[torch.dtype, ...]:
    return FLOATS if device == "cpu" else FLOATS[:3]


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", mean: float = 0.3) -> Tensor:
    """Normal numbers with a mean that is not zero, so that nothing cancels by luck."""
    return (torch.randn(*shape, device=device) + mean).to(dtype)


def random_rng(device: str = "cpu") -> Tensor:
    """A Philox seed and offset that use all their bits."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), device=device)


def int32(values: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def far_apart(x: Tensor, dim: int) -> Tensor:
    """The same numbers in a view whose rows along ``dim`` are spread over more than 2^31 elements, so that offsets pass
    what 32 bits can say. All else lies dense between them."""
    steps = x.shape[dim] - 1
    step = (2**31 // steps // 64 + 1) * 64
    dense = x.select(dim, 0).contiguous()
    strides = list(dense.stride())
    strides.insert(dim, step)
    assert steps * step > 2**31 and dense.numel() <= step
    return untouched_memory(steps * step + dense.numel(), x.dtype, x.device).as_strided(x.shape, strides).copy_(x)


def untouched_memory(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of a CPU only those pages are in memory that somebody writes or reads, so that gigabytes cost nothing."""
    if device.type != "cpu":
        if torch.cuda.mem_get_info(device)[0] < 4 * elements * dtype.itemsize:
            pytest.skip("needs more memory than the GPU has left")
        return torch.empty(elements, dtype=dtype, device=device)
    map_noreserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_noreserve
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def values_are_checked(device: str) -> bool:
    """Whether operators look at the values of cu_seqlens and its like; on CUDA they would have to wait for them."""
    return device == "cpu" or os.environ.get("FLASH_EXT_CHECK") == "1"


def cumulative(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return int32([0, *torch.tensor(lengths).cumsum(0).tolist()], device)


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """torch fills fresh tensors with NaN, so what a kernel leaves unwritten shows.

    It does so under ``use_deterministic_algorithms`` alone, which also asks the backward to be deterministic: a call
    that says ``deterministic=False`` itself still takes the kernel that it takes without poison.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return repr(value.tolist()) if value.dtype in (torch.int32, torch.int64) else f"{value.dtype}{list(value.shape)}"


@dataclass
class Call:
    """One call of ``flash_ext.attention``, and the gradients that come back into it."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of flash_ext.attention
    block_visible: Tensor | None = None  # what options["block_mask"] shows, (batch|1, heads|1, seqlen_q, seqlen_k)
    grad_out: Tensor | None = None
    grad_lse: Tensor | None = None

    def __repr__(self) -> str:
        """Tensors by dtype and shape, integers in full: a random problem that fails is known by these."""
        given = {"q": self.q, "k": self.k, "v": self.v, **self.options, "block_visible": self.block_visible}
        return f"Call({', '.join(f'{name}={describe(value)}' for name, value in given.items() if value is not None)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints of a problem that fails."""
        printer.text(repr(self))

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def varlen(self) -> bool:
        return self.options.get("cu_seqlens_q") is not None

    def with_options(self, **options: Any) -> Call:
        return replace(self, options={**self.options, **options})

    def inputs(self) -> dict[str, Tensor]:
        given = {"q": self.q, "k": self.k, "v": self.v, **self.options}
        return {name: given[name] for name in INPUTS if given.get(name) is not None}

    def with_random_gradients(self) -> Call:
        heads_q, head_dim_v, device = self.q.shape[-2], self.v.shape[-1], str(self.q.device)
        lse_shape = (heads_q, self.q.shape[0]) if self.varlen else (self.q.shape[0], heads_q, self.q.shape[1])
        return replace(
            self,
            grad_out=random(*self.q.shape[:-1], head_dim_v, dtype=self.dtype, device=device),
            grad_lse=random(*lse_shape, dtype=self.lse_dtype, device=device),
        )


Result = dict[str, Tensor]  # "out", "lse" and, for each input that was asked for, "d" + its name


def make_call(
    batch: int = 2,
    seqlen_q: int = 33,
    seqlen_k: int = 47,
    heads_q: int = 4,
    heads_kv: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> Call:
    """Dense random tensors, or packed ones: give cu_seqlens_* and leave batch out."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    lead_q, lead_k = (batch, seqlen_q), (batch, seqlen_k)
    if options.get("cu_seqlens_q") is not None:
        lead_q, lead_k = (seqlen_q,), (seqlen_k,)
    return Call(
        random(*lead_q, heads_q, head_dim, dtype=dtype, device=device),
        random(*lead_k, heads_kv, head_dim, dtype=dtype, device=device),
        random(*lead_k, heads_kv, head_dim_v, dtype=dtype, device=device),
        options,
    )


def make_varlen_call(
    lengths_q: Sequence[int], lengths_k: Sequence[int], device: str = "cpu", spare: int = 0, **arguments: Any
) -> Call:
    """Packed sequences, ``spare`` rows that belong to none at the end, max_seqlen_* given."""
    return make_call(
        seqlen_q=sum(lengths_q) + spare,
        seqlen_k=sum(lengths_k) + spare,
        cu_seqlens_q=cumulative(lengths_q, device),
        cu_seqlens_k=cumulative(lengths_k, device),
        max_seqlen_q=max(lengths_q),
        max_seqlen_k=max(lengths_k),
        device=device,
        **arguments,
    )


def assert_alike(found: Tensor, expected: Tensor) -> None:
    """Two ways to the same numbers, each rounded in the end."""
    rounding = 4 * torch.finfo(expected.dtype).eps
    atol = max(1e-5, rounding * expected.abs().max().item())
    torch.testing.assert_close(found, expected, rtol=max(1e-5, rounding), atol=atol)


def run_library(call: Call, gradients_of: Sequence[str] = ()) -> Result:
    """Runs ``flash_ext.attention``, and its backward towards the named inputs."""
    leaves = {name: t.detach().requires_grad_(name in gradients_of) for name, t in call.inputs().items()}
    out, lse = flash_ext.attention(**{**call.options, **leaves}, return_lse=True)
    return collect_gradients(call, out, lse, {name: leaves[name] for name in gradients_of})


def run_reference(call: Call, dtype: torch.dtype, gradients_of: Sequence[str] = ()) -> Result:
    """The same call by the oracle, computed in ``dtype``."""
    leaves = {name: t.detach().to(dtype).requires_grad_(name in gradients_of) for name, t in call.inputs().items()}
    out, lse = reference_attention(call, leaves)
    return collect_gradients(call, out, lse, {name: leaves[name] for name in gradients_of})


def collect_gradients(call: Call, out: Tensor, lse: Tensor, leaves: dict[str, Tensor]) -> Result:
    result = {"out": out.detach(), "lse": lse.detach()}
    pairs = [(out, call.grad_out), (lse, call.grad_lse)]
    used = [(t, g.to(t.dtype)) for t, g in pairs if g is not None and t.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(leaves)  # of a result that depends on none of them
    if used:
        outputs, gradients = zip(*used, strict=True)
        found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        result["d" + name] = leaf.new_zeros(leaf.shape) if gradient is None else gradient
    return result


def score_options(call: Call, leaves: dict[str, Tensor]) -> reference.Options:
    """The call's options as the oracle takes them."""
    o = call.options
    masks = [m for m in (o.get("mask"), call.block_visible) if m is not None]
    p = o.get("dropout_p", 0.0)
    keep = None
    if p > 0:
        batch, seqlen_q, seqlen_k = call.q.shape[0], call.q.shape[1], call.k.shape[1]
        if call.varlen:
            batch = len(o["cu_seqlens_q"]) - 1
            seqlen_q = int(o["cu_seqlens_q"].diff().max())
            seqlen_k = int(o["cu_seqlens_k"].diff().max())
        keep = reference.dropout_keep(o["rng_state"], p, batch, call.q.shape[-2], seqlen_q, seqlen_k)
    return reference.Options(
        causal=o.get("causal", False),
        window_size=o.get("window_size", (-1, -1)),
        top_left=o.get("top_left", False),
        softmax_scale=o.get("softmax_scale"),
        softcap=o.get("softcap", 0.0),
        alibi_slopes=o.get("alibi_slopes"),
        bias=leaves.get("bias"),
        mask=None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1],
        sink=leaves.get("sink"),
        keep=keep,
        dropout_p=p,
    )


def reference_attention(call: Call, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    options, (used_q, used_k) = score_options(call, leaves), lengths_in_use(call)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    if call.varlen:
        return reference.varlen_attention(q, k, v, *boundaries(call), options, used_q, used_k)
    if used_q is None and used_k is None:
        out, lse, _ = reference.attention(q, k, v, options)
        return out, lse
    packed = (t.flatten(0, 1) for t in (q, k, v))
    out, lse = reference.varlen_attention(*packed, *boundaries(call), options, used_q, used_k)
    batch_and_rows = q.shape[:2]
    return out.unflatten(0, batch_and_rows), lse.unflatten(1, batch_and_rows).transpose(0, 1)


def reference_largest_weights(call: Call, lse: Tensor) -> Tensor:
    """The largest weight of each row before dropout, shaped as lse."""
    leaves = {name: t.detach().to(lse.dtype) for name, t in call.inputs().items()}
    options, (used_q, used_k) = score_options(call, leaves), lengths_in_use(call)
    q, k = leaves["q"], leaves["k"]
    if call.varlen:
        return reference.varlen_largest_weights(q, k, lse, *boundaries(call), options, used_q, used_k)
    if used_q is None and used_k is None:
        return reference.largest_weights(q, k, lse, options)
    packed = (q.flatten(0, 1), k.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2))
    largest = reference.varlen_largest_weights(*packed, *boundaries(call), options, used_q, used_k)
    return largest.unflatten(1, q.shape[:2]).transpose(0, 1)


def reference_max_logit(call: Call, dtype: torch.dtype = torch.float64) -> Tensor:
    """The largest score of each head of each batch entry or sequence, before sink and dropout."""
    leaves = {name: t.detach().to(dtype) for name, t in call.inputs().items()}
    options, (used_q, used_k) = score_options(call, leaves), lengths_in_use(call)
    q, k = leaves["q"], leaves["k"]
    if not call.varlen and used_q is None and used_k is None:
        return reference.max_logit(q, k, options)
    packed = (q, k) if call.varlen else (q.flatten(0, 1), k.flatten(0, 1))
    return reference.varlen_max_logit(*packed, *boundaries(call), options, used_q, used_k)


def lengths_in_use(call: Call) -> tuple[list[int] | None, list[int] | None]:
    used_q, used_k = (call.options.get(name) for name in ("seqused_q", "seqused_k"))
    return None if used_q is None else used_q.tolist(), None if used_k is None else used_k.tolist()


def boundaries(call: Call) -> tuple[list[int], list[int]]:
    """cu_seqlens_q and cu_seqlens_k; of dense tensors, those of their rows one after another."""
    if call.varlen:
        return call.options["cu_seqlens_q"].tolist(), call.options["cu_seqlens_k"].tolist()
    starts_q, starts_k = ([b * t.shape[1] for b in range(t.shape[0] + 1)] for t in (call.q, call.k))
    return starts_q, starts_k


def explained_on_hopper(call: Call, operation: str = "forward") -> Explanation | None:
    """How the call runs, where there are kernels for Hopper, or None."""
    explained = flash_ext.explain(call.q, call.k, call.v, operation=operation, **call.options)
    problem = explained.problem
    is_hopper = problem.device == "cuda" and problem.compute_capability == 90 and problem.own_kernels
    return explained if is_hopper else None


def assert_kernel_on_hopper(call: Call, kernel: str | tuple[str, ...], operation: str = "forward") -> None:
    """For tests that mean a kernel, or one of several: it is the one that runs the call there."""
    explained = explained_on_hopper(call, operation)
    assert explained is None or explained.plan.kernel in ((kernel,) if isinstance(kernel, str) else kernel)


def assert_hoppers_own_forward(call: Call) -> None:
    """For tests of the edges of its tiles, and of the ways in which it sums."""
    assert_kernel_on_hopper(call, "sm90/forward_f32" if call.dtype == torch.float32 else "sm90/forward")


def assert_matches_oracle(call: Call, gradients_of: Sequence[str] | None = None) -> Result:
    """Out, lse and gradients against the oracle, with and without poisoned outputs; returns the library's result.

    All inputs of the call get gradients unless ``gradients_of`` names fewer; () checks the forward alone.
    """
    gradients_of = tuple(call.inputs()) if gradients_of is None else gradients_of
    if gradients_of and call.grad_out is None and call.grad_lse is None:
        call = call.with_random_gradients()
    result = run_library(call, gradients_of)
    with poisoned_outputs():
        poisoned = run_library(call.with_options(**{"deterministic": False, **call.options}), gradients_of)
    oracle = Oracle.of(call, gradients_of)
    assert result.keys() == oracle.ref.keys()
    for name in oracle.ref:
        assert_contract_form(call, name, result[name])
        oracle.assert_within_bound(name, result[name])
        oracle.assert_within_bound(name, poisoned[name])
    return result


@dataclass
class Oracle:
    """What a call may give: the reference and, for each result, how far from it."""

    call: Call
    ref: Result
    low: Result
    slack: Result

    @classmethod
    def of(cls, call: Call, gradients_of: Sequence[str]) -> Oracle:
        ref = run_reference(call, torch.float64, gradients_of)
        low = run_reference(call, call.dtype, gradients_of)
        if call.dtype in HALF and not call.options.get("softcap"):
            # Scores accumulate in float32 whatever the inputs are.
            low["lse"] = run_reference(call, torch.float32)["lse"]
        return cls(call, ref, low, slack_of_rows(call, ref, gradients_of))

    def assert_within_bound(self, name: str, got: Tensor) -> None:
        dtype = compute_dtype(self.call, name)
        factor = 3.0 if self.call.options.get("softcap") else 2.0
        got, ref, low = (t.double() for t in (got, self.ref[name], self.low[name]))
        assert_within_bound(name, got, ref, low, dtype, factor, self.slack[name], self.addends(name))
        if dtype in HALF and name not in ("out", "lse") and self.num_rows >= ROWS_OF_RMS:
            assert_rms_within_bound(name, got, ref, low, dtype, factor, self.slack[name])

    @property
    def num_rows(self) -> int:
        """How many rows see any key."""
        return int(self.ref["lse"].isfinite().sum())

    def addends(self, name: str) -> int:
        """How many heads of q add up in a gradient of keys or values."""
        return self.call.q.shape[-2] // self.call.k.shape[-2] if name in ("dk", "dv") else 1


def slack_of_rows(call: Call, ref: Result, gradients_of: Sequence[str]) -> Result:
    """What single rows may be off where plain PyTorch is right by luck, in the shapes of the results; else 0."""
    lse = ref["lse"].nan_to_num(0, 0, 0)
    slack = {name: torch.zeros_like(t) for name, t in ref.items()}
    large = rounding_of_large_scores(call.lse_dtype, lse, call.q.shape[-1])
    if large.any():
        for name in slack.keys() & {"out", "dq"}:
            slack[name] += large * largest_of(ref[name])
        summed = [name for name in gradients_of if name != "q"]
        for name, noise in noise_of_large_scores(call, ref, large, summed).items():
            slack[name] += noise
    if gradients_of:
        for name, noise in noise_of_single_keys(call, ref, gradients_of).items():
            slack[name] += noise
    if "bias" in gradients_of and call.options["bias"].shape[-1] == 1 and call.k.numel() and call.q.numel():
        # A bias that all keys of a row share changes no weight. Its gradient is what rounding leaves of a difference.
        every_row = torch.ones_like(lse, dtype=torch.bool)
        slack["dbias"] += noise_of_rows(call, ref, every_row, ("bias",)).get("dbias", 0.0)
    return slack


def rounding_of_large_scores(lse_dtype: torch.dtype, lse: Tensor, head_dim: int) -> Tensor:
    """The last bit of a score of a thousand is 1e-4 of its weight, and which way it is rounded is luck; the more
    products are summed up, the more bits it is.

    Per row, (batch, seqlen_q, heads_q, 1) or (total_q, heads_q, 1), as a part of 1; 0 where scores are small.
    """
    size = lse.nan_to_num(0, 0, 0).abs().transpose(-1, -2)[..., None]
    units = max(4.0, 0.5 * math.sqrt(head_dim))
    return torch.where(size >= LARGE_SCORE, units * torch.finfo(lse_dtype).eps * size, 0)


def noise_of_large_scores(call: Call, ref: Result, large: Tensor, gradients_of: Sequence[str]) -> Result:
    """What rows whose weights are off by these parts of themselves add to gradients that sum over rows.

    A part of p is the same part of grad_out towards v, and of the gradient of a score, which is
    p * (<grad_out, v - out> + grad_lse): the reference itself says where they go. Keys that no such row sees get none.
    """
    part = large.squeeze(-1).transpose(-1, -2)  # as lse
    size = torch.zeros_like(part)
    if call.grad_lse is not None:
        size += call.grad_lse.abs()
    if call.grad_out is not None and call.v.numel():
        kept = 1 - call.options.get("dropout_p", 0.0)
        largest_v = call.v.double().nan_to_num(0, 0, 0).abs().flatten(0, -2).amax(0) / max(kept, 1 / 256)
        products = call.grad_out.double().abs() * (largest_v + ref["out"].abs())
        size += products.nan_to_num(0, 0, 0).sum(-1).transpose(-1, -2)
    return gradients_of_noise(call, part, part * size, gradients_of)


def noise_of_single_keys(call: Call, ref: Result, gradients_of: Sequence[str]) -> Result:
    """Gradients of what is rounded in rows of which one key has nearly all: for each of ``gradients_of``.

    The gradient of a score is p * (<grad_out, v> - <grad_out, out> + grad_lse). Where one key has all, out is v and p
    is 1. autograd has both exactly: it takes the difference of one number and itself, and weights that it saved. A
    kernel sums each product in an order of its own, reads an out that dropout scaled and the dtype rounded, and makes p
    of a score that is computed again and agrees with the first to the last bit of <|q|, |k|>. An error of
    <grad_out, out> is one of grad_lse, and a relative one of p is one of grad_out towards v: so the reference itself
    says where they go.
    """
    rows = reference_largest_weights(call, ref["lse"]) >= SINGLE_KEY
    return noise_of_rows(call, ref, rows, gradients_of) if rows.any() else {}


def noise_of_rows(call: Call, ref: Result, rows: Tensor, gradients_of: Sequence[str]) -> Result:
    eps, dropout = torch.finfo(call.lse_dtype).eps, call.options.get("dropout_p", 0.0) > 0
    norms_q, norms_k = (t.double().nan_to_num(0, 0, 0).norm(dim=-1) for t in (call.q, call.k))
    noise_p = rows * eps * softmax_scale(call) * norms_q.transpose(-1, -2) * norms_k.max()
    noise_lse = torch.zeros_like(noise_p)
    if call.grad_lse is not None:
        noise_lse += noise_p * call.grad_lse.abs()
    if call.grad_out is not None:
        products = (call.grad_out.double() * ref["out"]).abs().nan_to_num(0, 0, 0).sum(-1).transpose(-1, -2)
        noise_lse += rows * (4 * eps + (torch.finfo(call.dtype).eps if dropout else 0)) * products
    return gradients_of_noise(call, noise_p, noise_lse, gradients_of)


def gradients_of_noise(call: Call, noise_p: Tensor, noise_lse: Tensor, gradients_of: Sequence[str]) -> Result:
    leaves = {name: t.detach().float().requires_grad_() for name, t in call.inputs().items()}
    out, lse = reference_attention(call, leaves)
    found: Result = {}
    for name in gradients_of:
        result, noise = lse, noise_lse
        if name == "v":
            if call.grad_out is None:
                continue
            result, noise = out, call.grad_out.abs() * noise_p.transpose(-1, -2)[..., None]
        if not result.requires_grad:  # nothing reaches it: no sequence has any keys, or a leaf is empty
            continue
        (gradient,) = torch.autograd.grad(
            result, leaves[name], noise.to(result.dtype), retain_graph=True, allow_unused=True
        )
        if gradient is not None:
            noise = gradient.abs().double()
            found["d" + name] = noise.amax(-1, keepdim=True) if name in ("q", "k") else noise
    return found


def softmax_scale(call: Call) -> float:
    """Without its sign."""
    scale = call.options.get("softmax_scale")
    return call.q.shape[-1] ** -0.5 if scale is None else abs(scale)


def compute_dtype(call: Call, name: str) -> torch.dtype:
    """The coarsest dtype that the value passes through."""
    if name == "lse":
        return call.lse_dtype
    own = call.inputs()[name[1:]].dtype if name != "out" else call.dtype
    return max((own, call.dtype), key=lambda d: torch.finfo(d).eps)


def assert_contract_form(call: Call, name: str, got: Tensor) -> None:
    """Shape, dtype and layout, which do not depend on the values."""
    inputs = call.inputs()
    if name == "out":
        shape, dtype = (*call.q.shape[:-1], call.v.shape[-1]), call.dtype
    elif name == "lse":
        lead = (call.q.shape[-2], call.q.shape[0])
        shape, dtype = lead if call.varlen else (call.q.shape[0], call.q.shape[2], call.q.shape[1]), call.lse_dtype
    else:
        shape, dtype = tuple(inputs[name[1:]].shape), inputs[name[1:]].dtype
    assert tuple(got.shape) == tuple(shape), f"{name}: shape {tuple(got.shape)}, expected {tuple(shape)}"
    assert got.dtype == dtype, f"{name}: {got.dtype}, expected {dtype}"
    assert got.is_contiguous(), f"{name}: strides {got.stride()} of shape {tuple(got.shape)}"


def largest_of(value: Tensor) -> float:
    """The largest finite magnitude, 1 at least."""
    return max(1.0, value.nan_to_num(0, 0, 0).abs().max().item() if value.numel() else 0.0)


def assert_within_bound(
    name: str,
    got: Tensor,
    ref: Tensor,
    low: Tensor,
    dtype: torch.dtype,
    factor: float = 2.0,
    slack: Tensor | float = 0.0,
    addends: int = 1,
) -> None:
    """No element of ``got`` is further from ``ref`` than ``factor`` times the largest error of ``low``, some units in
    the last place of the largest element (more where so many ``addends`` add up), and its ``slack``."""
    got, ref, low = got.double(), ref.double(), low.double()
    assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert not got.isnan().any(), f"{name}: {int(got.isnan().sum())} of {got.numel()} are NaN"
    finite = ref.isfinite()
    if not finite.all():
        assert torch.equal(got.isinf() * got.sign(), ref.isinf() * ref.sign()), f"{name}: infinite in other places"
    if not finite.any():
        return
    low_error = error_of(low, ref).max().item()
    rounding = ROUNDING[dtype] * torch.finfo(dtype).eps * math.sqrt(addends) * largest_of(ref)
    bound = factor * low_error + rounding
    error = error_of(got, ref)
    assert (error <= bound + slack).all(), (
        f"{name}: error {error.max().item():.3e} > {bound:.3e} (plain PyTorch: {low_error:.3e}; "
        f"{(error - slack).max().item():.3e} with the slack of rows)"
    )


def assert_rms_within_bound(
    name: str, got: Tensor, ref: Tensor, low: Tensor, dtype: torch.dtype, factor: float, slack: Tensor
) -> None:
    """The same of the root mean square, which one element of the bound above cannot hide."""
    if not got.numel():
        return
    low_error, size = rms(error_of(low, ref)), rms(ref.nan_to_num(0, 0, 0))
    bound = factor * low_error + torch.finfo(dtype).eps * size + rms(slack)
    error = rms(error_of(got, ref))
    assert error <= bound, f"{name}: RMS of the error {error:.3e} > {bound:.3e} (plain PyTorch: {low_error:.3e})"


def error_of(got: Tensor, ref: Tensor) -> Tensor:
    """0 where one of them is not finite."""
    return (got - ref).nan_to_num(0, 0, 0).abs()


def rms(t: Tensor) -> float:
    return t.square().mean().sqrt().item()
