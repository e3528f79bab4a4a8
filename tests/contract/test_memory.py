"""Memory beyond inputs and outputs grows with the sequence, never with its square."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_ext

MEGABYTE = 2**20

PROGRAM = """
import resource, sys, torch, flash_ext
seqlen, options = int(sys.argv[1]), eval(sys.argv[2])
torch.set_num_threads(2)
def run(n):
    q, k, v = (torch.randn(1, n, 1, 16, requires_grad=True) for _ in range(3))
    out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
    torch.autograd.grad([out, lse], [q, k, v], [torch.ones_like(out), torch.ones_like(lse)])
run(256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(seqlen)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def peak_growth(seqlen: int, options: str) -> int:
    """Bytes by which forward and backward at this length raise the peak of a fresh process."""
    command = [sys.executable, "-c", PROGRAM, str(seqlen), options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("options", ["{'causal': True}", "{'dropout_p': 0.1, 'window_size': (2000, 2000)}"])
def test_forward_and_backward_at_16384(options: str) -> None:
    """The matrix of scores alone would be a gigabyte; inputs, outputs and gradients are eight."""
    assert peak_growth(16384, options) < 64 * MEGABYTE


OPTIONS_ON_CUDA: dict[str, Callable[[int], dict[str, Any]]] = {
    "causal": lambda n: {"causal": True},
    # The matrix of scores as a bias or as bits would be 2048 or 128 MiB.
    "bias_of_rows": lambda n: {"bias": torch.randn(1, 1, n, 1, device="cuda", dtype=torch.bfloat16)},
    "blocks_of_odd_size": lambda n: {"block_mask": diagonal_blocks(n, 96, 96)},
    "blocks_of_a_query": lambda n: {"block_mask": diagonal_blocks(n, 1, 32)},
}


def diagonal_blocks(seqlen: int, block_m: int, block_n: int) -> flash_ext.BlockMask:
    squares = torch.eye(-(-seqlen // block_n), dtype=torch.bool, device="cuda")
    blocks = squares.repeat_interleave(block_n // block_m, 0)
    return flash_ext.BlockMask.from_blocks(blocks, seqlen, seqlen, (block_m, block_n))


@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize("options", OPTIONS_ON_CUDA)
def test_forward_and_backward_on_cuda(device: str, options: str) -> None:
    if device != "cuda":
        pytest.skip("needs CUDA kernels")
    seqlen = 32768
    given = OPTIONS_ON_CUDA[options](seqlen)
    q, k, v = (torch.randn(1, seqlen, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_ext.attention(q, k, v, **given)
    torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < 96 * MEGABYTE
