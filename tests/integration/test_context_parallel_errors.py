"""What a call over ranks refuses, all of them refuse, before anything travels; after an error the group still works."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_ext
from flash_ext import ops
from flash_ext.integrations.distributed import context_parallel_attention, gather, join_sequence, ring, ulysses
from tests.integration.rank_pool import LAYOUTS, METHODS

ROWS = 48  # of the whole sequence


def make(heads_q: int = 16, heads_kv: int = 8, heads_v: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    heads = heads_q, heads_kv, heads_kv if heads_v is None else heads_v
    q, k, v = (torch.ones(1, ROWS, count, 16) for count in heads)
    return q, k, v


def told(attend: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        attend(*args, **options)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def all_told(text: str) -> list[str]:
    """What each rank was told. This would hang, or mix up what it collects, if anything were left in the group."""
    dist.barrier()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


# ---- Refused before anything travels --------------------------------------------------------------------------------

WRONG: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "heads of q": lambda: (make(12, 8), {}),
    "heads of v": lambda: (make(16, 8, 16), {}),
    "sink": lambda: (make(), {"sink": torch.zeros(32)}),
    "sink of one head": lambda: (make(4, 4), {"sink": torch.zeros(1)}),
    "alibi_slopes": lambda: (make(), {"alibi_slopes": torch.ones(32), "causal": True}),
    "bias": lambda: (make(), {"bias": torch.zeros(1, 32, 1, ROWS)}),
    "keys of a bias": lambda: (make(), {"bias": torch.zeros(1, 1, 1, ROWS + 8)}),
    "mask": lambda: (make(), {"mask": torch.ones(1, 4, 1, ROWS, dtype=torch.bool)}),
    "softcap": lambda: (make(), {"softcap": -1.0}),
    "dropout_p": lambda: (make(), {"dropout_p": -0.5}),
    "rng_state": lambda: (make(), {"rng_state": torch.zeros(2, dtype=torch.int64)}),
}


def refused(kind: str, method: str, device: str) -> dict[str, Any]:
    """What each rank is told, and what ``attention`` says of the whole."""
    tensors, options = WRONG[kind]()
    tensors = tuple(x.to(device) for x in tensors)
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    own = [x.chunk(dist.get_world_size(), 1)[dist.get_rank()] for x in tensors]
    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "batch_isend_irecv", travels)
    patch.setattr(dist, "all_to_all_single", travels)
    try:
        text = told(context_parallel_attention, *own, None, method=method, **options)
    finally:
        patch.undo()
    return {"told": all_told(text), "whole": told(flash_ext.attention, *tensors, **options)}


def travels(*args: Any, **how: Any) -> Any:
    raise AssertionError("something travels")


CASES = [case for case in itertools.product(WRONG, METHODS) if case != ("alibi_slopes", "ring")]  # which has none


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_refused_as_by_attention(pools: Any, kind: str, method: str, device: str) -> None:
    answer = pools(2, device).run(partial(refused, kind, method))
    first, second = answer["told"]
    assert first == second != ""
    if kind in ("bias", "keys of a bias", "mask"):  # of a rank's queries
        start = "RuntimeError: flash_ext: {} must have shape (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1)"
        assert first.startswith(start.format(kind.split()[-1])), first
    else:
        assert first == answer["whole"]


@pytest.mark.parametrize("method", METHODS)
def test_sizes_of_this_rank(pools: Any, method: str, device: str) -> None:
    said = pools(2, device).run(partial(sizes, method))
    bias = f"bias must have the 24 queries of this rank in dimension 2, or 1, got shape (1, 1, {ROWS}, {ROWS})"
    length = f"max_seqlen_q belongs to cu_seqlens_q: without it expected {ROWS} or none"
    assert said["bias"] == [f"ValueError: {bias}"] * 2 and said["max_seqlen_q"] == [f"ValueError: {length}"] * 2
    assert said["fits"] == ["", ""]


def sizes(method: str, device: str) -> dict[str, Any]:
    own = [x.to(device).chunk(2, 1)[dist.get_rank()] for x in make()]
    attend = partial(context_parallel_attention, *own, None, method=method)
    return {
        "bias": all_told(told(attend, bias=torch.zeros(1, 1, ROWS, ROWS, device=device))),
        "max_seqlen_q": all_told(told(attend, max_seqlen_q=24)),
        "fits": all_told(told(attend, max_seqlen_q=ROWS, max_seqlen_k=ROWS)),
    }


def alibi_of_the_first_queries(method: str, device: str) -> dict[str, Any]:
    """Twice as many queries as keys, aligned with the first: only the later half is behind the last key."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.randn(1, rows, 4, 16, device=device) for rows in (2 * ROWS, ROWS, ROWS)]
    own = [x.chunk(size, 1)[rank] for x in whole]
    options = dict(causal=True, top_left=True, alibi_slopes=torch.rand(4, device=device))
    texts = all_told(told(context_parallel_attention, *own, None, method=method, **options))
    if texts == [""] * size:
        out = context_parallel_attention(*own, None, method=method, **options)  # type: ignore[arg-type]
        expected = flash_ext.attention(*whole, **options)  # type: ignore[arg-type]
        assert isinstance(out, Tensor) and isinstance(expected, Tensor)
        torch.testing.assert_close(join_sequence(out, None), expected, rtol=1e-4, atol=1e-4)
    return {"told": texts}


def test_alibi_is_refused_on_all_ranks(pools: Any, device: str) -> None:
    pool = pools(4, device)
    texts = pool.run(partial(alibi_of_the_first_queries, "gather"))["told"]
    text = "NotImplementedError: flash_ext: alibi_slopes of queries behind the last key is not supported with method"
    assert texts == [f"{text} 'gather', but with 'ulysses'"] * 4
    assert pool.run(partial(alibi_of_the_first_queries, "auto"))["told"] == [""] * 4


# ---- After an error -------------------------------------------------------------------------------------------------


# What computes: a piece, or with Ulysses attention itself, whose backward is that of the operator.
FORWARD = {"ring": (ring, "forward_piece"), "gather": (gather, "forward_piece"), "ulysses": (ulysses, "attention")}
BACKWARD = {"ring": (ring, "backward_piece"), "gather": (gather, "backward_piece"), "ulysses": (ops, "call")}


class FirstFails:
    """In place of what computes: all memory is taken, once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._failed = function, False

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self._failed:
            self._failed = True
            raise RuntimeError("out of memory")
        return self._function(*args, **options)


def after_an_error(method: str, backward: bool, device: str) -> dict[str, Any]:
    """A call fails in its first piece, on all ranks, and the next one is right."""
    module, name = (BACKWARD if backward else FORWARD)[method]
    torch.manual_seed(0)
    whole = list(torch.randn(3, 1, ROWS, 8, 16, device=device))
    own = [x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_() for x in whole]

    def results(tensors: list[Tensor], attend: Callable[..., Any]) -> list[Tensor]:
        out = attend(*tensors)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]

    attend = partial(context_parallel_attention, group=None, method=method)  # type: ignore[arg-type]
    patch = pytest.MonkeyPatch()
    patch.setattr(module, name, FirstFails(getattr(module, name)))
    try:
        texts = all_told(told(results, own, attend))
        found = results(own, attend)
    finally:
        patch.undo()
    expected = results([x.requires_grad_() for x in whole], flash_ext.attention)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(join_sequence(one, None), other, rtol=1e-4, atol=1e-4)
    return {"told": texts}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backward", [False, True])
def test_group_works_after_an_error(pools: Any, backward: bool, method: str, device: str) -> None:
    answer = pools(2, device).run(partial(after_an_error, method, backward))
    assert answer["told"] == ["RuntimeError: out of memory"] * 2


# ---- Copies ---------------------------------------------------------------------------------------------------------


def copies(layout: str, device: str) -> list[tuple[int, int]]:
    """Of each transfer of a forward: what is sent, and how many places of memory that is."""
    patch, counts = pytest.MonkeyPatch(), []
    batched = dist.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        sent = [operation.tensor.data_ptr() for operation in operations if operation.op is dist.isend]
        counts.append((len(sent), len(set(sent))))
        return batched(operations)

    patch.setattr(dist, "batch_isend_irecv", counted)
    try:
        own = torch.ones(3, 2, 4, 8, 16, device=device).transpose(2, 3)
        context_parallel_attention(*own, None, method="gather", layout=layout)  # type: ignore[call-overload]
    finally:
        patch.undo()
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_several_ranks_get_is_copied_once(pools: Any, layout: str, device: str) -> None:
    """Rows do not lie together, and two other ranks get the same keys and values."""
    assert pools(3, device).run(partial(copies, layout)) == [(4, 2)]
