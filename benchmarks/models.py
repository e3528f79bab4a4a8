"""``models``: milliseconds of a training step of whole models that call SDPA: torch's kernels beside flash-ext's.

No line of the models changes: they run under ``flash_ext.activated()``, with torch's own choice of a backend, with one
backend alone, or with FlashAttention-3 in the place of SDPA. A step is the forward, the loss and the backward towards
all parameters; weights are random, dropout is off, so that all results can be compared. All but DiT are those of
transformers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from benchmarks.arguments import DTYPES, dtypes_of, on_cpu
from benchmarks.ceilings import name_of
from benchmarks.checks import Result, WrongOutput, check_finite, check_share
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.peers import OURS, STORED_SCORES_LIMIT, Peer
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
PACKAGES_IN_PLACE = ("fa3", "flash_attn")  # of SDPA, where they are installed
PEERS = {TORCH: "torch's own choice of a backend"} | {name: f"{name.removeprefix('torch ')} alone" for name in BACKENDS}

Step = Callable[[], Tensor]  # returns the loss, and leaves gradients in the parameters


@dataclass(frozen=True)
class Problem:
    """A model of transformers, or a DiT; ``padded``: the shortest sequence is half as long as the longest."""

    model: str
    batch: int
    seqlen: int
    width: int
    heads: int
    layers: int
    padded: bool
    dtype: str

    @property
    def stores_too_much(self) -> bool:
        """Of scores, in float32, where they are stored."""
        return 4 * self.batch * self.heads * self.seqlen**2 > STORED_SCORES_LIMIT

    @property
    def label(self) -> str:
        return f"{self.model}, {self.batch} x {self.seqlen}{', padded' if self.padded else ''}"


# model, batch, seqlen, width, heads, layers, padded
SIZES = (
    ("BERT-large", 16, 512, 1024, 16, 24, True),
    ("GPT-2", 8, 1024, 768, 12, 12, False),
    ("GPT-2 1.3B", 2, 2048, 2048, 16, 24, False),
    ("GPT-2 1.3B", 1, 8192, 2048, 16, 24, False),
    ("T5-base", 8, 512, 768, 12, 12, True),
    ("DiT-L", 32, 256, 1024, 16, 24, False),
    ("ViT-L", 64, 197, 1024, 16, 24, False),
)
CPU_SIZES = (
    ("BERT", 2, 128, 128, 4, 2, True),
    ("GPT-2", 2, 128, 128, 4, 2, False),
    ("T5", 2, 128, 128, 4, 2, True),
    ("DiT", 2, 64, 128, 4, 2, False),
    ("ViT", 2, 65, 128, 4, 2, False),
)
PATCH = 16  # pixels of a ViT's patch, in each direction
VOCABULARY = 1024  # small: what is measured is not the last projection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = list(dict.fromkeys(name for name, *_ in (*SIZES, *CPU_SIZES)))
    parser.add_argument("--models", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--peers", nargs="*", choices=PACKAGES_IN_PLACE, help="packages in the place of SDPA, default: those installed"
    )


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    sizes = CPU_SIZES if on_cpu(chosen) else SIZES
    asked = [size for size in sizes if chosen.models is None or size[0] in chosen.models]
    if not asked:
        print(f"argument --models: expected of {', '.join(size[0] for size in sizes)} on this device", file=sys.stderr)
        raise SystemExit(2)
    if chosen.quick and chosen.models is None:
        asked = asked[::2]
    problems = [Problem(*size, name_of(dtype)) for dtype in dtypes_of(chosen) for size in asked]
    return [partial(measure, problem, chosen.seed, setting) for problem in problems]


def measure(problem: Problem, seed: int, setting: Setting) -> list[Row]:
    torch.manual_seed(seed)
    model = make_model(problem).to(setting.device).train()
    inputs = make_inputs(problem, setting.device)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if problem.stores_too_much else SDPBackend.MATH):
        expected = ExpectedStep(result_of(model, step_of(model, inputs)))
    model = model.to(DTYPES[problem.dtype])
    step = step_of(model, inputs)
    comparison = Comparison()
    for name, around in contexts(setting).items():
        candidate = Candidate(step, around)
        result = partial(result_of, model, candidate)
        comparison.add(name, candidate, expected, result, required=name == OURS)
    row = {"table": problem.dtype, "label": problem.label, "problem": asdict(problem), "missing": comparison.missing}
    return [Row.timed(comparison.measure(setting), **row)]


def contexts(setting: Setting) -> Mapping[str, Callable[[], AbstractContextManager[Any]]]:
    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {OURS: flash_ext.activated, TORCH: nullcontext}
    if setting.device.type == "cuda":
        found |= {name: partial(sdpa_kernel, backend) for name, backend in BACKENDS.items()}
    return found | {name: partial(in_place_of_sdpa, peer) for name, peer in setting.peers.items()}


@contextmanager
def in_place_of_sdpa(peer: Peer) -> Iterator[None]:
    """Programs that look up ``torch.nn.functional.scaled_dot_product_attention`` when they call it, call the peer.

    Raises:
        NotImplementedError: from a call that the peer does not take, or would compute otherwise.
        RuntimeError: on leaving, if nothing has called the peer: torch's function has been timed.
    """
    calls = 0

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        nonlocal calls
        calls += 1
        if attn_mask is not None:
            raise NotImplementedError(f"{peer.title} takes no mask or bias")
        if dropout_p != 0.0:
            raise NotImplementedError(f"{peer.title} is not asked for dropout, got dropout_p={dropout_p}")
        if scale is not None and not math.isclose(scale, query.shape[-1] ** -0.5):
            raise NotImplementedError(f"{peer.title} is asked for the usual scale alone, got scale={scale}")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise NotImplementedError(f"{peer.title} takes groups of heads, SDPA with enable_gqa alone")
        if is_causal and query.shape[2] != key.shape[2]:
            raise NotImplementedError(f"{peer.title} aligns is_causal with the last key, SDPA with the first")
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return peer.attention(q, k, v, is_causal).transpose(1, 2)

    with peer.around(), mock.patch.object(functional, "scaled_dot_product_attention", attend):
        yield
    if calls == 0:
        raise RuntimeError(f"nothing called {peer.title}: the model keeps torch's function")


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
    if problem.model.startswith("ViT"):
        config = transformers.ViTConfig(
            hidden_size=p.width, num_hidden_layers=p.layers, num_attention_heads=p.heads, intermediate_size=4 * p.width,
            image_size=image_size(p), patch_size=PATCH, num_labels=VOCABULARY, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=p.width, d_kv=p.width // p.heads, d_ff=4 * p.width, num_layers=p.layers,
        num_heads=p.heads, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def image_size(problem: Problem) -> int:
    """Pixels in each direction: a patch for each token but the first."""
    return PATCH * math.isqrt(problem.seqlen - 1)


def make_inputs(problem: Problem, device: torch.device) -> dict[str, Tensor]:
    shape = problem.batch, problem.seqlen
    if problem.model.startswith("DiT"):
        return {"x": torch.randn(*shape, problem.width, device=device)}
    if problem.model.startswith("ViT"):
        pixels = torch.randn(problem.batch, 3, image_size(problem), image_size(problem), device=device)
        return {"pixel_values": pixels, "labels": torch.randint(VOCABULARY, (problem.batch,), device=device)}
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
    """A step in float32, by SDPA's math backend; by the memory-efficient one where scores take too much memory."""

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
