"""Figures of the pages of docs/kernels and docs/tuning."""

from __future__ import annotations

from benchmarks.pages.cpu import cpu_cells
from benchmarks.pages.decode import decode_cells
from benchmarks.pages.figures import NUMBER, PAIR, Sentence, Table
from benchmarks.pages.host import host_cells
from benchmarks.pages.options import bias_gradient_cells, costs, mask_bounds, mask_cells, option_times
from benchmarks.pages.places import KERNELS, TUNING
from benchmarks.pages.training import (
    backward_means,
    float32_cells,
    forward_over_the_better_peer,
    grouped_backward,
    lost_backwards_to_fa3,
    mean_cells,
    short_cells,
    speed_cells,
    training_cells,
)

FORWARD_PAGE, BACKWARD_PAGE = f"{TUNING}/forward_sm90.md", f"{TUNING}/backward_sm90.md"
BACKWARD_KERNEL = f"{KERNELS}/backward_sm90.md"
DETERMINISTIC = rf"`deterministic` costs {PAIR} % at head_dim 64 / 128"
FIGURES: tuple[Table | Sentence, ...] = (
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
        r"FlashAttention-3 is faster in (\d+) of (\d+), by at most (\d+) % ",
        lost_backwards_to_fa3,
    ),
    *(
        Sentence(page, DETERMINISTIC, lambda: costs("deterministic", "backward"))
        for page in (BACKWARD_KERNEL, f"{TUNING}/backward_options_sm90.md")
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
    Table(f"{TUNING}/host.md", "h200_host.json", host_cells),
    Table(f"{KERNELS}/block_sparse.md", "h200_masks.json", mask_cells),
    Table(f"{KERNELS}/cpu.md", "cpu_xeon.json", cpu_cells),
)
