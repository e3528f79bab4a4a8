"""ring-flash-attn and yunchang, which call the passes of FlashAttention, on this library's: a sequence over ranks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_ext
from tests.oracle import cumulative
from tests.processes import needs_gpus, run_processes

Attend = Callable[..., Tensor]
Cut = Callable[[Tensor], Tensor]
BATCH, SEQLEN, HEADS, HEADS_KV, HEAD_DIM = 2, 64, 4, 2, 32
LENGTHS = (24, 8, 32)  # of packed sequences, which these libraries cut into halves of each rank's part


def needs_package(name: str) -> None:
    """Skips where it is not installed. It is not imported here: it wants flash_attn, which only the ranks have."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")


# ---- The libraries --------------------------------------------------------------------------------------------------


def ring_flash_attn() -> ModuleType:
    """Without its adapter for transformers 4, which asks transformers 5 for names that it no longer has."""
    sys.modules.setdefault("ring_flash_attn.adapters", ModuleType("ring_flash_attn.adapters"))
    adapters = sys.modules["ring_flash_attn.adapters"]
    vars(adapters).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    import ring_flash_attn as library

    return library


def contiguous_part(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def zigzag_part(x: Tensor) -> Tensor:
    world, rank = dist.get_world_size(), dist.get_rank()
    chunks = x.chunk(2 * world, dim=1)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], dim=1)


def striped_part(x: Tensor) -> Tensor:
    return x[:, dist.get_rank() :: dist.get_world_size()]


def of_each_sequence(part: Cut) -> Cut:
    """The same part of each packed sequence, (total, ...)."""
    return lambda x: torch.cat([part(sequence[None])[0] for sequence in x.split(LENGTHS)])


# ---- Against one process --------------------------------------------------------------------------------------------


def tensors(device: str, *lead: int) -> list[Tensor]:
    """q, k, v and the gradient of out, in the dtype that these libraries return gradients in."""
    heads = (HEADS, HEADS_KV, HEADS_KV, HEADS)
    return [torch.randn(*lead, number, HEAD_DIM).to(device, torch.bfloat16) for number in heads]


def check_part(attend: Attend, cut: Cut, device: str, *lead: int, **options: Any) -> None:
    """What a rank computes of its part, and the gradients there, are those of all tokens in one process."""
    q, k, v, grad_out = tensors(device, *lead)
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    out = flash_ext.attention(*whole, **options)
    assert isinstance(out, Tensor)
    expected = [out, *torch.autograd.grad(out, whole, grad_out.float())]
    parts = [cut(x).contiguous().requires_grad_() for x in (q, k, v)]
    out = attend(*parts)
    found = [out, *torch.autograd.grad(out, parts, cut(grad_out).contiguous())]
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(
            one.float(), cut(other), rtol=4e-2, atol=4e-2, msg=lambda text, name=name: f"{name}: {text}"
        )


def use_ring_flash_attn(device: str, mesh: Any) -> None:
    with flash_ext.as_flash_attn():
        library = ring_flash_attn()
        dense = (BATCH, SEQLEN)
        for causal in (False, True):
            attend = lambda q, k, v, causal=causal: library.ring_flash_attn_func(q, k, v, causal=causal)  # noqa: E731
            check_part(attend, contiguous_part, device, *dense, causal=causal)
        for function, cut in (
            (library.zigzag_ring_flash_attn_func, zigzag_part),
            (library.stripe_flash_attn_func, striped_part),
        ):
            attend = lambda q, k, v, function=function: function(q, k, v, causal=True)  # noqa: E731
            check_part(attend, cut, device, *dense, causal=True)
        use_packed_sequences(library, device)


def use_packed_sequences(library: ModuleType, device: str) -> None:
    world = dist.get_world_size()
    cu_seqlens = cumulative(list(LENGTHS), device)
    own = cumulative([length // world for length in LENGTHS], device)
    longest = max(LENGTHS)
    whole = dict(
        causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest
    )
    for function, cut in (
        (library.ring_flash_attn_varlen_func, contiguous_part),
        (library.zigzag_ring_flash_attn_varlen_func, zigzag_part),
    ):
        attend = lambda q, k, v, function=function: function(q, k, v, own, longest // world, causal=True)  # noqa: E731
        check_part(attend, of_each_sequence(cut), device, sum(LENGTHS), **whole)

    lengths = library.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, dist.get_rank(), world)

    def gather(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        *of_rank, local_k_slice = lengths
        return library.llama3_flash_attn_varlen_func(
            q, k, v, *of_rank, heads_k_stride=1, local_k_slice=local_k_slice, causal=True
        )

    check_part(gather, lambda x: x.chunk(world)[dist.get_rank()], device, sum(LENGTHS), **whole)


def use_yunchang(device: str, mesh: Any, ulysses: int, ring: int) -> None:
    with flash_ext.as_flash_attn():
        import yunchang

        world, rank = dist.get_world_size(), dist.get_rank()
        yunchang.set_seq_parallel_pg(ulysses, ring, rank, world)
        if ring == 1:
            layer = yunchang.UlyssesAttention(yunchang.globals.PROCESS_GROUP.ULYSSES_PG)
            check_part(lambda q, k, v: layer(q, k, v, causal=True), contiguous_part, device, BATCH, SEQLEN, causal=True)
            if device == "cpu":
                return  # a ring of one rank sends to itself, which gloo does not
        for kind, causal in (("basic", False), ("basic", True), ("zigzag", True), ("strip", True)):

            def cut(x: Tensor, kind: str = kind) -> Tensor:
                part: Tensor = yunchang.EXTRACT_FUNC_DICT[kind](x, rank, world_size=world, rd=ring, ud=ulysses)
                return part

            layer = yunchang.LongContextAttention(ring_impl_type=kind)
            attend = lambda q, k, v, layer=layer, causal=causal: layer(q, k, v, causal=causal)  # noqa: E731
            check_part(attend, cut, device, BATCH, SEQLEN, causal=causal)
        # FlashAttention-3, which yunchang calls without a mask.
        layer = yunchang.LongContextAttention(attn_type=yunchang.kernels.AttnType.FA3)
        check_part(layer, contiguous_part, device, BATCH, SEQLEN)


def test_ring_flash_attn(device: str) -> None:
    needs_package("ring_flash_attn")
    needs_gpus(device)
    run_processes(device, use_ring_flash_attn)


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (2, 2)])
def test_yunchang(device: str, ulysses: int, ring: int) -> None:
    needs_package("yunchang")
    needs_gpus(device, ulysses * ring)
    run_processes(device, use_yunchang, ulysses, ring, world=ulysses * ring)
