"""Real text that is on every machine: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.1  # the share of the text that training never sees


def standard_library() -> Tensor:
    """The top-level modules of the standard library one after the other, uint8 (length)."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if not sources:
        raise FileNotFoundError(f"no Python sources in {folder}: this Python comes without the text of its library")
    return torch.frombuffer(bytearray(b"\n".join(sources)), dtype=torch.uint8)


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """(training text, held-out text)."""
    start = int(len(text) * (1 - HELD_OUT))
    return text[:start], text[start:]


def batches(text: Tensor, batch_size: int, seqlen: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, following tokens), int64 (batch_size, seqlen), cut at random places that the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    reach = torch.arange(seqlen + 1)
    while True:
        starts = torch.randint(len(text) - seqlen, (batch_size, 1), generator=generator)
        cut = text[starts + reach].long()
        yield cut[:, :-1], cut[:, 1:]
