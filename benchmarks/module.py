"""``module``: milliseconds of ``nn.MultiheadAttention`` as people call it, flash-ext's beside torch's.

Self-attention with the same parameters, projections included, in three situations: "inference" (evaluation mode, no
gradients recorded), "forward" and "backward" (training mode; towards the input and all parameters).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flash_ext
from benchmarks.arguments import dtypes_of, module_size, on_cpu
from benchmarks.ceilings import name_of
from benchmarks.checks import Result, check_bound, check_finite, check_share, exact_matmuls
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.peers import OURS
from benchmarks.report import Row
from benchmarks.timing import Candidate

SITUATIONS = ("inference", "forward", "backward")
SIZES: Sequence[tuple[int, int, int, int]] = ((32, 512, 768, 12), (4, 4096, 1024, 16))
CPU_SIZES: Sequence[tuple[int, int, int, int]] = ((4, 512, 256, 4),)
DROPOUT = 0.1
SHORTEST = 0.5  # of the length, the shortest padded sequence
TORCH = "torch"
PEERS = {TORCH: "torch.nn.MultiheadAttention"}


@dataclass(frozen=True)
class Size:
    batch: int
    seqlen: int
    embed_dim: int
    heads: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{self.batch} x {self.seqlen} x {self.embed_dim}, {self.heads} heads"


@dataclass(frozen=True)
class Usage:
    """A way to call the module; ``arguments``: of its forward, besides query, key and value."""

    name: str
    arguments: dict[str, Any]
    dropout: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--situations", nargs="+", choices=SITUATIONS, default=SITUATIONS, help="default: all")
    parser.add_argument(
        "--sizes", type=module_size, nargs="+", metavar="BxSxE/H", help="batch x seqlen x embedding / heads"
    )


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    usual = CPU_SIZES if on_cpu(chosen) else SIZES[: 1 if chosen.quick else None]
    sizes = [
        Size(batch, seqlen, embed_dim, heads, dtype, chosen.device)
        for dtype in dtypes_of(chosen)
        for batch, seqlen, embed_dim, heads in chosen.sizes or usual
    ]
    return [
        partial(measure, size, usage, situation, setting)
        for size in sizes
        for situation in chosen.situations
        for usage in usages(size)
        if situation != "inference" or usage.dropout == 0
    ]


def usages(size: Size) -> list[Usage]:
    n, device = size.seqlen, size.device
    later = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
    lengths = torch.linspace(SHORTEST * n, n, size.batch, device=device)
    padding = torch.arange(n, device=device) >= lengths[:, None]
    numbers = torch.randn(n, n, device=device, dtype=size.dtype)
    causal = {"attn_mask": later, "is_causal": True}
    plain = {"need_weights": False}
    return [
        Usage("need_weights=False", plain),
        Usage("need_weights=True", {"need_weights": True}),
        Usage("key_padding_mask", {**plain, "key_padding_mask": padding}),
        Usage("key_padding_mask, need_weights=True", {"need_weights": True, "key_padding_mask": padding}),
        Usage("attn_mask, bool", {**plain, "attn_mask": later}),
        Usage("attn_mask, float", {**plain, "attn_mask": numbers}),
        Usage("is_causal", {**plain, **causal}),
        Usage("is_causal, key_padding_mask", {**plain, **causal, "key_padding_mask": padding}),
        Usage(f"dropout {DROPOUT}", plain, DROPOUT),
    ]


def measure(size: Size, usage: Usage, situation: str, setting: Setting) -> list[Row]:
    module = nn.MultiheadAttention(
        size.embed_dim, size.heads, usage.dropout, batch_first=True, device=size.device, dtype=size.dtype
    )
    module.train(situation != "inference")
    shape = (size.batch, size.seqlen, size.embed_dim)
    x, grad = (torch.randn(shape, device=size.device, dtype=size.dtype) for _ in range(2))
    expected = expected_of(module, x, grad, usage, situation == "backward")
    comparison = Comparison()
    if reason := obstacle(size, situation):
        comparison.leave_out(OURS, reason)
    else:
        ours = flash_ext.convert(copy.deepcopy(module), report=lambda line: None)
        add(comparison, OURS, ours, x, grad, usage, situation, expected)
    add(comparison, TORCH, module, x, grad, usage, situation, expected)
    return [
        Row.timed(
            comparison.measure(setting),
            table=f"{situation}, {name_of(size.dtype)}, {size}",
            label=usage.name,
            problem={
                "situation": situation,
                "batch": size.batch,
                "seqlen": size.seqlen,
                "embed_dim": size.embed_dim,
                "heads": size.heads,
                "dtype": name_of(size.dtype),
                "dropout": usage.dropout,
            },
            missing=comparison.missing,
        )
    ]


def obstacle(size: Size, situation: str) -> str | None:
    """Why ours is not asked at all."""
    head_dim = size.embed_dim // size.heads
    q = torch.empty(size.batch, size.seqlen, size.heads, head_dim, device=size.device, dtype=size.dtype)
    operation = "backward" if situation == "backward" else "forward"
    supported, reason = flash_ext.supports(q, q, q, operation=operation)
    return None if supported else reason


@dataclass(frozen=True)
class ExpectedOfModule:
    """``ref`` in high precision, ``low`` by plain PyTorch in the input dtype, both without dropout."""

    ref: Result
    low: Result
    on_average: bool  # what is checked has dropout

    def check(self, who: str, result: Result) -> None:
        for name, got in result.items():
            if self.on_average:
                check_share(f"{who}: {name}", got, self.ref[name])
            else:
                check_bound(f"{who}: {name}", got, self.ref[name], self.low[name])
        check_finite(who, result)


def expected_of(
    module: nn.MultiheadAttention, x: Tensor, grad: Tensor, usage: Usage, backward: bool
) -> ExpectedOfModule:
    """torch's module that stores the weights, one operation at a time."""
    exact = torch.float64 if x.dtype == torch.float32 else torch.float32
    with exact_matmuls():
        ref = plain_result(module, exact, x, grad, usage, backward)
    return ExpectedOfModule(ref, plain_result(module, x.dtype, x, grad, usage, backward), usage.dropout > 0)


def plain_result(
    module: nn.MultiheadAttention, dtype: torch.dtype, x: Tensor, grad: Tensor, usage: Usage, backward: bool
) -> Result:
    plain = copy.deepcopy(module).to(dtype).train()  # evaluation may take torch's own fused path
    plain.dropout = 0.0
    arguments = {name: _floating(value, dtype) for name, value in usage.arguments.items()}
    leaf = x.to(dtype).requires_grad_(backward)
    call = partial(plain, leaf, leaf, leaf, **{**arguments, "need_weights": True})
    found = result_of(call, plain, leaf, grad.to(dtype) if backward else None)
    return found if usage.arguments["need_weights"] else {k: v for k, v in found.items() if k != "weights"}


def _floating(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def result_of(
    call: Callable[[], tuple[Tensor, Tensor | None]], module: nn.Module, leaf: Tensor, grad: Tensor | None
) -> Result:
    """Runs the call and, given a gradient, its backward towards the input and the parameters."""
    out, weights = call()
    result = {"out": out.detach()} | ({} if weights is None else {"weights": weights.detach()})
    if grad is None:
        return result
    leaves = {"x": leaf, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(out, list(leaves.values()), grad)
    return result | {f"d {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def add(
    comparison: Comparison,
    name: str,
    module: nn.Module,
    x: Tensor,
    grad: Tensor,
    usage: Usage,
    situation: str,
    expected: ExpectedOfModule,
) -> None:
    """Checks what the module returns, and lets it take part."""
    leaf = x.clone().requires_grad_(situation == "backward")
    call = partial(module, leaf, leaf, leaf, **usage.arguments)
    if situation == "inference":
        call = torch.no_grad()(call)
    result = partial(result_of, call, module, leaf, grad if situation == "backward" else None)
    candidate = Candidate(call)
    if situation == "backward":
        candidate = Candidate(_backward_of(call, module, leaf, grad))
    comparison.add(name, candidate, expected, result, required=name == OURS)


def _backward_of(
    call: Callable[[], tuple[Tensor, Tensor | None]], module: nn.Module, leaf: Tensor, grad: Tensor
) -> Callable[[], object]:
    """The backward alone: the forward is run once."""
    kept: list[Tensor] = []
    leaves = [leaf, *module.parameters()]

    def backward() -> object:
        if not kept:
            kept.append(call()[0])
        return torch.autograd.grad(kept[0], leaves, grad, retain_graph=True)

    return backward
