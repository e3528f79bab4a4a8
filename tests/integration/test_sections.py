"""Heads travel in sections beside the attention of others: results are those of one section, and the order is one in
which something can overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext.integrations.distributed import context_parallel_attention, gather, passes, sections, ulysses
from flash_ext.integrations.distributed.sections import LEAST_ROWS, MOST_SECTIONS, sections_of
from tests.integration.rank_pool import Task, assert_within_bounds, join, on_rank
from tests.oracle import Call, Result, cumulative, make_call

METHODS = ("gather", "ulysses")


@contextmanager
def sections_of_any_size() -> Iterator[list[int]]:
    """Small problems too are computed in sections; how many, of each call."""
    counts: list[int] = []

    def counted(*args: Any) -> Any:
        found = sections_of(*args)
        counts.append(len(found))
        return found

    before = sections.LEAST_ROWS
    sections.LEAST_ROWS = 1
    gather.sections_of = ulysses.sections_of = counted
    try:
        yield counts
    finally:
        sections.LEAST_ROWS = before
        gather.sections_of = ulysses.sections_of = sections_of


def in_sections(task: Task, expected: int, device: str) -> Result:
    """The results of all ranks, with gradients; out and lse have the bits of one section."""
    with sections_of_any_size() as counts:
        found = on_rank(task, device)
    assert set(counts) == {expected}, counts
    one = on_rank(task, device)
    for name in ("out", "lse"):
        if device == "cpu":
            assert torch.equal(found[name], one[name]), name
        else:  # a GPU splits keys by how many work tiles there are
            torch.testing.assert_close(found[name], one[name], rtol=2e-2, atol=2e-2)
    return {name: join(task, name, x).cpu() for name, x in found.items()}


def assert_matches(pools: Any, device: str, call: Call, layout: str, method: str, count: int) -> None:
    call, gradients_of = call.with_random_gradients(), tuple(call.inputs())
    task = Task(call, layout, method, gradients_of)
    assert_within_bounds(call, gradients_of, pools(2, device).run(partial(in_sections, task, count)))


def make(heads_q: int = 16, heads_kv: int = 8, rows: int = 48, **options: Any) -> Call:
    return make_call(2, rows, rows, heads_q=heads_q, heads_kv=heads_kv, head_dim=16, dtype=torch.float32, **options)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "full": lambda: {},
    "causal": lambda: {"causal": True},
    "window": lambda: {"window_size": (5, 9)},
    "bias": lambda: {"causal": True, "bias": torch.randn(2, 16, 48, 48), "sink": torch.randn(16)},
    "bias of all heads": lambda: {"bias": torch.randn(1, 1, 48, 48), "mask": torch.rand(2, 16, 48, 48) < 0.8},
    "bias of keys": lambda: {"bias": torch.randn(1, 16, 1, 48), "mask": torch.rand(2, 1, 1, 48) < 0.8},
    "alibi": lambda: {"causal": True, "alibi_slopes": torch.rand(2, 16)},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_options(pools: Any, kind: str, layout: str, method: str, device: str) -> None:
    assert_matches(pools, device, make(**OPTIONS[kind]()), layout, method, 4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "count"), [(12, 12, {"gather": 4, "ulysses": 3}), (20, 10, 2)], ids=str
)
def test_numbers_of_heads(pools: Any, heads_q: int, heads_kv: int, count: Any, method: str, device: str) -> None:
    count = count[method] if isinstance(count, dict) else {"gather": 2, "ulysses": 1}[method]
    assert_matches(pools, device, make(heads_q, heads_kv, causal=True), "contiguous", method, count)


@pytest.mark.parametrize("method", METHODS)
def test_packed(pools: Any, method: str, device: str) -> None:
    cu_seqlens = cumulative([5, 0, 30, 1, 12])
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=30, max_seqlen_k=30)
    call = make_call(seqlen_q=48, seqlen_k=48, heads_q=16, heads_kv=8, head_dim=16, causal=True, **lengths)
    assert_matches(pools, device, call.with_options(sink=torch.randn(16)), "zigzag", method, 4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("heads", [1, 16])
def test_block_mask(pools: Any, heads: int, method: str, device: str) -> None:
    visible = torch.rand(1, heads, 128, 128) < 0.3
    visible &= (torch.rand(1, heads, 4, 4) < 0.5).repeat_interleave(32, 2).repeat_interleave(32, 3)
    mask = flash_ext.BlockMask.from_dense(visible, (32, 32))
    call = replace(make(rows=128, block_mask=mask), block_visible=visible)
    assert_matches(pools, device, call, "zigzag", method, 4)


# ---- How many -------------------------------------------------------------------------------------------------------


def test_number_of_sections() -> None:
    def count(size: int, rows: int, heads_q: int, heads_kv: int, **options: Any) -> int:
        found = sections_of(size, rows, heads_q, heads_kv, options)
        for side, heads in (("q", heads_q), ("kv", heads_kv)):
            covered = [n for section in found for n in range(heads)[getattr(section, side)]]
            assert covered == list(range(heads))
        return len(found)

    assert count(2, LEAST_ROWS, 16, 16) == MOST_SECTIONS == 4
    assert count(2, LEAST_ROWS, 15, 3) == 3 and count(2, LEAST_ROWS, 20, 5) == 1  # equal ones, of whole groups
    assert count(2, LEAST_ROWS // 8, 16, 16) == 2  # each has enough to compute
    assert count(2, LEAST_ROWS // 16, 16, 16) == 1
    assert count(2, LEAST_ROWS, 16, 16, dropout_p=0.1) == 1 and count(1, LEAST_ROWS, 16, 16) == 1


# ---- In which order -------------------------------------------------------------------------------------------------


class Recorder:
    """Puts down when transfers start and are waited for, by number, and when kernels are launched."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def number(self, transfer: Any) -> int:
        self._alive.append(transfer)  # else another one may get its id
        return self._numbers.setdefault(id(transfer), len(self._numbers))

    def method(self, name: str, function: Any) -> Any:
        def recorded(transfer: Any, *args: Any) -> Any:
            self.events.append(f"{name} {self.number(transfer)}")
            return function(transfer, *args)

        return recorded

    def launch(self, function: Any) -> Any:
        def recorded(*args: Any) -> Any:
            self.events.append("compute")
            return function(*args)

        return recorded


def recorded(method: str, device: str) -> tuple[list[str], list[str]]:
    """The events of a forward, and of a backward."""
    patch, recorder = pytest.MonkeyPatch(), Recorder()
    start: tuple[type, str]
    start, module = (
        ((passes.Transfer, "start"), gather) if method == "gather" else ((ulysses._Exchange, "__init__"), ulysses)
    )
    for (owner, name), word in ((start, "start"), ((start[0], "wait"), "wait")):
        patch.setattr(owner, name, recorder.method(word, getattr(owner, name)))
    for name in ("forward_piece", "backward_piece"):
        patch.setattr(module, name, recorder.launch(getattr(module, name)))
    patch.setattr(sections, "LEAST_ROWS", 1)
    try:
        q, k, v = (torch.randn(1, 8, heads, 16, device=device, requires_grad=True) for heads in (6, 6, 6))
        out = context_parallel_attention(q, k, v, None, method=method)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        forward = list(recorder.events)
        out.sum().backward()
        return forward, recorder.events[len(forward) :]
    finally:
        patch.undo()


def recorded_on_ranks(method: str, device: str) -> dict[str, Any]:
    forward, backward = recorded(method, device)
    return {"forward": forward, "backward": backward}


def test_keys_travel_beside_kernels(pools: Any, device: str) -> None:
    """Of three sections: the next one leaves before this one is computed, and is waited for after that."""
    events = pools(2, device).run(partial(recorded_on_ranks, "gather"))
    assert events["forward"] == [
        *("start 0", "wait 0", "start 1", "compute"),
        *("wait 1", "start 2", "compute"),
        *("wait 2", "compute"),
    ]
    # 3, 4 and 6 are keys again; 5, 7 and 8 are gradients, which return while the next section is computed.
    assert events["backward"] == [
        *("start 3", "wait 3", "start 4", "compute", "start 5"),
        *("wait 4", "start 6", "compute", "start 7", "wait 5"),
        *("wait 6", "compute", "start 8", "wait 7"),
        "wait 8",
    ]


def test_heads_travel_beside_kernels(pools: Any, device: str) -> None:
    """Rows of the next section come, and results of the last one return, while this one is computed."""
    events = pools(2, device).run(partial(recorded_on_ranks, "ulysses"))
    steps = [
        *("start 0", "wait 0", "start 1", "compute", "start 2"),
        *("wait 1", "start 3", "compute", "start 4"),
        *("wait 3", "compute", "start 5"),
        *("wait 2", "wait 4", "wait 5"),
    ]
    assert events["forward"] == steps
    numbers = {str(n): str(n + 6) for n in range(6)}
    assert events["backward"] == [" ".join(numbers.get(word, word) for word in step.split()) for step in steps]
