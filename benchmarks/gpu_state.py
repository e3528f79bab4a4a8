"""Clocks, power and temperature of the GPU while something is measured, by nvidia-smi, which is only asked."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from types import TracebackType
from typing import Any

import torch

from benchmarks.programs import output_of

INTERVAL_MS = 1000
QUERIES = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


class GpuState:
    """Asks once a second, from ``with`` on until its end. On a machine without nvidia-smi it says nothing."""

    def __init__(self, device: torch.device) -> None:
        self._watched = device.type == "cuda"
        self._process: subprocess.Popen[str] | None = None
        self._output = ""

    def __enter__(self) -> GpuState:
        if self._watched:
            command = [*_command(QUERIES.values()), f"--loop-ms={INTERVAL_MS}"]
            try:
                self._process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            except OSError:
                pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._output, _ = self._process.communicate()

    def summary(self) -> dict[str, Any]:
        """Of each figure [lowest, median, highest], and how many readings there were; {} where there was none."""
        readings = [reading for line in self._output.splitlines() if (reading := _numbers(line)) is not None]
        if not readings:
            return {}
        columns = zip(QUERIES, zip(*readings, strict=True), strict=True)
        figures = {name: [min(column), statistics.median(column), max(column)] for name, column in columns}
        return {"readings": len(readings), **figures}


def _numbers(line: str) -> Sequence[float] | None:
    """Of a line that is whole."""
    try:
        numbers = [float(word) for word in line.split(",")]
    except ValueError:
        return None
    return numbers if len(numbers) == len(QUERIES) else None


def query_gpu(fields: Iterable[str]) -> list[str] | None:
    """Values of nvidia-smi's fields for torch's current GPU."""
    answer = output_of(*_command(fields))
    return None if not answer else [word.strip() for word in answer.splitlines()[0].split(",")]


def _command(fields: Iterable[str]) -> list[str]:
    return ["nvidia-smi", *_selection(), f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


@cache
def _selection() -> Sequence[str]:
    """Torch counts the GPUs that are visible, nvidia-smi all: it is told which, where it knows it by that name."""
    chosen = [f"--id=GPU-{getattr(torch.cuda.get_device_properties(), 'uuid', None)}"]
    return chosen if output_of("nvidia-smi", *chosen, "--query-gpu=uuid", "--format=csv") else []
