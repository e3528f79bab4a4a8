"""Prints and draws what the demo found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flash_ext.demo.measure import Measurement
from flash_ext.demo.training import Training

LOSS_ROWS = 6


def heading(title: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}", flush=True)


def print_losses(runs: Mapping[str, Training]) -> None:
    """The losses of two runs, some of the steps, and how far they ever were apart."""
    ours, theirs = runs.values()
    last = len(ours.losses) - 1
    steps = sorted({round(last * row / (LOSS_ROWS - 1)) for row in range(LOSS_ROWS)})
    rows = [(f"step {step + 1}", ours.losses[step], theirs.losses[step]) for step in steps]
    rows.append(("held-out text", ours.held_out_loss, theirs.held_out_loss))
    print(f"{'loss (nats per byte)':<22}" + "".join(f"{name:>14}" for name in [*runs, "difference"]))
    for label, a, b in rows:
        print(f"{label:<22}{a:>14.6f}{b:>14.6f}{abs(a - b):>14.1e}")
    furthest = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    print(f"{'furthest apart':<22}{'':>28}{furthest:>14.1e}")
    print(f"{'ms per step (median)':<22}" + "".join(f"{run.seconds_per_step * 1e3:>14.1f}" for run in runs.values()))


def print_measurements(measured: Mapping[str, Sequence[Measurement]]) -> None:
    """One line per length, one group of columns per implementation."""
    table = {name: {m.seqlen: m for m in measurements} for name, measurements in measured.items()}
    print(f"{'':>7}" + "".join(f" |{name:^30}" for name in table))
    print(f"{'N':>7}" + f" |{'forward':>9} {'backward':>9} {'peak':>9} " * len(table))
    print(f"{'':>7}" + f" |{'ms':>9} {'ms':>9} {'MiB':>9} " * len(table))
    for seqlen in sorted({seqlen for column in table.values() for seqlen in column}):
        print(f"{seqlen:>7}" + "".join(" |" + _cells(column.get(seqlen)) for column in table.values()))


def _cells(m: Measurement | None) -> str:
    if m is None:
        return f"{'-':>9} {'-':>9} {'-':>9} "
    return f"{m.forward * 1e3:>9.1f} {m.backward * 1e3:>9.1f} {m.peak / 2**20:>9.1f} "


def plot(path: Path, runs: Mapping[str, Training], measured: Mapping[str, Sequence[Measurement]]) -> None:
    """Loss over steps, and peak memory over sequence length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    loss_axes, memory_axes = figure.subplots(1, 2)
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        loss_axes.plot(range(1, len(run.losses) + 1), run.losses, style, label=name)
    loss_axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training, same seed")
    for name, measurements in measured.items():
        memory_axes.loglog(
            [m.seqlen for m in measurements], [m.peak / 2**20 for m in measurements], "o-", base=2, label=name
        )
    memory_axes.set(xlabel="sequence length", ylabel="MiB", title="Peak memory, forward and backward")
    for axes in (loss_axes, memory_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
