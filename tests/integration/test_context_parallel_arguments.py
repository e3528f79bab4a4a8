"""Arguments of ``context_parallel_attention`` and of the functions for shards: what is refused, by which name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_ext
from flash_ext.integrations.distributed import context_parallel_attention, join_sequence, split_sequence
from tests.integration.rank_pool import refusal
from tests.oracle import make_call


def test_refusals(pools: Any, device: str) -> None:
    pool = pools(2, device)
    call = make_call(1, 48, 48, heads_q=3, heads_kv=3, head_dim=16, dtype=torch.float32)
    assert "method must be one of auto, ring, gather, ulysses, got 'rink'" in refusal(pool, call, method="rink")
    assert "q must have a number of heads that 2 ranks divide" in refusal(pool, call, method="ulysses")
    alibi = call.with_options(alibi_slopes=torch.rand(3))
    assert "alibi_slopes is not supported with method 'ring', but with 'gather'" in refusal(pool, alibi)
    assert "alibi_slopes without a causal mask" in refusal(pool, alibi, method="gather")
    odd = make_call(1, 50, 50, heads_q=2, heads_kv=2, head_dim=16, dtype=torch.float32)
    assert "x must have a multiple of 4 rows" in refusal(pool, odd, layout="zigzag")
    used = call.with_options(seqused_k=torch.tensor([3], dtype=torch.int32))
    assert "seqused_k is not supported with method 'ring', but with 'ulysses'" in refusal(pool, used)
    mask = flash_ext.BlockMask.causal(48, 48, (32, 32))
    for method in ("gather", "auto"):  # Ulysses does not have three heads
        text = refusal(pool, call.with_options(block_mask=mask), method=method)
        assert "must have rows of blocks that divide the 24 queries of a chunk, got 32: method 'ulysses'" in text


WRONG: dict[str, list[Any]] = {
    "causal": ["no", None],
    "top_left": ["no"],
    "return_lse": ["no"],
    "deterministic": ["no"],
    "window_size": [(-5, 0), (0, -5), 3],
    "softcap": ["x", torch.tensor(1.0)],
    "softmax_scale": ["x"],
    "dropout_p": ["x", True],
    "bias": [3],
    "mask": [[True]],
    "sink": [3],
    "block_mask": [3],
    "cu_seqlens_q": [[0, 8]],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    """A group of this process alone will do: they are checked before anything is sent."""
    q = torch.ones(1, 8, 2, 16)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for wrong in WRONG[name]:
            with pytest.raises((TypeError, ValueError), match=rf"^{name}\b.* must be "):
                context_parallel_attention(q, q, q, None, **{name: wrong})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("function", [split_sequence, join_sequence])
def test_wrong_arguments_of_shards(function: Any) -> None:
    x = torch.ones(2, 4)
    for given, text in (
        (("x", None), "^x must be a Tensor, got str"),
        ((x.to_sparse(), None), "^x must be a dense Tensor"),
    ):
        with pytest.raises(TypeError, match=text):
            function(*given)
    for dim in (2, -3):
        with pytest.raises(ValueError, match=rf"^dim must be a dimension of x, \(2, 4\), got {dim}"):
            function(x, None, dim=dim)
    with pytest.raises(TypeError, match=r"^dim must be an integer, got str"):
        function(x, None, dim="1")
    with pytest.raises(ValueError, match=r"^layout must be one of contiguous, zigzag, got 'z'"):
        function(x, None, layout="z")


def test_docstrings_name_their_arguments() -> None:
    for function in (context_parallel_attention, split_sequence, join_sequence):
        text = function.__doc__ or ""
        assert "Returns:" in text and "Raises:" in text and "layout" in text
