"""``python -m flash_ext``: trains a small GPT, lets it write, and measures, all beside torch's own attention.
``python -m flash_ext run``: any program, with torch's attention computed by this library.
``python -m flash_ext doctor``: what is installed, what runs where, and what is wrong."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import flash_ext
from flash_ext import program
from flash_ext.demo import measure, report, text, training
from flash_ext.demo.gpt import GPT, generate
from flash_ext.torch_private import has_kernel

PROMPT = b"    def "
TEMPERATURE = 0.5
MAX_SEQLEN = 8192  # nn.TransformerEncoder wants the causal mask as a tensor: there it takes 256 MiB
DECODE_TOLERANCE = 1e-3  # of logits, in float32
SEED = 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flash_ext",
        description="Trains a small GPT on the sources of Python's standard library, generates text from a KV cache, "
        "and compares loss, time and memory with torch's scaled_dot_product_attention.",
        epilog="python -m flash_ext run: any program, with torch's attention computed by flash_ext. "
        "python -m flash_ext doctor: what is installed, which kernels run on which device, and what is wrong.",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if this build and machine can, else cpu)")
    parser.add_argument(
        "--steps", type=positive, default=300, help="training steps of each model (default: %(default)s)"
    )
    parser.add_argument("--seqlen", type=positive, default=128, help="context in bytes (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=[512, 1024, 2048, 4096],
        metavar="N",
        help="sequence lengths at which time and memory are measured (default: 512 1024 2048 4096)",
    )
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw loss and memory curves (needs matplotlib)")
    options = parser.parse_args(arguments)
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def positive(argument: str) -> int:
    number = int(argument)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for what would otherwise fail after minutes; settles the device."""
    if options.seqlen < 2 * len(PROMPT):
        raise ValueError(f"argument --seqlen: must be at least {2 * len(PROMPT)}, got {options.seqlen}")
    if options.seqlen > MAX_SEQLEN:
        raise ValueError(f"argument --seqlen: must be at most {MAX_SEQLEN}, got {options.seqlen}")
    if options.plot is not None:
        if not options.plot.parent.is_dir():
            raise ValueError(f"argument --plot: there is no folder {options.plot.parent}")
        if options.plot.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"argument --plot: must end in .png, .pdf or .svg, got {options.plot}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("argument --plot: needs matplotlib, which is not installed: pip install matplotlib")
    options.device = choose_device(options.device)


def choose_device(wanted: str | None) -> torch.device:
    if wanted is None:
        return torch.device("cuda" if cuda_obstacle() is None else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"argument --device: must be cpu, cuda or cuda:N, got {wanted}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"argument --device: must be cpu, cuda or cuda:N, got {wanted}")
    if device.type == "cuda":
        if obstacle := cuda_obstacle():
            raise ValueError(f"argument --device: {wanted}: {obstacle}")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"argument --device: {wanted}: this machine has {torch.cuda.device_count()} GPU(s)")
    return device


def cuda_obstacle() -> str | None:
    """Why the demo cannot run on CUDA, or None."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    for operator in ("attention_forward", "attention_backward", "attention_decode_append"):
        if not has_kernel(f"flash_ext::{operator}", "CUDA"):
            return f"{operator} has no CUDA kernel in this build"
    probe = torch.zeros(1, 1, measure.HEADS, measure.HEAD_DIM, device="cuda")
    for operation in ("forward", "backward", "decode"):
        ok, reason = flash_ext.supports(probe, probe, probe, operation=operation)
        if not ok:
            return reason
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments[:1]) == ["doctor"]:
        sys.exit(examine(arguments[1:]))
    if list(arguments[:1]) == ["run"]:
        return program.main(arguments[1:])
    options = parse(arguments)
    print(f"flash_ext {flash_ext.__version__}, torch {torch.__version__}, {describe(options.device)}")

    report.heading("Training on the sources of the standard library, byte by byte")
    runs = train_both(options)
    report.heading("Generation: prefill, then one byte at a time from a KV cache in splits")
    write(runs["flash_ext"].model)
    report.heading("Loss with either attention, from the same seed")
    report.print_losses(runs)
    report.heading(f"Causal attention of {measure.HEADS} heads of {measure.HEAD_DIM}, float32, at growing length N")
    measured = measure.measure(options.lengths, options.device)
    report.print_measurements(measured)
    if options.plot is not None:
        report.plot(options.plot, runs, measured)
        print(f"\nLoss and memory curves: {options.plot}")


def examine(arguments: Sequence[str]) -> int:
    """Prints what the doctor finds; 1 if there are problems."""
    argparse.ArgumentParser(
        prog="python -m flash_ext doctor",
        description="Says what is installed, which kernels run on which device, and what is wrong, with its remedy.",
    ).parse_args(arguments)
    diagnosis = flash_ext.doctor()
    print(diagnosis)
    return 1 if diagnosis.problems else 0


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def train_both(options: argparse.Namespace) -> dict[str, training.Training]:
    """One model with our attention and one with torch's, alike in all else."""
    train_text, held_out = text.split(text.standard_library())
    models = {
        name: training.make_model(options.seqlen, SEED, options.device, with_flash_ext=name == "flash_ext")
        for name in ("flash_ext", "SDPA")
    }
    return training.train(models, train_text, held_out, options.steps, SEED)


def write(model: GPT) -> None:
    """Lets the model write, and compares what it decoded with one forward over the whole text."""
    device = model.head.weight.device
    prompt = torch.tensor(list(PROMPT), device=device)
    start = time.perf_counter()
    tokens, logits = generate(model, prompt, model.max_seqlen, TEMPERATURE, SEED)
    seconds = time.perf_counter() - start
    print(bytes(tokens[0].tolist()).decode(errors="replace"))
    with torch.inference_mode():
        error = (logits - model(tokens)).abs().max().item()
    print(f"\n{logits.shape[1]} bytes decoded, {logits.shape[1] / seconds:.0f} per second")
    print(f"Logits from the cache and from one forward over the whole text differ by {error:.1e} at most")
    if not error < DECODE_TOLERANCE:
        sys.exit(f"error: decoding differs from the forward by {error}, allowed is {DECODE_TOLERANCE}")


if __name__ == "__main__":
    main()
