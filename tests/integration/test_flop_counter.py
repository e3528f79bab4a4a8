"""FLOPs of the operators, as ``FlopCounterMode`` counts them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

import flash_ext
from tests.oracle import cumulative, random


def flops(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_dense_is_counted_as_torch_counts_it(device: str) -> None:
    shapes = [(2, 8, 32, 16), (2, 8, 48, 16), (2, 8, 48, 24)]
    q, k, v = (random(*shape, device=device).requires_grad_() for shape in shapes)
    grad_shape = (2, 8, 32, 24)
    forward = sdpa_flop(*shapes)
    backward = sdpa_backward_flop(grad_shape, *shapes)
    assert flops(lambda: flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True)) == forward
    assert flops(lambda: flash_ext.scaled_dot_product_attention(q, k, v).sum().backward()) == forward + backward
    with flash_ext.activated():
        both = flops(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum().backward())
    assert both == forward + backward


def test_packed_sequences_count_their_own_pairs(device: str) -> None:
    lengths_q, lengths_k = [5, 0, 27], [7, 3, 30]
    q, k = (random(sum(n), 4, 16, device=device).requires_grad_() for n in (lengths_q, lengths_k))
    options = {"cu_seqlens_q": cumulative(lengths_q, device), "cu_seqlens_k": cumulative(lengths_k, device)}
    product = 2 * 4 * 16 * sum(m * n for m, n in zip(lengths_q, lengths_k, strict=True))
    assert flops(lambda: flash_ext.attention(q, k, k, **options)) == 2 * product
    assert flops(lambda: flash_ext.attention(q, k, k, **options).sum().backward()) == 7 * product


def test_max_logit_counts_nothing(device: str) -> None:
    q = random(2, 9, 4, 16, device=device)
    plain = flops(lambda: flash_ext.attention(q, q, q))
    assert plain > 0 and flops(lambda: flash_ext.attention(q, q, q, return_max_logit=True)) == plain


def test_weights(device: str) -> None:
    q, k = (random(2, n, 4, 16, device=device).requires_grad_() for n in (9, 13))
    _, lse = flash_ext.attention(q, k, k, return_lse=True)
    product = 2 * 2 * 4 * 9 * 13 * 16
    assert flops(lambda: flash_ext.attention_weights(q, k, lse.detach())) == product
    assert flops(lambda: flash_ext.attention_weights(q, k, lse.detach()).sum().backward()) == 4 * product


def test_decoding_counts_the_whole_cache(device: str) -> None:
    dtype = torch.float32
    q, new = random(2, 1, 8, 16, dtype=dtype, device=device), random(2, 1, 2, 16, dtype=dtype, device=device)
    cache = [random(2, 64, 2, 16, dtype=dtype, device=device) for _ in range(2)]
    pages = [random(6, 16, 2, 16, dtype=dtype, device=device) for _ in range(2)]
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    lengths = torch.tensor([3, 40], dtype=torch.int32, device=device)
    assert flops(lambda: flash_ext.decode(q, *cache)) == 2 * 2 * 8 * 64 * 32
    assert flops(lambda: flash_ext.decode(q, *cache, k=new, v=new, cache_seqlens=lengths)) == 2 * 2 * 8 * 64 * 32
    assert flops(lambda: flash_ext.decode(q, *pages, block_table=table, cache_seqlens=lengths)) == 2 * 2 * 8 * 48 * 32


def test_importing_does_not_import_torchs_counter() -> None:
    program = (
        "import sys, torch, flash_ext\n"
        "assert 'torch.utils.flop_counter' not in sys.modules\n"
        "from torch.utils.flop_counter import FlopCounterMode, flop_registry\n"
        "assert torch.ops.flash_ext.attention_forward in flop_registry\n"
        "assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith('flash_ext')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    after = (
        "import torch.utils.flop_counter, flash_ext\n"
        "assert torch.ops.flash_ext.attention_forward in torch.utils.flop_counter.flop_registry\n"
    )
    subprocess.run([sys.executable, "-c", after], check=True, timeout=300)
