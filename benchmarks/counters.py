"""What the tensor cores wait for: counters of one forward of each implementation, by Nsight Compute (ncu).

python -m benchmarks.counters                                  512 full and causal, 8192 full at head_dim 64, 128, 256
python -m benchmarks.counters --calls 128x512 128x512c --peers cudnn fa3 --timeline
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.peers import find_peers, ours

TOKENS, HIDDEN = 16384, 2048
DEFAULT = [f"{d}x{rest}" for d in (64, 128, 256) for rest in ("512", "512c", "8192")]
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
METRICS = (
    TENSOR,
    "sm__cycles_active.avg",
    "sm__cycles_elapsed.max",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
)
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
SERIES = {
    "active": "TPC.TriageCompute.sm__cycles_active.avg",
    "tensor": "TPC.TriageCompute.sm__pipe_tensor_cycles_active_realtime.avg.pct_of_peak_sustained_elapsed",
    "read": "FBSP.TriageCompute.dramc__read_throughput.avg.pct_of_peak_sustained_elapsed",
}
SAMPLE_NS = 1500  # what the GPU makes of the shortest interval that ncu takes
ATTENTION = "regex:^forward_kernel|device_kernel|sdpa|flash_fwd"  # kernels, of ours and of the peers


class Shape(NamedTuple):
    head_dim: int
    seqlen: int
    causal: bool

    @staticmethod
    def parse(text: str) -> Shape:
        head_dim, _, seqlen = text.partition("x")
        return Shape(int(head_dim), int(seqlen.removesuffix("c")), seqlen.endswith("c"))

    def __str__(self) -> str:
        return f"{self.head_dim} {'causal' if self.causal else 'full'} {self.seqlen}"


def run_calls(shapes: Iterable[Shape], names: Sequence[str]) -> None:
    """What ncu watches: each implementation's call, the second one of its kind."""
    cudart = torch.cuda.cudart()
    candidates = [ours(), *find_peers(names, torch.device("cuda")).values()]
    for shape in shapes:
        size = (TOKENS // shape.seqlen, shape.seqlen, HIDDEN // shape.head_dim, shape.head_dim)
        q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for candidate in candidates:
            with candidate.around():
                candidate.attention(q, k, v, shape.causal)
                torch.cuda.synchronize()
                cudart.cudaProfilerStart()
                candidate.attention(q, k, v, shape.causal)
                torch.cuda.synchronize()
                cudart.cudaProfilerStop()


def read_kernels(text: str) -> list[dict[str, str]]:
    """The rows of ncu's raw page, one for each kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    return rows[1:]  # behind the units


def number(row: dict[str, str], name: str) -> float:
    return float(row[name].replace(",", ""))


def summary(row: dict[str, str], stalls: int = 3) -> list[str]:
    """Columns of a table, but for the first two."""
    cycles = number(row, "sm__cycles_elapsed.max")
    nanoseconds = number(row, "gpu__time_duration.sum")
    reasons = {match[1]: number(row, name) for name in row if (match := STALL.fullmatch(name))}
    share = 100.0 / max(sum(reasons.values()), 1e-9)
    most = sorted(((share * warps, reason) for reason, warps in reasons.items()), reverse=True)[:stalls]
    percent = (number(row, name) for name in METRICS[3:6])
    return [
        f"{1e-3 * nanoseconds:.0f}",
        f"{cycles / nanoseconds:.2f}",
        f"{number(row, TENSOR):.0f}",
        f"{100.0 * number(row, 'sm__cycles_active.avg') / cycles:.0f}",
        *(f"{x:.0f}" for x in percent),
        ", ".join(f"{reason} {x:.0f}" for x, reason in most),
    ]


def series(row: dict[str, str], name: str) -> list[float]:
    """Samples of a metric in time."""
    inside = re.search(r"\((.*)\)", row[SERIES[name]])
    return [float(x.replace(",", "")) for x in inside[1].split(";")] if inside else []


def timeline(row: dict[str, str]) -> list[str]:
    """Microseconds from the first block on: to the first read of memory, to the first products, to the half of the
    usual rate, and from where it falls below that for the last time to the end."""
    active = series(row, "active")
    on = [n for n, cycles in enumerate(active) if cycles > 0]
    if not on:
        return ["", "", "", ""]
    span = slice(on[0], on[-1] + 1)
    tensor, read = series(row, "tensor")[span], series(row, "read")[span]
    usual = sorted(tensor)[len(tensor) * 3 // 4]
    at_rate = [n for n, x in enumerate(tensor) if x > usual / 2]
    first = [next((n for n, x in enumerate(values) if x > 5.0), len(values)) for values in (read, tensor)]
    samples = [*first, at_rate[0] if at_rate else len(tensor), len(tensor) - 1 - at_rate[-1] if at_rate else 0]
    return [f"{1e-3 * SAMPLE_NS * n:.1f}" for n in samples]


def profile(calls: Sequence[str], peers: Sequence[str], timed: bool) -> list[dict[str, str]]:
    wanted = ["--section", "PmSampling", "--pm-sampling-interval", "1000", "--print-metric-instances", "values"]
    if not timed:
        wanted = ["--metrics", ",".join(METRICS), *(word for name in SECTIONS for word in ("--section", name))]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "raw.csv"
        watched = [sys.executable, "-m", "benchmarks.counters", "--run", "--calls", *calls, "--peers", *peers]
        options = ["--target-processes", "all", "--clock-control", "none", "--profile-from-start", "off"]
        shown = ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        subprocess.run(["ncu", *options, *shown, *wanted, "-k", ATTENTION, *watched], check=True)
        return read_kernels(log.read_text())


def table(calls: Sequence[str], names: Sequence[str], kernels: Sequence[dict[str, str]], timed: bool) -> str:
    """One line for each kernel; each implementation has one for each call."""
    columns = [
        "head_dim, mask, keys",
        "",
        "us",
        "GHz",
        "tensor %",
        "SMs %",
        "issue %",
        "memory %",
        "L2 %",
        "warps wait for, %",
    ]
    if timed:
        columns = ["head_dim, mask, keys", "", "first read, us", "first product", "half rate", "end"]
    labels = [(str(Shape.parse(call)), name) for call in calls for name in names]
    if len(labels) != len(kernels):
        raise ValueError(f"{len(kernels)} kernels were seen, {len(labels)} expected")
    lines = [columns, ["---"] * len(columns)]
    for (label, name), kernel in zip(labels, kernels, strict=True):
        lines.append([label, name, *(timeline(kernel) if timed else summary(kernel))])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.counters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", nargs="+", default=DEFAULT, metavar="DxS[c]", help="head_dim x seqlen; c: causal")
    parser.add_argument("--peers", nargs="*", default=[], choices=("cudnn", "fa2", "fa3"))
    parser.add_argument("--timeline", action="store_true", help="where in time, not how much")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.run:
        run_calls([Shape.parse(call) for call in chosen.calls], chosen.peers)
        return 0
    kernels = profile(chosen.calls, chosen.peers, chosen.timeline)
    print(table(chosen.calls, ["flash_ext", *chosen.peers], kernels, chosen.timeline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
