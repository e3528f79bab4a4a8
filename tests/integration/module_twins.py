"""``nn.MultiheadAttention`` and ours with the same parameters, masks for them, and what both give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash_ext

EMBED_DIM, NUM_HEADS, BATCH, SEQLEN_Q, SEQLEN_K = 10, 2, 2, 5, 7  # a head dim of 5 is padded to 8


LAYOUTS = ["batch_first", "sequence_first", "unbatched"]

# Which torch's modules give of calls that are right.
WITHOUT_TORCHS_WARNINGS = pytest.mark.filterwarnings(
    "ignore:Support for mismatched",
    "ignore:enable_nested_tensor",
    "ignore:The PyTorch API of nested tensors",
)


def twins(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """(torch's, ours) with equal, non-zero parameters."""
    options = {"embed_dim": EMBED_DIM, "num_heads": NUM_HEADS, "dtype": dtype} | options
    theirs, ours = nn.MultiheadAttention(**options), flash_ext.MultiheadAttention(**options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.05 + torch.randn_like(parameter) * options["embed_dim"] ** -0.5)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def make_masks(dtype: torch.dtype, seqlen_q: int, seqlen_k: int) -> tuple[dict[str, Tensor | None], ...]:
    """Kinds of attn_mask and of key_padding_mask for BATCH sequences; no row is masked entirely."""

    def hidden(*shape: int) -> Tensor:
        mask = torch.rand(*shape) < 0.3
        mask[..., 0] = False
        return mask

    def additive(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype).masked_fill(hidden(*shape), -torch.inf)

    causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(1)
    attn_masks = {
        "none": None,
        "bool_2d": hidden(seqlen_q, seqlen_k),
        "bool_3d": hidden(BATCH * NUM_HEADS, seqlen_q, seqlen_k),
        "float_2d": additive(seqlen_q, seqlen_k),
        "float_3d": additive(BATCH * NUM_HEADS, seqlen_q, seqlen_k),
        "causal": causal,
        "causal_float": torch.zeros(causal.shape, dtype=dtype).masked_fill(causal, -torch.inf),
    }
    padding = hidden(BATCH, seqlen_k)
    padding_masks = {"none": None, "bool": padding, "float": additive(BATCH, seqlen_k)}
    return attn_masks, padding_masks


def run(module: nn.Module, inputs: list[Tensor], grads: list[Tensor], **call: Any) -> dict[str, Tensor]:
    """Output, weights and every gradient, of parameters, inputs and float masks; ``inputs`` of one is shared by all.

    A mask that a hint replaces has no gradient.
    """
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    for name in ("attn_mask", "key_padding_mask"):
        if call.get(name) is not None and call[name].is_floating_point() and not call.get("is_causal"):
            call[name] = call[name].detach().clone().requires_grad_()
    module.zero_grad()
    out, weights = module(*(inputs * 3 if len(inputs) == 1 else inputs), **call)
    results = {"out": out}
    loss = (out * grads[0].to(out.dtype)).sum()
    if weights is not None:
        results["weights"] = weights
        loss = loss + (weights * grads[1].to(weights.dtype)).sum()
    loss.backward()
    results |= {f"grad of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    results |= {f"grad of input {n}": x.grad for n, x in enumerate(inputs)}
    results |= {f"grad of {n}": m.grad for n, m in call.items() if isinstance(m, Tensor) and m.requires_grad}
    return {name: result.detach() for name, result in results.items()}


def make_inputs(layout: str, kind: str, kdim: int, vdim: int, dtype: torch.dtype) -> tuple[list[Tensor], int, int]:
    """Inputs of self-attention (one tensor), memory attention (key is value) or cross-attention, and lengths."""
    seqlen_k = SEQLEN_Q if kind == "self" else SEQLEN_K
    shapes = [(SEQLEN_Q, EMBED_DIM)] if kind == "self" else [(SEQLEN_Q, EMBED_DIM), (seqlen_k, kdim), (seqlen_k, vdim)]
    if layout == "batch_first":
        shapes = [(BATCH, *shape) for shape in shapes]
    elif layout == "sequence_first":
        shapes = [(seqlen, BATCH, dim) for seqlen, dim in shapes]
    return [0.3 + torch.randn(*shape, dtype=dtype) for shape in shapes], SEQLEN_Q, seqlen_k


def assert_equal(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], case: object, tolerance: float | None = None
) -> None:
    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: 2e-5}[ours["out"].dtype]
    assert ours.keys() == theirs.keys(), case
    for name, expected in theirs.items():
        actual = ours[name]
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), (case, name)
        difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
        assert difference <= tolerance * (1 + expected.abs().max().item()), (case, name, difference)
