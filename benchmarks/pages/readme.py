"""Figures of README.md."""

from __future__ import annotations

from benchmarks.pages.decode import decode_cells, decodes_lost_to_cudnn
from benchmarks.pages.figures import Sentence, Table
from benchmarks.pages.host import host_in_readme
from benchmarks.pages.modules import encoder_bounds, models_beside_torch
from benchmarks.pages.options import readme_option_cells
from benchmarks.pages.places import README
from benchmarks.pages.records import TIMES, software
from benchmarks.pages.shapes import most_behind
from benchmarks.pages.sparse import window_beside_flex
from benchmarks.pages.training import (
    forwards_in_readme,
    lost_backwards_to_fa3,
    means_in_readme,
    readme_training_cells,
)

FIGURES: tuple[Table | Sentence, ...] = (
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
        rf"window of ±1024, 1 {TIMES} 8192: ([\d.]+) \+ ([\d.]+), FlexAttention ([\d.]+) \+ ([\d.]+) ",
        window_beside_flex,
    ),
    Sentence(README, r"torch ([\d.]+), cuDNN ([\d.]+);", lambda: software()[:2]),
    Sentence(
        README,
        r"FlashAttention-3 is faster in (\d+) of (\d+) shapes, by at most (\d+) %\.",
        lost_backwards_to_fa3,
    ),
    Sentence(README, r"FlashAttention-3 takes up to (\d+) % less time, cuDNN (\d+) %", most_behind),
    Sentence(README, r"cuDNN takes less time in (\d+) of (\d+) rows, by at most (\d+) %", decodes_lost_to_cudnn),
    Sentence(README, r"steps of models that call SDPA run at ([\d.]+) to ([\d.]+) times", models_beside_torch),
    Sentence(README, r"evaluates ([\d.]+) to ([\d.]+) times as fast as torch's", encoder_bounds),
    Sentence(README, r"fastest in (\d+) of (\d+) training shapes ", forwards_in_readme),
)
