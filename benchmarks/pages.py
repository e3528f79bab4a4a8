"""Figures on the pages: every one is computed from the records, and put where it belongs.

python -m benchmarks.pages           what the pages say, and what the records say where it is something else
python -m benchmarks.pages --write   puts the records' figures into the pages

Words are nobody's but the author's: after new records read what stands around the figures that moved. Fails where a
figure is not the record's, where a sentence or a table is gone, and where a claim that has no figure does not hold.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README, PERFORMANCE = "README.md", "docs/performance.md"
KERNELS, TUNING = "docs/kernels", "docs/tuning"
FORWARD_PAGE, BACKWARD_PAGE = f"{TUNING}/forward_sm90.md", f"{TUNING}/backward_sm90.md"
BACKWARD_KERNEL = f"{KERNELS}/backward_sm90.md"
TIMES = "\N{MULTIPLICATION SIGN}"
HIDDEN, TRAINING_ROWS = 2048, 36
NAMES = {"flash-ext": "flash_ext", "FlashAttention-3": "fa3", "FA3": "fa3", "FA2": "fa2", "cuDNN": "cudnn"}
FOUR = ("flash_ext", "fa3", "cudnn", "fa2")
OPTIONS_IN_README = {
    "and its gradient": "bias (1, h, q, k), its gradient",
    "key padding": "mask (b, 1, 1, k)",
}
SEVERAL_GPUS = "*_context_parallel.json"
COMMAND = r"`[^`]*?(python -m benchmarks[^`]*)`,\s+(?:in\s+)?`benchmarks/results/([\w.]+)`"

Row = dict[str, Any]


class Gone(ValueError):
    """What a figure stands in is not on the page any more."""


# ---- Records --------------------------------------------------------------------------------------------------------


def rows_of(file: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / file).read_text())["rows"]
    return rows


def find(rows: Iterable[Row], **problem: Any) -> Row:
    (row,) = (r for r in rows if all(r["problem"].get(name) == value for name, value in problem.items()))
    return row


def training_row(direction: str, head_dim: int, size: str, mask: str, dtype: str = "bfloat16") -> Row:
    """Of a cell; ``size`` is "batch x seqlen", or the length alone."""
    shape = {"head_dim": head_dim, "seqlen": int(size.split(TIMES)[-1]), "heads_kv": HIDDEN // head_dim}
    return find(rows_of(f"h200_{direction}.json"), dtype=dtype, causal=mask == "causal", **shape)


def training_rows(direction: str) -> list[Row]:
    rows = [r for r in rows_of(f"h200_{direction}.json") if r["problem"]["dtype"] == "bfloat16"]
    rows = [r for r in rows if r["problem"]["batch"] * r["problem"]["seqlen"] == 16384 and _is_training(r["problem"])]
    assert len(rows) == TRAINING_ROWS, f"{len(rows)} rows of training"
    return rows


def training_ratios(direction: str, *peers: str, **problem: Any) -> list[float]:
    """The time of the fastest of the peers over ours."""
    rows = [r["measured"] for r in training_rows(direction) if problem.items() <= r["problem"].items()]
    return [min(row[peer] for peer in peers) / row["flash_ext"] for row in rows]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def training_means(direction: str) -> dict[str, float]:
    """By peer, the geometric mean of its time over ours."""
    peers = training_rows(direction)[0]["measured"]
    return {peer: geometric_mean(training_ratios(direction, peer)) for peer in peers}


def means_by_head_dim(direction: str, *peers: str) -> list[float]:
    return [geometric_mean(training_ratios(direction, *peers, head_dim=head_dim)) for head_dim in (64, 128, 256)]


def forward_over_the_better_peer() -> list[str]:
    """Of FlashAttention-3 and cuDNN: the mean of all, by head_dim, and the least."""
    peers = ("fa3", "cudnn")
    ratios = training_ratios("forward", *peers)
    return [f"{x:.3f}" for x in (geometric_mean(ratios), *means_by_head_dim("forward", *peers), min(ratios))]


def backward_means() -> list[str]:
    """Over cuDNN, FA2 and FlashAttention-3; over the last one also by head_dim."""
    found = [training_means("backward")[peer] for peer in ("cudnn", "fa2", "fa3")]
    return [f"{x:.2f}" for x in (*found, *means_by_head_dim("backward", "fa3"))]


def grouped_backward(*names: str) -> list[str]:
    """TFLOP/s at 2 x 8192 tokens, 16 query heads over 4: full, then causal."""
    shape = {"batch": 2, "seqlen": 8192, "heads_q": 16, "heads_kv": 4, "head_dim": 128}
    shown = [find(rows_of("h200_backward.json"), **shape, causal=causal)["shown"] for causal in (False, True)]
    return [f"{of[name]:.0f}" for of in shown for name in names]


def _is_training(problem: Row) -> bool:
    return bool(problem["heads_q"] == problem["heads_kv"] == HIDDEN // problem["head_dim"])


def means(direction: str) -> list[str]:
    found = training_means(direction)
    return [*(f"{found[peer]:.2f}" for peer in ("fa3", "cudnn", "fa2")), f"{found['efficient']:.1f}"]


def means_in_readme() -> list[str]:
    return [f"{training_means(d)[peer]:.2f}" for d in ("forward", "backward") for peer in ("fa3", "cudnn")]


def costs(label: str, direction: str, file: str = "h200_options.json") -> list[str]:
    """In percent, head_dim 64 and 128."""
    rows = [r for r in rows_of(file) if r["problem"]["direction"] == direction and r["label"] == label]
    return [f"{row['figures']['% cost']:.0f}" for row in sorted(rows, key=lambda row: int(row["problem"]["head_dim"]))]


def plain_of_all_gpus() -> list[str]:
    """The time of a plain call of the kernels for all GPUs over that of Hopper's, head_dim 64 and 128."""
    own, hopper = (
        {(row["problem"]["direction"], row["problem"]["head_dim"]): row["measured"]["flash_ext"] for row in plain}
        for file in ("h200_options_sm80.json", "h200_options.json")
        for plain in [[row for row in rows_of(file) if row["label"] == "plain"]]
    )
    return [f"{own[d, n] / hopper[d, n]:.1f}" for d in ("forward", "backward") for n in (64, 128)]


def bounds(ratios: Sequence[float], digits: int) -> list[str]:
    return [f"{value:.{digits}f}" for value in (min(ratios), max(ratios))]


def times_as_fast(file: str, peer: str, **problem: Any) -> list[str]:
    return bounds_of_speed((r for r in report.read(RESULTS / file).rows if problem.items() <= r.problem.items()), peer)


def bounds_of_speed(rows: Iterable[report.Row], peer: str) -> list[str]:
    """ "a to b times as fast as the peer", over all rows that have it, those that it wins too. The least is the lower
    quartile of the rounds' ratios: who says "faster" by it is right in three rounds of four. The most is a median."""
    rows = [row for row in rows if peer in row.measured]
    least, most = min(row.lower_ratios()[peer] for row in rows), max(row.ratios()[peer] for row in rows)
    return bounds((least, most), 2)


def decode_of_few_heads() -> list[str]:
    """One row: FlashAttention-3 is faster in it if its metadata are made before the call."""
    row = find(rows_of("h200_decode.json"), batch=1, seqlen=4096, heads_q=16, heads_kv=2, head_dim=128)
    return [f"{row['measured']['flash_ext']:.1f}"]


def decode_rows() -> list[str]:
    """How many, and how many of them torch's backends take part in."""
    rows = rows_of("h200_decode.json")
    by_peer = {peer: sum(peer in row["measured"] for row in rows) for peer in ("fa3", "fa2", "cudnn")}
    assert by_peer["fa3"] == len(rows) and by_peer["fa2"] == by_peer["cudnn"]
    return [str(len(rows)), str(by_peer["fa2"])]


def host(call: str, *names: str) -> list[str]:
    (row,) = (row for row in rows_of("h200_host.json") if row["label"] == call)
    return [f"{row['measured'][name]:.0f}" for name in names]


def host_in_readme() -> list[str]:
    ways = ("flash_ext.activate", "sdpa")
    return [host(call, way)[0] for call in ("forward and backward", "without grad") for way in ways]


def mask_bounds(transposed: bool) -> list[str]:
    """Of masks of intervals, or of transposes: µs of host time, then of the device."""
    named = ("from_blocks", "causal & from_blocks")
    rows = [row for row in rows_of("h200_masks.json") if row["label"] not in named]
    rows = [row for row in rows if row["label"].endswith(", transposed") == transposed]
    host_times = bounds([row["measured"]["flash_ext"] for row in rows], 0)
    return [*host_times, *bounds([row["figures"]["device us"] for row in rows], 0)]


def peak_memory() -> list[str]:
    peak = find(rows_of("h200_memory.json"), seqlen=65536, direction="forward and backward")["measured"]
    return [f"{round(peak[name])}" for name in ("flash_ext", "fa2")]


def is_shown_encoder(problem: Mapping[str, Any]) -> bool:
    """Those of inference_mode without torch.compile, where a record has others too; older records have no mode."""
    shown = {"compiled": False, "mode": "inference_mode"}
    return shown.items() <= {**shown, **problem}.items()


def encoder_rows(file: str) -> list[dict[str, Any]]:
    return [row for row in rows_of(file) if is_shown_encoder(row["problem"])]


def encoder_bounds(file: str = "h200_encoder.json", dtype: str = "bfloat16") -> list[str]:
    shown = (row for row in report.read(RESULTS / file).rows if is_shown_encoder(row.problem))
    return bounds_of_speed((row for row in shown if row.problem["dtype"] == dtype), "torch")


def cpu_bounds(dtype: str) -> list[str]:
    """At head_dim 128."""
    shapes = [{"direction": direction, "dtype": dtype, "head_dim": 128} for direction in ("forward", "backward")]
    return [bound for shape in shapes for bound in times_as_fast("cpu_xeon.json", "sdpa", **shape)]


def software() -> list[str]:
    """Of all records of one H200 alike, as far as a sentence names them: torch, cuDNN, CUDA."""
    of_one = set(RESULTS.glob("h200_*.json")) - set(RESULTS.glob(SEVERAL_GPUS))
    origins = [report.read(path).provenance for path in of_one]
    (found,) = {(o["torch"][:4], ".".join(o["cudnn"].split(".")[:2]), o["cuda"]) for o in origins}
    return list(found)


def cpu_software() -> list[str]:
    return [report.read(RESULTS / "cpu_xeon.json").provenance["torch"][:4]]


def contested_forwards() -> dict[str, float]:
    """Rows of bfloat16 in which the lower quartile of a peer's ratio is not above 1, and the least of these."""
    rows = report.read(RESULTS / "h200_forward.json").rows
    training = [r for r in rows if r.problem["dtype"] == "bfloat16" and r.problem["heads_q"] == r.problem["heads_kv"]]
    least = {f"{r.table}, {r.label}": min(r.lower_ratios().values()) for r in training}
    return {row: ratio for row, ratio in least.items() if ratio <= 1}


def contested_count() -> list[str]:
    return [str(len(contested_forwards()))]


def forwards_in_readme() -> list[str]:
    """How many are the fastest, and how many are not."""
    level = len(contested_forwards())
    return [str(TRAINING_ROWS - level), str(TRAINING_ROWS), str(level)]


def lost_backwards(peer: str, mask: str) -> dict[int, list[int]]:
    """Of training: by head_dim, the lengths at which the peer is faster in three rounds of four."""
    shapes = [r["problem"] for r in training_rows("backward") if r["problem"]["causal"] == (mask == "causal")]
    rows = [row for row in report.read(RESULTS / "h200_backward.json").rows if row.problem in shapes]
    lost: dict[int, list[int]] = {}
    for problem in (row.problem for row in rows if row.ratio_spread[peer]["upper"] < 1):
        lost.setdefault(problem["head_dim"], []).append(problem["seqlen"])
    return {head_dim: sorted(lengths) for head_dim, lengths in lost.items()}


def lost_backwards_in_readme() -> list[str]:
    """The ends of these lengths, of which none between is left out, and how many full calls there are."""
    lengths = sorted({row["problem"]["seqlen"] for row in training_rows("backward")})
    causal, full = (lost_backwards("fa3", mask) for mask in ("causal", "full"))
    shortest, longest, longest_of_256 = causal[64][0], causal[64][-1], causal[256][-1]
    expected = [n for n in lengths if shortest <= n <= longest]
    assert causal[64] == causal[128] == expected and causal[256] == [n for n in expected if n <= longest_of_256], causal
    counts = sum(map(len, full.values())), TRAINING_ROWS // 2
    return [str(n) for n in (shortest, longest, longest_of_256, *counts)]


def lost_backwards_on_its_page() -> list[str]:
    """The causal ones as the README has them; of the full ones each length with its head dims."""
    of_length: dict[int, list[int]] = {}
    for head_dim, lengths in sorted(lost_backwards("fa3", "full").items()):
        for length in lengths:
            of_length.setdefault(length, []).append(head_dim)
    full = [str(n) for length, head_dims in sorted(of_length.items()) for n in (length, *head_dims)]
    return [*lost_backwards_in_readme()[:3], *full]


def commit_of_fa3() -> list[str]:
    """Version and commit, in the records that the sentence names; the others have a digest alone."""
    origins = {
        path.stem: report.read(path).provenance["peer_origins"].get("fa3") for path in RESULTS.glob("h200_*.json")
    }
    known = {name: (of["version"], of["commit"]) for name, of in origins.items() if of and "commit" in of}
    digests = {name for name, of in origins.items() if of} - known.keys()
    assert known.keys() == {"h200_forward", "h200_host", "h200_memory"} and digests == {"h200_backward", "h200_decode"}
    (found,) = set(known.values())
    return list(found)


# ---- Lines of tables: (header, cells of a line) -> the cells as recorded ---------------------------------------------


def training_cells(direction: str) -> Callable[[list[str], list[str]], list[str]]:
    def cells(header: list[str], line: list[str]) -> list[str]:
        head_dim, mask = line[0].split()
        shown = [training_row(direction, int(head_dim), seqlen, mask)["shown"] for seqlen in header[1:]]
        return [line[0], *(" / ".join(f"{of[name]:.0f}" for name in FOUR) for of in shown)]

    return cells


def short_cells(header: list[str], line: list[str]) -> list[str]:
    """Microseconds of the backward of short sequences; the last cell is the fastest peer's time over ours."""
    batch, seqlen = (int(n) for n in line[0].split(TIMES))
    row = find(rows_of("h200_backward.json"), batch=batch, seqlen=seqlen, head_dim=64, causal=False)
    names = [NAMES.get(title, title) for title in header[1:-1]]
    times = [1000 * row["measured"][name] for name in names]
    return [line[0], *(f"{time:.0f}" for time in times), f"{min(times[1:]) / times[0]:.2f}"]


def speed_cells(header: list[str], line: list[str]) -> list[str]:
    """TFLOP/s of the backward alone, full / causal."""
    head_dim = int(line[0])
    masks = ("full", "causal")
    rows = [[training_row("backward", head_dim, seqlen, mask) for mask in masks] for seqlen in header[1:]]
    return [line[0], *(" / ".join(f"{row['shown']['flash_ext']:.0f}" for row in of) for of in rows)]


def mean_cells(header: list[str], line: list[str]) -> list[str]:
    """Of the backward over one peer; the last cell has the least ratio too."""
    peer = NAMES[line[0]]
    ratios = training_ratios("backward", peer)
    over = [f"{mean:.2f}" for mean in means_by_head_dim("backward", peer)]
    return [line[0], *over, f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})"]


def readme_training_cells(header: list[str], line: list[str]) -> list[str]:
    head_dim, size = line[0].split(", ")
    rows = [training_row(direction, int(head_dim), size, "causal") for direction in ("forward", "backward")]
    return [line[0], *(" + ".join(f"{row['measured'][NAMES[title]]:.2f}" for row in rows) for title in header[1:])]


def float32_cells(header: list[str], line: list[str]) -> list[str]:
    head_dim, mask = line[0].split()
    found = [line[0]]
    for title in header[1:]:
        direction, size = title.split(", ")
        measured = training_row(direction, int(head_dim), size, mask, "float32")["measured"]
        found.append(" / ".join(f"{measured[name]:.2f}" for name in ("flash_ext", "efficient")))
    return found


def grouped_cells(header: list[str], line: list[str]) -> list[str]:
    direction, mask = line[0].split()
    rows, found = rows_of(f"h200_{direction}.json"), [line[0]]
    for size in header[1:]:
        batch, seqlen = map(int, size.split(f" {TIMES} "))
        shape = {"batch": batch, "seqlen": seqlen, "heads_q": 16, "heads_kv": 4, "head_dim": 128}
        shown = find(rows, **shape, causal=mask == "causal")["shown"]
        found.append(" / ".join(f"{shown[name]:.0f}" for name in FOUR))
    return found


def decode_cells(header: list[str], line: list[str]) -> list[str]:
    titles = [title for title in header if title in (*NAMES, "paged", "read")]
    labels = line[: len(header) - len(titles)]  # a column that is new has no cells yet
    heads_q, heads_kv, batch, seqlen = map(int, re.findall(r"\d+", " ".join(labels[:2])))
    shape = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": 128, "batch": batch, "seqlen": seqlen}
    row = find(rows_of("h200_decode.json"), **shape, workload=None)
    times = {title: row["measured"][name] for title, name in NAMES.items() if name in row["measured"]}
    times |= {"paged": row["measured"]["flash_ext paged"], "read": row["figures"]["read us"]}
    return [*labels, *(f"{times[title]:.1f}" for title in titles)]


def serving_cells(header: list[str], line: list[str]) -> list[str]:
    """As an engine decodes: the workload, heads and head_dim, and batch x context say which row."""
    heads_q, heads_kv, head_dim, batch, seqlen = map(int, re.findall(r"\d+", " ".join(line[1:3])))
    shape = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim, "batch": batch, "seqlen": seqlen}
    measured = find(rows_of("h200_decode.json"), **shape, workload=None if line[0] == "full" else line[0])["measured"]
    times = [measured.get(NAMES[title]) for title in header[3:]]
    return [*line[:3], *("" if time is None else f"{time:.1f}" for time in times)]


def option_times(file: str) -> Callable[[list[str], list[str]], list[str]]:
    """ms at head_dim 64 / 128."""

    def cells(header: list[str], line: list[str]) -> list[str]:
        rows = [row for row in rows_of(file) if row["problem"]["direction"] == line[0]]
        found = [[row["measured"]["flash_ext"] for row in rows if row["label"] == label] for label in header[1:]]
        return [line[0], *(" / ".join(f"{time:.2f}" for time in of_label) for of_label in found)]

    return cells


def bias_gradient_cells(header: list[str], line: list[str]) -> list[str]:
    """The backward in ms, without and with the gradient of a bias, at head_dim 64 / 128."""
    file = {"Hopper": "h200_options.json", "sm80": "h200_options_sm80.json"}[line[0]]
    _, *times = option_times(file)(["", "bias (1, h, q, k)", "bias (1, h, q, k), its gradient"], ["backward"])
    return [line[0], *times]


def module_cells(header: list[str], line: list[str]) -> list[str]:
    """ms of flash-ext / torch; a header is the situation."""
    rows = [r for r in rows_of("h200_module.json") if r["problem"]["seqlen"] == 4096 and r["label"] == line[0]]
    measured = {row["problem"]["situation"]: row["measured"] for row in rows}
    found = [measured.get(situation) for situation in header[1:]]
    return [line[0], *("" if times is None else f"{times['flash_ext']:.2f} / {times['torch']:.2f}" for times in found)]


def module_in_readme() -> list[str]:
    """Forward and backward, ours and torch's."""
    _, *cells = module_cells(["", "forward", "backward"], ["need_weights=False"])
    ours, theirs = zip(*(cell.split(" / ") for cell in cells), strict=True)
    return [*ours, *theirs]


def mask_cells(header: list[str], line: list[str]) -> list[str]:
    """Building a block mask, behind the operators it took before: µs of host and device, operators."""
    (row,) = (row for row in rows_of("h200_masks.json") if row["label"] == line[0])
    found = (row["measured"]["flash_ext"], row["figures"]["device us"], row["figures"]["operators"])
    return [*line[:2], *(f"{figure:.0f}" for figure in found)]


def option_cells(file: str) -> Callable[[list[str], list[str]], list[str]]:
    def cells(header: list[str], line: list[str]) -> list[str]:
        rows = [row for row in rows_of(file) if row["problem"]["direction"] == line[0]]
        found = [[row["figures"]["% cost"] for row in rows if row["label"] == label] for label in header[1:]]
        return [line[0], *(" / ".join(f"{cost:.0f}" for cost in of_label) for of_label in found)]

    return cells


def readme_option_cells(header: list[str], line: list[str]) -> list[str]:
    rows = [r for r in rows_of("h200_options.json") if r["problem"]["direction"] == line[0]]
    times = {row["label"]: row["measured"]["flash_ext"] for row in rows if row["problem"]["head_dim"] == 128}
    found = [times.get(OPTIONS_IN_README.get(label, label)) for label in header[1:]]
    return [line[0], *("" if time is None else f"{time:.2f}" for time in found)]


def host_cells(header: list[str], line: list[str]) -> list[str]:
    return [line[0], *(cell for call in header[1:] for cell in host(call, line[0]))]


def encoder_cells(header: list[str], line: list[str]) -> list[str]:
    (row,) = (row for row in encoder_rows("h200_encoder.json") if row["label"] == line[0].replace(TIMES, "x"))
    ours, theirs = row["measured"]["flash_ext"], row["measured"]["torch"]
    return [line[0], f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}{TIMES}"]


def cpu_encoder_cells(header: list[str], line: list[str]) -> list[str]:
    found = [line[0]]
    for dtype in ("bfloat16", "float32"):
        rows = [row for row in encoder_rows("cpu_epyc_encoder.json") if row["problem"]["dtype"] == dtype]
        (measured,) = (row["measured"] for row in rows if row["label"] == line[0].replace(TIMES, "x"))
        ours, theirs = measured["flash_ext"], measured["torch"]
        found += [f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}{TIMES}"]
    return found


def model_cells(header: list[str], line: list[str]) -> list[str]:
    (row,) = (row for row in rows_of("h200_models.json") if row["label"] == line[0])
    times = [row["measured"].get(name) for name in header[1:]]
    return [line[0], *("" if time is None else f"{time:.1f}" for time in times)]


def several_gpu_cells(file: str) -> Callable[[list[str], list[str]], list[str]]:
    """ms on one GPU and on several, the gain, TFLOP/s, and their ratio to one GPU's at 131072 tokens."""

    def cells(header: list[str], line: list[str]) -> list[str]:
        row = find(rows_of(file), seqlen=int(line[0]))
        one, several = (row["measured"].get(name) for name in ("flash_ext, one", "flash_ext"))
        alone = ["", ""] if one is None else [f"{one:.0f}", f"{row['figures']['x one']:.2f}{TIMES}"]
        rate = f"{row['figures']['x one at 131072']:.2f}{TIMES}"
        return [line[0], alone[0], f"{several:.0f}", alone[1], f"{row['shown']['flash_ext']:.0f}", rate]

    return cells


def several_gpus(file: str) -> list[str]:
    """Which, and torch."""
    origin = report.read(RESULTS / file).provenance
    return [origin["gpu"], origin["torch"][:4]]


def cpu_cells(header: list[str], line: list[str]) -> list[str]:
    dtype, size, mask = line[:3]
    batch, seqlen, heads, head_dim = map(int, size.split(f" {TIMES} "))
    shape = {"batch": batch, "seqlen": seqlen, "heads_q": heads, "head_dim": head_dim, "dtype": dtype}
    found = [dtype, size, mask]
    for direction in ("forward", "backward"):
        rows = rows_of("cpu_xeon.json")
        measured = find(rows, **shape, causal=mask == "causal", direction=direction)["measured"]
        ours, theirs = measured["flash_ext"], measured["sdpa"]
        found += [f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}{TIMES}"]
    return found


# ---- Where they stand -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The first table behind a mention."""

    page: str
    behind: str
    cells: Callable[[list[str], list[str]], list[str]]

    def __str__(self) -> str:
        return f"{self.page}: the table behind {self.behind.strip()!r}"

    def place(self, text: str) -> tuple[int, int]:
        found = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE).search(text, max(0, text.find(self.behind)))
        if self.behind not in text or found is None:
            raise Gone(f"{self} is not there")
        return found.span()

    def apply(self, text: str) -> str:
        start, end = self.place(text)
        header, rule, *lines = text[start:end].splitlines()
        titles = cells_of(header)
        filled = [line_of(self.cells(titles, cells_of(line))) for line in lines]
        return text[:start] + "\n".join([header, rule, *filled]) + "\n" * text[start:end].endswith("\n") + text[end:]


@dataclass(frozen=True)
class Sentence:
    """Words with figures in them, a group for each. A line may end at any space of the pattern."""

    page: str
    pattern: str
    values: Callable[[], list[str]]
    behind: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", self.pattern.replace(" ", r"\s+"))

    def __str__(self) -> str:
        return f"{self.page}: {self.pattern}"

    def apply(self, text: str) -> str:
        found = re.compile(self.pattern).search(text, max(0, text.find(self.behind)))
        if self.behind not in text or found is None:
            raise Gone(f"{self.page} does not say {self.pattern!r} any more")
        return substituted(text, found, self.values())


@dataclass(frozen=True)
class Commands:
    """Beside a file, the command that recorded it, behind the environment in which it ran."""

    page: str

    def __str__(self) -> str:
        return f"{self.page}: commands"

    def apply(self, text: str) -> str:
        for found in reversed(list(re.finditer(COMMAND, text))):
            recorded = report.read(RESULTS / found[2]).provenance["command"]
            text = substituted(text, found, [re.sub(r" --json \S+", "", recorded), found[2]])
        return text


def figures_of_several_gpus() -> Iterator[Table | Sentence]:
    """None before there is a record: it needs a machine with two GPUs."""
    for file in sorted(path.name for path in RESULTS.glob(SEVERAL_GPUS)):
        yield Table(PERFORMANCE, file, several_gpu_cells(file))
        yield Sentence(
            PERFORMANCE,
            r"GPUs of this section are ([\w ]+), with torch ([\d.]+)\.",
            lambda file=file: several_gpus(file),  # type: ignore[misc]
        )


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def line_of(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def substituted(text: str, found: re.Match[str], values: Sequence[str]) -> str:
    """The groups replaced, from the last to the first."""
    assert len(values) == len(found.groups()), (found.re.pattern, values)
    for n in range(len(values), 0, -1):
        text = text[: found.start(n)] + values[n - 1] + text[found.end(n) :]
    return text


# ---- The section of the shapes, which is there once they are recorded ------------------------------------------------

SHAPES = "h200_shapes.json"


@dataclass(frozen=True)
class Section(Table):
    """A section whose lines are all the record's, ``behind`` its heading; without one, it is put before ``before``."""

    before: str = ""

    def apply(self, text: str) -> str:
        start = text.find(self.behind)
        end = text.find("\n## ", start + 1) if start >= 0 else text.find(self.before)
        if end < 0:
            raise Gone(f"{self.page} has no place for {self.behind.strip()!r}")
        return text[: start if start >= 0 else end] + self.behind + "\n".join(["", *shape_lines(), ""]) + text[end:]


def shape_lines() -> list[str]:
    """Of a heading of the record a line: geometric mean and least of the best peer's time over ours, by direction."""
    record, ratios = report.read(RESULTS / SHAPES), dict[str, dict[str, list[float]]]()
    for row in record.rows:
        if (best := report.best_ratio(row)) is not None:
            direction, dtype = row.problem["direction"], row.problem["dtype"]
            of_shape = ratios.setdefault(row.table.replace(f", {direction}, {dtype}", ""), {})
            of_shape.setdefault(direction, []).append(best)
    command = re.sub(r" --json \S+", "", record.provenance["command"])
    lines = [
        "The time of the fastest peer over flash-ext's, as a geometric mean and in the worst row: short sequences,",
        "chunks of prompts over dense keys and over caches, cross-attention, packed sequences, wide heads. By",
        f"`{command}`,",
        f"in `benchmarks/results/{SHAPES}`, which has each row and the kernel that runs it. [What the rows",
        "are](benchmarks.md#benchmarks).",
        "",
        line_of(["", "forward", "backward"]),
        line_of(["---"] * 3),
    ]
    for title, by_direction in ratios.items():
        found = [by_direction.get(direction) for direction in ("forward", "backward")]
        lines.append(line_of([title, *(f"{geometric_mean(r):.2f} ({min(r):.2f})" if r else "" for r in found)]))
    return lines


SHAPES_SECTION = Section(
    PERFORMANCE, "\n## Shapes that users have\n", lambda header, line: line, before="\n## Grouped heads\n"
)

# ---- All of them ----------------------------------------------------------------------------------------------------

PAIR = r"(\d+) / (\d+)"
BOUNDS = r"([\d.]+) to ([\d.]+) times as fast as"
NUMBER = r"([\d.]+) times\s+"
CPU_RATIOS = r"([\d.]+) to ([\d.]+) forward and ([\d.]+) to ([\d.]+) backward"
MEANS = rf"over the 36: {NUMBER}FlashAttention-3, {NUMBER}cuDNN, {NUMBER}FA2, {NUMBER}efficient"
DETERMINISTIC = rf"`deterministic` costs {PAIR} % at head_dim 64 / 128"
FIGURES: tuple[Table | Sentence | Commands, ...] = (
    Table(README, "Training, causal", readme_training_cells),
    Table(README, "h200_options.json", readme_option_cells),
    Table(README, "h200_decode.json", decode_cells),
    Sentence(
        README,
        r"\(([\d.]+) and ([\d.]+) times their speed as a mean\); the backward is at ([\d.]+) and ([\d.]+) times",
        means_in_readme,
    ),
    Sentence(
        README,
        r"under `activate\(\)`, SDPA takes (\d+) µs of host time for forward and backward, torch's own (\d+); "
        r"for a forward (\d+) and (\d+)\.",
        host_in_readme,
    ),
    Sentence(
        README,
        r"width 1024, takes ([\d.]+) \+ ([\d.]+), torch's ([\d.]+) \+ ([\d.]+) ",
        module_in_readme,
    ),
    Sentence(README, r"torch ([\d.]+), cuDNN ([\d.]+);", lambda: software()[:2]),
    Sentence(
        README,
        r"in causal sequences of (\d+) to (\d+) tokens \(head_dim 256: to (\d+)\), and (\d+) of (\d+) full ones\.",
        lost_backwards_in_readme,
    ),
    Sentence(README, rf"{PAIR} % slower at head_dim 64 / 128", lambda: costs("deterministic", "backward")),
    Table(PERFORMANCE, "h200_forward.json", training_cells("forward")),
    Table(PERFORMANCE, "h200_backward.json", training_cells("backward")),
    *([SHAPES_SECTION] if (RESULTS / SHAPES).exists() else []),
    Table(PERFORMANCE, "\n## Grouped heads\n", grouped_cells),
    Table(PERFORMANCE, "\n## float32\n", float32_cells),
    Table(PERFORMANCE, "h200_decode.json", decode_cells),
    Table(PERFORMANCE, "\nAs a serving engine decodes", serving_cells),
    Table(PERFORMANCE, "h200_options.json", option_cells("h200_options.json")),
    Table(PERFORMANCE, "h200_options_sm80.json", option_cells("h200_options_sm80.json")),
    Table(PERFORMANCE, "h200_module.json", module_cells),
    Table(PERFORMANCE, "\n## Host and memory\n", host_cells),
    Table(PERFORMANCE, "h200_encoder.json", encoder_cells),
    Table(PERFORMANCE, "cpu_xeon.json", cpu_cells),
    Table(PERFORMANCE, "cpu_epyc_encoder.json", cpu_encoder_cells),
    Sentence(README, r"evaluates ([\d.]+) to ([\d.]+) times as fast as torch's", encoder_bounds),
    Sentence(README, r"fastest in (\d+) of (\d+) training shapes, level in (\d+) ", forwards_in_readme),
    Sentence(PERFORMANCE, r"in (\d+) of them a peer may be faster", contested_count),
    Sentence(PERFORMANCE, MEANS, lambda: means("forward"), behind="\n## Forward\n"),
    Sentence(PERFORMANCE, MEANS, lambda: means("backward"), behind="\n## Backward\n"),
    Sentence(PERFORMANCE, r"torch ([\d.]+), cuDNN ([\d.]+), CUDA ([\d.]+)\.", software),
    Sentence(PERFORMANCE, r"FlashAttention-3 is ([\d.]+), commit (\w+), in", commit_of_fa3),
    Sentence(PERFORMANCE, r"Over its (\d+) rows, of which torch's backends take part in (\d+),", decode_rows),
    Sentence(
        PERFORMANCE,
        rf"flash-ext is {BOUNDS} FA2, {BOUNDS} cuDNN, and {BOUNDS} FlashAttention-3,",
        lambda: [bound for peer in ("fa2", "cudnn", "fa3") for bound in times_as_fast("h200_decode.json", peer)],
    ),
    Sentence(
        PERFORMANCE,
        rf"A bias with its gradient adds {PAIR} % to the backward\.",
        lambda: costs("bias (1, h, q, k), its gradient", "backward"),
    ),
    Sentence(PERFORMANCE, rf"`deterministic` adds {PAIR} %", lambda: costs("deterministic", "backward")),
    Table(PERFORMANCE, "\nMasks that hide pairs", option_cells("h200_options.json")),
    Sentence(
        PERFORMANCE,
        r"head_dim 64 / 128 ([\d.]+) / ([\d.]+) times the time above forward and ([\d.]+) / ([\d.]+) backward",
        plain_of_all_gpus,
    ),
    Sentence(PERFORMANCE, r"16 heads over 2, where flash-ext takes ([\d.]+) µs", decode_of_few_heads),
    Sentence("docs/benchmarks.md", r"flash-ext takes ([\d.]+) there", decode_of_few_heads),
    Sentence(PERFORMANCE, r"at 65536 tokens take (\d+) MiB beside their\s+inputs, FA2 (\d+)", peak_memory),
    Sentence(PERFORMANCE, r"it is ([\d.]+) to ([\d.]+) times as fast as torch's own", encoder_bounds),
    Sentence(PERFORMANCE, rf"{CPU_RATIOS} in float32", lambda: cpu_bounds("float32")),
    Sentence(PERFORMANCE, rf"{CPU_RATIOS} in bfloat16", lambda: cpu_bounds("bfloat16")),
    Sentence(
        PERFORMANCE,
        r"it is ([\d.]+) to ([\d.]+) times as fast as torch's in bfloat16 and ([\d.]+) to ([\d.]+) times in float32",
        lambda: [b for dtype in ("bfloat16", "float32") for b in encoder_bounds("cpu_epyc_encoder.json", dtype)],
    ),
    Sentence(PERFORMANCE, r"AVX-512 and AMX, torch ([\d.]+), by", cpu_software),
    *(Commands(str(page.relative_to(ROOT))) for page in sorted((ROOT / "docs").rglob("*.md"))),
    Table(FORWARD_PAGE, "h200_forward.json", training_cells("forward")),
    Table(BACKWARD_PAGE, "h200_backward.json", training_cells("backward")),
    Sentence(
        FORWARD_PAGE,
        r"the geometric mean is ([\d.]+) \(([\d.]+) at 64, ([\d.]+) at 128, ([\d.]+) at 256\) and the smallest ratio "
        r"([\d.]+);",
        forward_over_the_better_peer,
    ),
    Table(BACKWARD_PAGE, "Geometric means and smallest ratios", mean_cells),
    Table(BACKWARD_KERNEL, "36 shapes of bfloat16", speed_cells),
    Sentence(
        BACKWARD_KERNEL,
        rf"geometric mean {NUMBER}cuDNN, {NUMBER}FA2 and {NUMBER}FlashAttention-3 \(([\d.]+) at 64, ([\d.]+) at 128, "
        r"([\d.]+) at 256\)",
        backward_means,
    ),
    Sentence(
        BACKWARD_KERNEL,
        r"(\d+) TFLOP/s full \(FlashAttention-3 (\d+)\), (\d+) causal \((\d+)\)",
        lambda: grouped_backward("flash_ext", "fa3"),
    ),
    Table(BACKWARD_KERNEL, "h200_options.json", option_times("h200_options.json")),
    Sentence(
        BACKWARD_KERNEL,
        r"in causal sequences of (\d+) to (\d+) tokens \(head_dim 256: to (\d+)\), and in full ones of (\d+) at (\d+) "
        r"and (\d+) at (\d+) and (\d+) ",
        lost_backwards_on_its_page,
    ),
    *(
        Sentence(page, DETERMINISTIC, lambda: costs("deterministic", "backward"))
        for page in (BACKWARD_KERNEL, f"{TUNING}/backward_sm90_options.md")
    ),
    Table(f"{KERNELS}/backward_short_sm90.md", "h200_backward.json", short_cells),
    *(
        Sentence(page, DETERMINISTIC, lambda: costs("deterministic", "backward", "h200_options_sm80.json"))
        for page in (f"{KERNELS}/backward_sm80.md", f"{TUNING}/backward_sm80.md")
    ),
    Sentence(
        f"{TUNING}/bias_gradient_sm90.md",
        rf"by {PAIR} % at head_dim 64 / 128 on Hopper",
        lambda: costs("bias (1, h, q, k), its gradient", "backward"),
    ),
    Sentence(
        f"{KERNELS}/block_lists_sm80.md",
        r"take (\d+) to (\d+) µs of host time and (\d+) to (\d+) µs on the device",
        lambda: mask_bounds(transposed=False),
    ),
    Sentence(
        f"{KERNELS}/block_lists_sm80.md",
        r"takes (\d+) to (\d+) µs of host time and (\d+) to (\d+) µs on the device",
        lambda: mask_bounds(transposed=True),
    ),
    Table(f"{KERNELS}/forward_sm90.md", "h200_forward.json", training_cells("forward")),
    Table(f"{KERNELS}/forward_f32_sm90.md", "h200_forward.json", float32_cells),
    Table(f"{KERNELS}/backward_f32_sm90.md", "h200_backward.json", float32_cells),
    Table(f"{KERNELS}/forward_sm80.md", "h200_options_sm80.json", option_times("h200_options_sm80.json")),
    Table(f"{KERNELS}/backward_sm80.md", "h200_options_sm80.json", option_times("h200_options_sm80.json")),
    Table(f"{KERNELS}/bias_gradient_sm90.md", "h200_options.json", bias_gradient_cells),
    Table(f"{KERNELS}/bias_gradient_sm80.md", "h200_options_sm80.json", bias_gradient_cells),
    Table(f"{KERNELS}/decode_sm80.md", "h200_decode.json", decode_cells),
    Table(f"{TUNING}/decode_sm80.md", "h200_decode.json", decode_cells),
    Table(PERFORMANCE, "h200_models.json", model_cells),
    Table(f"{TUNING}/host.md", "h200_host.json", host_cells),
    Table(f"{KERNELS}/block_sparse.md", "h200_masks.json", mask_cells),
    Table(f"{KERNELS}/cpu.md", "cpu_xeon.json", cpu_cells),
    *figures_of_several_gpus(),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the records' figures into the pages")
    chosen = parser.parse_args()
    wrong = []
    for page in dict.fromkeys(figure.page for figure in FIGURES):
        before = after = (ROOT / page).read_text()
        for figure in (figure for figure in FIGURES if figure.page == page):
            try:
                after = figure.apply(after)
            except Gone as error:
                wrong.append(str(error))
        if after != before:
            changes = difflib.unified_diff(before.splitlines(), after.splitlines(), page, "as recorded", "", "", 0, "")
            print("\n".join(changes))
            wrong += [] if chosen.write else [f"{page} does not say what the records say"]
        if chosen.write:
            (ROOT / page).write_text(after)
    print("\n".join(wrong) or "the pages say what the records say", file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
