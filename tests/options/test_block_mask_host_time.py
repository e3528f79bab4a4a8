"""Builders of ``BlockMask`` on a GPU take the host's time for operators, and do not wait. Here they run on the device
"meta", where lists have the room that they have on a GPU, and nobody knows a value."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash_ext import BlockMask
from flash_ext.masks import combination
from tests.oracle import int32

N = 2048
META = "meta"


class Operators(TorchDispatchMode):
    """Counts what is dispatched, and refuses what makes the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        kwargs = kwargs or {}
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        assert not waits(operator, given), f"{operator} makes the host wait"
        assert all(t.device.type == META or t.dim() == 0 for t in given), f"{operator} copies from the host"
        return operator(*args, **kwargs)


def waits(operator: Any, given: list[Tensor]) -> bool:
    if torch.Tag.data_dependent_output in operator.tags:
        return True
    if operator.overloadpacket is torch.ops.aten.index or operator.overloadpacket is torch.ops.aten.index_put_:
        return any(index.dtype == torch.bool for index in given[1:])
    return torch.Tag.dynamic_output_shape in operator.tags


def dispatched(build: Callable[[], object]) -> int:
    with Operators() as operators:
        build()
    return operators.count


def meta(*values: Any) -> Tensor:
    return int32(values, META)


def visited() -> Tensor:
    return torch.empty(1, 2, 16, 16, dtype=torch.bool, device=META)


def causal() -> BlockMask:
    return BlockMask.causal(N, N, device=META)


def whole() -> BlockMask:
    return BlockMask.from_blocks(visited(), N, N)


MOST: dict[str, tuple[int, Callable[[], Callable[[], object]]]] = {
    "causal": (2, lambda: causal),
    "window": (2, lambda: lambda: BlockMask.sliding_window(N, N, (300, 0), device=META)),
    "window on both sides": (2, lambda: lambda: BlockMask.sliding_window(N, N, (300, 300), device=META)),
    "window and sinks": (2, lambda: lambda: BlockMask.sliding_window(N, N, (300, 0), 4, device=META)),
    "window and global tokens": (2, lambda: lambda: BlockMask.sliding_window(N, N, (300, 300), 4, device=META)),
    "documents": (1, lambda: lambda: BlockMask.documents(meta(0, 500, 900, N), N)),
    "causal documents": (1, lambda: lambda: BlockMask.documents(meta(0, 500, 900, N), N, causal=True)),
    "prefix_lm": (1, lambda: lambda: BlockMask.prefix_lm(meta(3, 700), N, N)),
    "bidirectional_spans": (2, lambda: lambda: BlockMask.bidirectional_spans(meta([10, 300], [400, 1000]), N)),
    "from_blocks": (16, lambda: whole),
    "dilated": (27, lambda: lambda: BlockMask.dilated(N, N, 2, 3, device=META)),
    "strided": (27, lambda: lambda: BlockMask.strided(N, N, 2, 3, device=META)),
    "causal strided": (50, lambda: lambda: BlockMask.strided(N, N, 2, 3, causal=True, device=META)),
    "random": (22, lambda: lambda: BlockMask.random(N, N, 4, device=META)),
    "top_k": (60, lambda: lambda: top_k(torch.empty(1, N, 4, 64, device=META))),
    "transpose of full blocks": (1, lambda: whole().transpose),
    "transpose": (1, lambda: causal().transpose),
    "&": (49, lambda: (lambda masks: lambda: masks[0] & masks[1])((causal(), whole()))),
    "|": (49, lambda: (lambda masks: lambda: masks[0] | masks[1])((causal(), whole()))),
    "& of bitmaps": (80, lambda: (lambda masks: lambda: masks[0] & masks[1])((window(), documents()))),
    "| of bitmaps": (80, lambda: (lambda masks: lambda: masks[0] | masks[1])((window(), documents()))),
}


def window() -> BlockMask:
    return BlockMask.sliding_window(N, N, (300, 0), device=META)


def documents() -> BlockMask:
    return BlockMask.documents(meta(0, 500, 900, N), N)


def top_k(q: Tensor) -> BlockMask:
    return BlockMask.top_k(q, q[:, :, :2], 4)


@pytest.mark.parametrize("name", MOST)
def test_builders_do_not_wait_and_dispatch_few_operators(name: str) -> None:
    most, prepare = MOST[name]
    build = prepare()
    assert dispatched(build) <= most


@pytest.mark.parametrize("lengths", [(N + 3, N + 77), (1, 1), (300, N), (N, 300)], ids=str)
def test_uneven_lengths_neither(lengths: tuple[int, int]) -> None:
    for window, num_global in itertools.product([(-1, -1), (-1, 0), (100, -1), (300, 0), (300, 300)], [0, 4, 200]):
        build = lambda w=window, g=num_global: BlockMask.sliding_window(*lengths, w, g, device=META)  # noqa: E731
        assert dispatched(build) <= 2
    assert dispatched(lambda: BlockMask.documents(meta(0, 100), lengths[0], causal=True)) <= 1


def test_too_many_blocks_with_two_bitmaps_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than that there is room for a bitmap of each."""
    monkeypatch.setattr(combination, "MOST_BITMAP_BYTES", 2**16)
    with pytest.raises(AssertionError, match="makes the host wait"):
        dispatched(lambda: window() & documents())


def test_what_waits_is_found() -> None:
    """That the mode above refuses what it has to."""
    values, chosen = torch.ones(3), torch.ones(3, dtype=torch.bool)
    for wait in (torch.ones(()).item, values.nonzero, values.unique, lambda: values[chosen]):
        with pytest.raises(AssertionError, match="makes the host wait"), Operators():
            wait()
    with pytest.raises(AssertionError, match="copies from the host"), Operators():
        torch.tensor([1, 2]).to(META)
