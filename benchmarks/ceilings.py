"""What the machine can do at most, measured in the same run: a large matrix product, and reading memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.timing import Candidate, Clock, Effort, take_turns

MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
READ_BYTES = {"cuda": 2**31, "cpu": 2**25}
SHORT_ROW, LONG_ROW = 1024, 8192  # floats
EFFORT = Effort(most=12, fewest=12, budget_ms=60)


def measure_ceilings(clock: Clock, device: torch.device, dtypes: Iterable[torch.dtype]) -> dict[str, float]:
    """``matmul_<dtype>_tflops`` of a square product of 8192 (512 on a CPU), and ``read_tbps`` of a reduction.

    On a CPU only float32 has one: torch multiplies the others at a fraction of that where there are no instructions
    for them.
    """
    size, read_bytes = MATMUL_SIZE[device.type], READ_BYTES[device.type]
    if device.type == "cpu":
        dtypes = set(dtypes) & {torch.float32}
    found = {matmul_name(name_of(dtype)): _matmul_tflops(clock, device, dtype, size) for dtype in dict.fromkeys(dtypes)}
    stream = torch.randn(read_bytes // 4, device=device)
    return {**found, "read_tbps": read_bytes / read_ms(clock, stream, EFFORT) / 1e9}


def _matmul_tflops(clock: Clock, device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    ms = take_turns(clock, {"matmul": Candidate(lambda: a @ b)}, EFFORT)["matmul"].median
    return 2 * size**3 / ms / 1e9


def matmul_name(dtype: str) -> str:
    return f"matmul_{dtype}_tflops"


def read_ms(clock: Clock, tensor: Tensor, effort: Effort) -> float:
    """Milliseconds in which a reduction reads every byte of a contiguous tensor, and writes next to nothing.

    Which reduction of torch's reads fastest depends on the size: the fastest counts.
    """
    words = tensor.view(torch.float32).flatten()
    readers = {"sum": Candidate(words.sum)}
    if words.numel() % SHORT_ROW == 0:
        readers["sums of rows"] = Candidate(lambda: words.view(-1, SHORT_ROW).sum(1))
    if words.numel() % LONG_ROW == 0:
        readers["maxima of rows"] = Candidate(lambda: words.view(torch.int64).view(-1, LONG_ROW // 2).amax(1))
    readers = {name: clock.repeatable(reader) for name, reader in readers.items()}
    return min(sample.median for sample in take_turns(clock, readers, effort).values())


def higher(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The higher of two measurements: a ceiling is what was reached once."""
    return {name: max(value, after[name]) for name, value in before.items()}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
