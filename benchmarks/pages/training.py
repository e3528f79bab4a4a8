"""Figures of the training shapes: ``h200_forward.json`` and ``h200_backward.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import report
from benchmarks.forward_backward import FEW_KEY_HEADS, SHORT_HEAD_DIM, SHORT_SEQLENS
from benchmarks.pages.figures import Section, line_of
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.records import (
    FOUR,
    NAMES,
    TIMES,
    Cells,
    Row,
    find,
    geometric_mean,
    per_cent_less,
    record_of,
    rows_of,
)

HIDDEN, TOKENS, TRAINING_ROWS = 2048, 16384, 36


def training_row(direction: str, head_dim: int, size: str, mask: str, dtype: str = "bfloat16") -> Row:
    """Of a cell; ``size`` is "batch x seqlen", or the length alone."""
    shape = {"head_dim": head_dim, "seqlen": int(size.split(TIMES)[-1]), "heads_kv": HIDDEN // head_dim}
    return find(rows_of(f"h200_{direction}.json"), dtype=dtype, causal=mask == "causal", **shape)


def training_rows(direction: str) -> list[Row]:
    rows = [row for row in rows_of(f"h200_{direction}.json") if is_training_row(row["problem"])]
    assert len(rows) == TRAINING_ROWS, f"{len(rows)} rows of training"
    return rows


def training_ratios(direction: str, *peers: str, **problem: Any) -> list[float]:
    """The time of the fastest of the peers over ours."""
    rows = [r["measured"] for r in training_rows(direction) if problem.items() <= r["problem"].items()]
    return [min(row[peer] for peer in peers) / row["flash_ext"] for row in rows]


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


def is_training_row(problem: Mapping[str, Any]) -> bool:
    """Whether it is one of the 36, in bfloat16 and with as many tokens as they all have."""
    heads, tokens = HIDDEN // problem["head_dim"], problem["batch"] * problem["seqlen"]
    return problem["dtype"] == "bfloat16" and tokens == TOKENS and problem["heads_q"] == problem["heads_kv"] == heads


def means(direction: str) -> list[str]:
    found = training_means(direction)
    return [*(f"{found[peer]:.2f}" for peer in ("fa3", "cudnn", "fa2")), f"{found['efficient']:.1f}"]


def means_in_readme() -> list[str]:
    return [f"{training_means(d)[peer]:.2f}" for d in ("forward", "backward") for peer in ("fa3", "cudnn")]


def contested_forwards() -> dict[str, float]:
    """Rows of bfloat16 in which the lower quartile of a peer's ratio is not above 1, and the least of these."""
    rows = record_of("h200_forward.json").rows
    training = [r for r in rows if r.problem["dtype"] == "bfloat16" and r.problem["heads_q"] == r.problem["heads_kv"]]
    least = {f"{r.table}, {r.label}": min(r.lower_ratios().values()) for r in training}
    return {row: ratio for row, ratio in least.items() if ratio <= 1}


def contested_count() -> list[str]:
    return [str(len(contested_forwards()))]


def forwards_in_readme() -> list[str]:
    """In how many of how many flash-ext is faster than every peer in three rounds of four."""
    return [str(TRAINING_ROWS - len(contested_forwards())), str(TRAINING_ROWS)]


def lost_backwards_to_fa3() -> list[str]:
    """In how many of how many shapes of training it is faster in three rounds of four, by the upper quartile, and how
    far we are behind in three of four, at most: in per cent, rounded up."""
    shapes = [row["problem"] for row in training_rows("backward")]
    spreads = [row.ratio_spread["fa3"] for row in record_of("h200_backward.json").rows if row.problem in shapes]
    behind = [per_cent_less(spread["lower"]) for spread in spreads if spread["upper"] < 1]
    return [str(len(behind)), str(TRAINING_ROWS), str(max(behind, default=0))]


def training_cells(direction: str) -> Cells:
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
    """ms of forward + backward; query over key heads are named where they are not as many as in the training table."""
    head_dim, size, *heads = line[0].split(", ")
    rows = [training_row(direction, int(head_dim), size, "causal") for direction in ("forward", "backward")]
    if heads:
        batch, seqlen = map(int, size.split(f" {TIMES} "))
        heads_q, heads_kv = map(int, heads[0].split("/"))
        shape = {"batch": batch, "seqlen": seqlen, "heads_q": heads_q, "heads_kv": heads_kv, "causal": True}
        rows = [find(rows_of(f"h200_{direction}.json"), **shape) for direction in ("forward", "backward")]
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


def few_and_short_lines() -> list[str]:
    """A line for each row that only the backward has: TFLOP/s of the four, and the fastest peer's time over ours."""
    few = {shape for shape, _ in FEW_KEY_HEADS}
    shape_of = ("batch", "seqlen", "heads_q", "heads_kv", "head_dim")
    lines = [
        "The backward where tiles of keys are few, TFLOP/s of the same four, and the time of the fastest peer,",
        "efficient included, over flash-ext's, in `benchmarks/results/h200_backward.json`:",
        "",
        line_of([f"batch {TIMES} seqlen", "heads, head_dim, mask", "TFLOP/s", "/ best peer"]),
        line_of(["---"] * 4),
    ]
    for row in record_of("h200_backward.json").rows:
        of = row.problem
        short = of["seqlen"] in SHORT_SEQLENS and of["head_dim"] == SHORT_HEAD_DIM
        if not short and tuple(of[name] for name in shape_of) not in few:
            continue
        heads = f"{of['heads_q']}" if of["heads_q"] == of["heads_kv"] else f"{of['heads_q']} over {of['heads_kv']}"
        shown = " / ".join(f"{row.shown[name]:.0f}" for name in FOUR)
        kind = f"{heads}, {of['head_dim']}, {'causal' if of['causal'] else 'full'}"
        best = report.best_ratio(row)
        lines.append(
            line_of([f"{of['batch']} {TIMES} {of['seqlen']}", kind, shown, "" if best is None else f"{best:.2f}"])
        )
    return lines


FEW_AND_SHORT_SECTION = Section(
    PERFORMANCE, "\n## Few key heads and short sequences\n", before="\n## float32\n", lines=few_and_short_lines
)
