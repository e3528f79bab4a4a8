"""``models``: milliseconds of a training step of whole models that call SDPA: torch's kernels beside flash-ext's.

No line of the models changes: they run under ``flash_ext.activated()``, with torch's own choice of a backend, or with
one backend alone. A step is the forward, the loss and the backward towards all parameters; weights are random, dropout
is off, so that all results can be compared. BERT, GPT-2 and T5 are those of transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from benchmarks.arguments import DTYPES, dtypes_of, on_cpu
from benchmarks.ceilings import name_of
from benchmarks.checks import Result, WrongOutput, check_finite, check_share
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.peers import OURS
from benchmarks.report import Row
from benchmarks.timing import Candidate

LOSS_WITHIN = 0.02  # of the loss in a wider dtype
TORCH = "torch"
BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
}
PACKAGES = ("transformers",)
PEERS = {TORCH: "torch's own choice of a backend"} | {name: f"{name.removeprefix('torch ')} alone" for name in BACKENDS}

Step = Callable[[], Tensor]  # returns the loss, and leaves gradients in the parameters


@dataclass(frozen=True)
class Problem:
    """A model of transformers, or ``dit``; ``padded``: the shortest sequence is half as long as the longest."""

    model: str
    batch: int
    seqlen: int
    width: int
    heads: int
    layers: int
    padded: bool
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.model}, {self.batch} x {self.seqlen}{', padded' if self.padded else ''}"


# model, batch, seqlen, width, heads, layers, padded
SIZES = (
    ("BERT-large", 16, 512, 1024, 16, 24, True),
    ("GPT-2", 8, 1024, 768, 12, 12, False),
    ("GPT-2 1.3B", 2, 2048, 2048, 16, 24, False),
    ("T5-base", 8, 512, 768, 12, 12, True),
    ("DiT-L", 32, 256, 1024, 16, 24, False),
)
CPU_SIZES = (
    ("BERT", 2, 128, 128, 4, 2, True),
    ("GPT-2", 2, 128, 128, 4, 2, False),
    ("T5", 2, 128, 128, 4, 2, True),
    ("DiT", 2, 64, 128, 4, 2, False),
)
VOCABULARY = 1024  # small: what is measured is not the last projection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [name for name, *_ in (*SIZES, *CPU_SIZES)]
    parser.add_argument("--models", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    sizes = CPU_SIZES if on_cpu(chosen) else SIZES[:: 2 if chosen.quick else 1]
    problems = [
        Problem(*size, name_of(dtype))
        for dtype in dtypes_of(chosen)
        for size in sizes
        if chosen.models is None or size[0] in chosen.models
    ]
    return [partial(measure, problem, chosen.seed, setting) for problem in problems]


def measure(problem: Problem, seed: int, setting: Setting) -> list[Row]:
    torch.manual_seed(seed)
    model = make_model(problem).to(setting.device).train()
    inputs = make_inputs(problem, setting.device)
    with sdpa_kernel(SDPBackend.MATH):
        expected = ExpectedStep(result_of(model, step_of(model, inputs)))
    model = model.to(DTYPES[problem.dtype])
    step = step_of(model, inputs)
    comparison = Comparison()
    for name, around in contexts(setting.device).items():
        candidate = Candidate(step, around)
        result = partial(result_of, model, candidate)
        comparison.add(name, candidate, expected, result, required=name == OURS)
    row = {"table": problem.dtype, "label": problem.label, "problem": asdict(problem), "missing": comparison.missing}
    return [Row.timed(comparison.measure(setting), **row)]


def contexts(device: torch.device) -> Mapping[str, Callable[[], AbstractContextManager[Any]]]:
    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {OURS: flash_ext.activated, TORCH: nullcontext}
    if device.type == "cuda":
        found |= {name: partial(sdpa_kernel, backend) for name, backend in BACKENDS.items()}
    return found


def make_model(problem: Problem) -> nn.Module:
    """In float32, on the CPU."""
    if problem.model.startswith("DiT"):
        return DiffusionTransformer(problem.width, problem.heads, problem.layers)
    import transformers

    p = problem
    if problem.model.startswith("BERT"):
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=p.width, num_hidden_layers=p.layers, num_attention_heads=p.heads,
            intermediate_size=4 * p.width, max_position_embeddings=p.seqlen, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
        )  # fmt: skip
        return transformers.BertForMaskedLM(config)
    if problem.model.startswith("GPT-2"):
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=p.width, n_layer=p.layers, n_head=p.heads, n_positions=p.seqlen,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=p.width, d_kv=p.width // p.heads, d_ff=4 * p.width, num_layers=p.layers,
        num_heads=p.heads, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def make_inputs(problem: Problem, device: torch.device) -> dict[str, Tensor]:
    shape = problem.batch, problem.seqlen
    if problem.model.startswith("DiT"):
        return {"x": torch.randn(*shape, problem.width, device=device)}
    tokens = torch.randint(3, VOCABULARY, shape, device=device)
    if not problem.padded:
        return {"input_ids": tokens, "labels": tokens}
    lengths = torch.linspace(problem.seqlen // 2, problem.seqlen, problem.batch, device=device).long()
    present = torch.arange(problem.seqlen, device=device) < lengths[:, None]
    labels = tokens.masked_fill(~present, -100)
    return {"input_ids": tokens, "attention_mask": present.long(), "labels": labels}


def step_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Step:
    dtype = next(model.parameters()).dtype
    arguments = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(**arguments).loss
        loss.backward()
        return loss.detach()

    return step


def result_of(model: nn.Module, step: Step) -> Result:
    """The loss, and all gradients as one vector."""
    loss = step()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return {"loss": loss.clone(), "gradient": torch.cat(gradients).float()}


@dataclass(frozen=True)
class ExpectedStep:
    """A step in float32, by SDPA's math backend."""

    ref: Result

    def check(self, who: str, result: Result) -> None:
        """Raises WrongOutput: rounding adds up over layers, so the gradient is compared as a whole."""
        check_finite(who, result)
        loss, expected = float(result["loss"]), float(self.ref["loss"])
        if not abs(loss - expected) <= LOSS_WITHIN * abs(expected):
            raise WrongOutput(f"{who}: loss is {loss:.4f}, expected {expected:.4f}")
        check_share(f"{who}: gradient", result["gradient"], self.ref["gradient"])


@dataclass(frozen=True)
class Loss:
    loss: Tensor


class DiffusionTransformer(nn.Module):
    """Blocks of a diffusion transformer without conditioning (Peebles and Xie 2023, section 3.2), and a loss."""

    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Loss:
        target = x
        for block in self.blocks:
            x = block(x)
        return Loss(functional.mse_loss(x.float(), target.float().roll(1, -1)))


class DiffusionBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.in_projection, self.out_projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.in_projection(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out_projection(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norms[1](x))
