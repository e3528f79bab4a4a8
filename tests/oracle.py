"""How a call of the library is held against the oracle of ``reference.py``.

With ``ref`` the reference in float64 and ``low`` the same mathematics done by plain PyTorch in the input dtype, the
error of the library may be twice that of ``low`` (three times with softcap) plus a rounding term.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import flash_ext

from . import reference

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Units in the last place that are no error. In float64 ``low`` is ``ref`` itself, so this is all there is.
ROUNDING = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 16, torch.float64: 4096}
INPUTS = ("q", "k", "v", "bias", "sink")  # what can have a gradient
# Of q, k and v where a test does not say: on CUDA the kernels of bfloat16 are others than those of float32.
DTYPE = getattr(torch, os.environ.get("FLASH_EXT_TEST_DTYPE", "float32"))


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
        """Tensors by dtype and shape, integers in full: a random problem that fails is told by these."""
        given = {"q": self.q, "k": self.k, "v": self.v, **self.options, "block_visible": self.block_visible}
        return f"Call({', '.join(f'{name}={describe(value)}' for name, value in given.items() if value is not None)})"

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
    dtype: torch.dtype = DTYPE,
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
        result["d" + name] = torch.zeros_like(leaf) if gradient is None else gradient
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
    o, options = call.options, score_options(call, leaves)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    used_q, used_k = (None if (u := o.get(name)) is None else u.tolist() for name in ("seqused_q", "seqused_k"))
    if call.varlen:
        cu_q, cu_k = o["cu_seqlens_q"].tolist(), o["cu_seqlens_k"].tolist()
        return reference.varlen_attention(q, k, v, cu_q, cu_k, options, used_q, used_k)
    if used_q is None and used_k is None:
        out, lse, _ = reference.attention(q, k, v, options)
        return out, lse
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    cu_q, cu_k = ([b * n for b in range(batch + 1)] for n in (seqlen_q, seqlen_k))
    packed = (t.flatten(0, 1) for t in (q, k, v))
    out, lse = reference.varlen_attention(*packed, cu_q, cu_k, options, used_q, used_k)
    return out.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)


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
    ref = run_reference(call, torch.float64, gradients_of)
    low = run_reference(call, call.dtype, gradients_of)
    if call.dtype in HALF and not call.options.get("softcap"):
        low["lse"] = run_reference(call, torch.float32)["lse"]  # scores accumulate in float32 whatever the inputs are
    factor = 3.0 if call.options.get("softcap") else 2.0
    assert result.keys() == ref.keys()
    for name in ref:
        assert_contract_form(call, name, result[name])
        slack = rounding_of_scores(call.lse_dtype, ref["lse"], ref[name])
        if name not in ("out", "lse"):
            slack += rounding_of_products(call, ref[name])
        if name not in ("out", "lse", "dv"):
            slack += cancellation(call, ref["out"])
        for got in (result[name], poisoned[name]):
            assert_within_bound(name, got, ref[name], low[name], compute_dtype(call, name), factor, slack)
    return result


def rounding_of_scores(lse_dtype: torch.dtype, lse: Tensor, value: Tensor) -> float:
    """The last bit of a score of a thousand is 1e-4 of its weight, and which way it is rounded is luck."""
    largest = lse.nan_to_num(0, 0, 0).abs().max().item() if lse.numel() else 0.0
    size = value.nan_to_num(0, 0, 0).abs().max().item() if value.numel() else 0.0
    return 4 * torch.finfo(lse_dtype).eps * largest * max(1.0, size)


def rounding_of_products(call: Call, gradient: Tensor) -> float:
    """What the scores of the backward may differ by from those that lse was made of.

    A kernel computes them again, in another order of the sum: they agree to the last bit of <|q|, |k|>, which may be
    ten times the score itself. Weights that plain PyTorch has saved are exactly 1 in a row that sees one key.
    """
    if not (gradient.numel() and call.q.numel() and call.k.numel()):
        return 0.0
    products = math.prod(t.double().nan_to_num(0, 0, 0).norm(dim=-1).max().item() for t in (call.q, call.k))
    size = gradient.nan_to_num(0, 0, 0).abs().max().item()
    return torch.finfo(call.lse_dtype).eps * softmax_scale(call) * products * max(1.0, size)


def softmax_scale(call: Call) -> float:
    """Without its sign."""
    scale = call.options.get("softmax_scale")
    return call.q.shape[-1] ** -0.5 if scale is None else abs(scale)


def cancellation(call: Call, out: Tensor) -> float:
    """What the gradient of a score may be off where it is the difference of two equal numbers.

    It is p * (<grad_out, v> - <grad_out, out>), and out is v in a row that sees one key. autograd takes the difference
    of one number and itself; a kernel sums each product in an order of its own.
    """
    if call.grad_out is None or not out.numel():
        return 0.0
    products = (call.grad_out.double() * out.double()).abs().nan_to_num(0, 0, 0).sum(-1).max().item()
    largest = max(t.abs().nan_to_num(0, 0, 0).max().item() if t.numel() else 0.0 for t in (call.q, call.k))
    return 4 * torch.finfo(call.lse_dtype).eps * products * max(1.0, softmax_scale(call) * largest)


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


def assert_within_bound(
    name: str, got: Tensor, ref: Tensor, low: Tensor, dtype: torch.dtype, factor: float = 2.0, slack: float = 0.0
) -> None:
    got, ref, low = got.double(), ref.double(), low.double()
    assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert not got.isnan().any(), f"{name}: {int(got.isnan().sum())} of {got.numel()} are NaN"
    assert torch.equal(got.isinf() * got.sign(), ref.isinf() * ref.sign()), f"{name}: infinite in other places"
    finite = ref.isfinite()
    if not finite.any():
        return
    error = torch.where(finite, got - ref, 0).abs().max().item()
    low_error = torch.where(finite & low.isfinite(), low - ref, 0).abs().max().item()
    scale = max(1.0, torch.where(finite, ref, 0).abs().max().item())
    bound = factor * low_error + ROUNDING[dtype] * torch.finfo(dtype).eps * scale + slack
    assert error <= bound, f"{name}: error {error:.3e} > {bound:.3e} (plain PyTorch: {low_error:.3e})"
