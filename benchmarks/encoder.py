"""``encoder``: an evaluated ``nn.TransformerEncoder``, as torch evaluates it and as ``flash_ext.convert`` makes it.

Torch has fused operators for this, and nested tensors for a padded batch. Padded batches here have lengths from half of
the longest on. The call is timed as it is, the host's part included, in inference_mode and under no_grad.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn

import flash_ext
from benchmarks.arguments import DTYPES, dtypes_of, module_size, on_cpu, positive
from benchmarks.ceilings import name_of
from benchmarks.checks import ExpectedOutput
from benchmarks.comparison import Comparison, Setting, Work
from benchmarks.peers import OURS
from benchmarks.report import Row
from benchmarks.timing import Candidate

TORCH = "torch"
PEERS = {TORCH: "nn.TransformerEncoder, evaluated by torch"}
MODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


@dataclass(frozen=True)
class Problem:
    """An encoder and its input. ``vision``: as in ViT, normalised first, with GELU; else as torch has it by default."""

    batch: int
    seqlen: int
    embed_dim: int
    heads: int
    layers: int
    padded: bool
    vision: bool
    compiled: bool
    dtype: str
    mode: str

    @property
    def label(self) -> str:
        kind = ", ViT" if self.vision else ", padded" if self.padded else ""
        return f"{self.batch} x {self.seqlen}, {self.embed_dim} / {self.heads}{kind}"

    @property
    def heading(self) -> str:
        mode = "" if self.mode == "inference_mode" else f", {self.mode}"
        return f"{self.dtype}, {self.layers} layers, {'compiled' if self.compiled else 'eager'}{mode}"


# batch, seqlen, embed_dim, heads, padded, vision
SIZES = (
    (64, 128, 1024, 16, False, False),
    (32, 512, 1024, 16, False, False),
    (32, 512, 1024, 16, True, False),
    (8, 2048, 512, 8, True, False),
    (64, 197, 768, 12, False, True),
)
CPU_SIZES = (
    (16, 128, 1024, 16, False, False),
    (8, 512, 1024, 16, False, False),
    (8, 512, 1024, 16, True, False),
    (2, 2048, 512, 8, True, False),
    (16, 197, 768, 12, False, True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, help="default: 4; on a CPU 2")
    shapes = "batch x seqlen x embed_dim / heads, and a p behind where the batch is padded"
    parser.add_argument("--shapes", type=size, nargs="+", metavar="BxSxE/H", help=shapes)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=tuple(MODES), help="default: both")
    parser.add_argument("--compiled", action="store_true", help="also by torch.compile, both")


def size(argument: str) -> tuple[int, int, int, int, bool, bool]:
    """One of SIZES from BxSxE/H, with a p behind it where the batch is padded."""
    return (*module_size(argument.removesuffix("p")), argument.endswith("p"), False)


def work(chosen: argparse.Namespace, setting: Setting) -> list[Work]:
    sizes = chosen.shapes or (CPU_SIZES if on_cpu(chosen) else SIZES)[:: 2 if chosen.quick else 1]
    layers = chosen.layers or (2 if on_cpu(chosen) else 4)
    problems = [
        Problem(batch, seqlen, embed_dim, heads, layers, padded, vision, compiled, name_of(dtype), mode)
        for compiled in ((False, True) if chosen.compiled else (False,))
        for mode in chosen.modes
        for dtype in dtypes_of(chosen)
        for batch, seqlen, embed_dim, heads, padded, vision in sizes
    ]
    return [partial(measure, problem, chosen.seed, setting) for problem in problems]


def measure(problem: Problem, seed: int, setting: Setting) -> list[Row]:
    with MODES[problem.mode]():
        return [row_of(problem, seed, setting)]


def row_of(problem: Problem, seed: int, setting: Setting) -> Row:
    device, dtype = setting.device, DTYPES[problem.dtype]
    theirs = make_encoder(problem, device).to(dtype)
    x = torch.randn(problem.batch, problem.seqlen, problem.embed_dim, device=device, dtype=dtype)
    padding = make_padding(problem, seed, device) if problem.padded else None
    seen = slice(None) if padding is None else ~padding
    expected = expected_output(theirs, x, padding, seen)
    ours = flash_ext.convert(copy.deepcopy(theirs), report=lambda line: None)
    comparison = Comparison()
    for name, model in {OURS: ours, TORCH: theirs}.items():
        call = evaluation(model, x, padding, problem.compiled)
        result = lambda call=call: {"out": call()[seen]}  # noqa: E731
        comparison.add(name, Candidate(call), expected, result, required=name == OURS)
    row = {"table": problem.heading, "label": problem.label, "problem": asdict(problem), "missing": comparison.missing}
    return Row.timed(comparison.measure(setting), **row)


def make_encoder(problem: Problem, device: torch.device) -> nn.TransformerEncoder:
    """In float32, with a feed-forward network of four times the width."""
    layer = nn.TransformerEncoderLayer(
        problem.embed_dim,
        problem.heads,
        4 * problem.embed_dim,
        activation="gelu" if problem.vision else "relu",
        norm_first=problem.vision,
        batch_first=True,
        device=device,
    )
    return nn.TransformerEncoder(layer, problem.layers, enable_nested_tensor=not problem.vision).eval()


def make_padding(problem: Problem, seed: int, device: torch.device) -> Tensor:
    """bool (batch, seqlen), True = padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(problem.seqlen // 2, problem.seqlen + 1, (problem.batch, 1), generator=generator)
    lengths[0] = problem.seqlen
    return (torch.arange(problem.seqlen) >= lengths).to(device)


def evaluation(model: nn.Module, x: Tensor, padding: Tensor | None, compiled: bool) -> Callable[[], Tensor]:
    options = {} if padding is None else {"src_key_padding_mask": padding}
    if not compiled:
        return lambda: model(x, **options)
    torch._dynamo.reset()
    function = torch.compile(model)
    return lambda: function(x, **options)


def expected_output(
    encoder: nn.TransformerEncoder, x: Tensor, padding: Tensor | None, seen: Tensor | slice
) -> ExpectedOutput:
    """Of torch's modules one by one, in a wider dtype and in that of the encoder; ``seen``: where it is compared."""
    exact = torch.float64 if x.dtype == torch.float32 else torch.float32
    with nothing_fused(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ref, low = (
            model(x.to(dtype), src_key_padding_mask=padding)[seen]
            for model, dtype in ((copy.deepcopy(encoder).to(exact), exact), (encoder, x.dtype))
        )
    return ExpectedOutput(ref, low)


@contextmanager
def nothing_fused() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
