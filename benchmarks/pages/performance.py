"""Figures of docs/performance.md, and what docs/benchmarks.md repeats of them."""

from __future__ import annotations

from benchmarks.pages.cpu import cpu_bounds, cpu_cells, cpu_encoder_cells, cpu_software
from benchmarks.pages.decode import decode_cells, decode_rows, serving_cells
from benchmarks.pages.figures import NUMBER, PAIR, Sentence, Table
from benchmarks.pages.host import host_cells, peak_memory
from benchmarks.pages.modules import encoder_bounds, encoder_cells, model_cells, models_beside_torch, module_cells
from benchmarks.pages.options import costs, deterministic_costs, option_cells, plain_of_all_gpus
from benchmarks.pages.origins import ORIGINS_SECTION
from benchmarks.pages.places import PERFORMANCE
from benchmarks.pages.records import commit_of_fa3, recorded, software, times_as_fast
from benchmarks.pages.several_gpus import figures_of_several_gpus
from benchmarks.pages.shapes import SHAPES, SHAPES_SECTION
from benchmarks.pages.sparse import SPARSE, SPARSE_SECTION
from benchmarks.pages.sustained import SUSTAINED_SECTION, is_sustained
from benchmarks.pages.training import (
    FEW_AND_SHORT_SECTION,
    contested_count,
    float32_cells,
    grouped_cells,
    means,
    training_cells,
)

BOUNDS = r"([\d.]+) to ([\d.]+) times as fast as"
RATIOS = r"([\d.]+) / ([\d.]+)"
CPU_RATIOS = r"([\d.]+) to ([\d.]+) forward and ([\d.]+) to ([\d.]+) backward"
MEANS = rf"over the 36: {NUMBER}FlashAttention-3, {NUMBER}cuDNN, {NUMBER}FA2, {NUMBER}efficient"
FIGURES: tuple[Table | Sentence, ...] = (
    Table(PERFORMANCE, "h200_forward.json", training_cells("forward")),
    Table(PERFORMANCE, "h200_backward.json", training_cells("backward")),
    *([SUSTAINED_SECTION] if is_sustained() else []),
    *([SHAPES_SECTION] if recorded(SHAPES) else []),
    *([SPARSE_SECTION] if recorded(SPARSE) else []),
    Table(PERFORMANCE, "\n## Grouped heads\n", grouped_cells),
    FEW_AND_SHORT_SECTION,
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
    Sentence(PERFORMANCE, r"in (\d+) of them a peer may be faster", contested_count),
    Sentence(PERFORMANCE, MEANS, lambda: means("forward"), behind="\n## Forward\n"),
    Sentence(PERFORMANCE, MEANS, lambda: means("backward"), behind="\n## Backward\n"),
    Sentence(PERFORMANCE, r"torch ([\d.]+), cuDNN ([\d.]+), CUDA ([\d.]+)\.", software),
    Sentence(PERFORMANCE, r"FlashAttention-3 is ([\d.]+), commit (\w+)\.", commit_of_fa3),
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
    Sentence(PERFORMANCE, rf"`return_max_logit` adds {PAIR} % to the forward", lambda: costs("max_logit", "forward")),
    Sentence(
        PERFORMANCE,
        rf"`deterministic` adds {PAIR} %, under a causal mask {PAIR}, with grouped heads {PAIR}, in packed sequences"
        rf" {PAIR}",
        deterministic_costs,
    ),
    Table(PERFORMANCE, "\nMasks that hide pairs", option_cells("h200_options.json")),
    Sentence(
        PERFORMANCE,
        rf"head_dim 64 / 128 {RATIOS} times the plain time of Hopper's kernels forward and {RATIOS} backward",
        plain_of_all_gpus,
    ),
    Sentence(
        PERFORMANCE,
        r"made beforehand, as an engine makes it, ([\d.]+) to ([\d.]+) times",
        lambda: times_as_fast("h200_decode.json", "fa3 metadata"),
    ),
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
    Table(PERFORMANCE, "h200_models.json", model_cells),
    Sentence(PERFORMANCE, r"at ([\d.]+) to ([\d.]+) times the speed of torch's own choice", models_beside_torch),
    *figures_of_several_gpus(),
    ORIGINS_SECTION,
)
