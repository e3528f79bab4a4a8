"""``interval_block_lists`` and ``block_lists_transposed``: the very lists that torch's own operators make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext import BlockMask
from flash_ext.masks.documents import lists_of_documents, lists_of_spans
from flash_ext.masks.intervals import Blocks, Window
from flash_ext.masks.lists import Lists, compacted, lists_of_grid, transposed_lists
from flash_ext.masks.windows import lists_of_window
from tests import block_lists_oracle as oracle
from tests.oracle import int32, poisoned_outputs

OPS = torch.ops.flash_ext
INT_MAX = 2**31 - 1

pytestmark = pytest.mark.op("interval_block_lists")


def between(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def random_blocks(square: bool = False) -> Blocks:
    """Of a few keys or many, in blocks that are narrower than they are high, or much wider."""
    longest = (3, 40, 400, 2000)[between(0, 3)]
    seqlen_q = between(0, 20) and between(1, longest)
    seqlen_k = seqlen_q if square else between(0, 20) and between(1, longest)
    return Blocks(seqlen_q, seqlen_k, (1, 8, 32, 128, between(1, 300))[between(0, 4)], 32 * between(1, 8))


def assert_lists(made: Lists, expected: Lists) -> None:
    """Bit for bit, but that bitmaps of a GPU are not sorted, nor told apart."""
    made = compacted(Lists(*(t.cpu() for t in made)))
    for name, got, want in zip(Lists._fields, made, expected, strict=True):
        assert got.shape == want.shape and torch.equal(got, want), name


def maybe(value: int) -> int | None:
    return value if between(0, 2) else None


def test_windows(device: str) -> None:
    for _ in range(150):
        blocks, causal = random_blocks(), bool(between(0, 1))
        reach = (5, 70, 1500)[between(0, 2)]
        right = 0 if causal else maybe(between(0, reach))
        num_global = between(0, 1) * between(0, blocks.seqlen_k)
        window = Window(maybe(between(0, reach)), right, num_global, causal or right == 0)
        offset = between(0, 1) * between(-500, 500)
        made = lists_of_window(window, offset, blocks, device)
        assert_lists(made, oracle.lists_of_window(window, offset, blocks))


def test_rows_that_need_all_the_room_for_bitmaps(device: str) -> None:
    """Edges that lie in as many columns as they can, apart from each other."""
    blocks = Blocks(1000, 1000, 100, 64)
    for start in range(0, 64, 5):
        window = Window(300, 0, 5, True)
        made = lists_of_window(window, start, blocks, device)
        assert_lists(made, oracle.lists_of_window(window, start, blocks))
        bounds = int32([7, 304 + start // 8, 330 + start, 397, 990])
        for causal in (False, True):
            expected = oracle.lists_of_documents(bounds, blocks, causal)
            assert_lists(documents(bounds.to(device), blocks, causal), expected)
        spans = int32([[[3, 90], [330 + start, 370 + start], [380 + start, 990]]])
        made = BlockMask.bidirectional_spans(spans.to(device), 1000, (100, 64))
        assert_lists(Lists(*made.tensors), oracle.lists_of_bidirectional_spans(spans, blocks))
        prefix = int32([300 + start])
        made = BlockMask.prefix_lm(prefix.to(device), 1000, 1000, (100, 64))
        assert_lists(Lists(*made.tensors), oracle.lists_of_prefix(prefix, blocks))


def documents(bounds: Tensor, blocks: Blocks, causal: bool) -> Lists:
    """Also of bounds that the builder refuses on a CPU."""
    return lists_of_documents(bounds, blocks, causal)


def test_documents(device: str) -> None:
    """Empty ones, ones of a token, tokens before the first one and behind the last one; bounds beyond the sequence."""
    for n in range(100):
        blocks, causal = random_blocks(square=True), bool(between(0, 1))
        count = (between(1, 8), between(1, 300))[between(0, 1)]
        bounds = torch.randint(-5, blocks.seqlen_q + 6, (count,)).sort().values
        if between(0, 3) == 0:
            bounds[-1] = 2**31 - 1 if n % 2 else 2**40
        bounds = bounds if n % 2 == 0 else bounds.int()
        assert_lists(documents(bounds.to(device), blocks, causal), oracle.lists_of_documents(bounds, blocks, causal))


def test_prefixes(device: str) -> None:
    for _ in range(60):
        blocks, batch = random_blocks(), between(1, 3)
        prefix = torch.randint(-10, blocks.seqlen_k + 100, (batch,), dtype=(torch.int64, torch.int16)[between(0, 1)])
        made = BlockMask.prefix_lm(prefix.to(device), *blocks[:2], blocks[2:])
        assert_lists(Lists(*made.tensors), oracle.lists_of_prefix(prefix, blocks))


def test_spans(device: str) -> None:
    """In any order, some of them empty, or written backwards."""
    for _ in range(60):
        blocks, batch = random_blocks(square=True), between(1, 3)
        spans = torch.randint(0, blocks.seqlen_q + 1, (batch, 2 * between(0, 40))).sort().values.unflatten(1, (-1, 2))
        spans = spans[:, torch.randperm(spans.shape[1])]
        spans[:, :2] = spans[:, :2].flip(-1)
        made = lists_of_spans(spans.to(device), blocks)
        assert_lists(made, oracle.lists_of_bidirectional_spans(spans, blocks))


def random_lists(device: str) -> tuple[Lists, int]:
    """Of random blocks, and how many columns they lie in."""
    batch, heads, rows, columns = (between(1, 3), between(1, 3), between(0, 90), between(0, 90))
    bitmaps = torch.randint(-(2**31), 2**31, (between(0, 5), 32 * between(1, 3), between(1, 4)), dtype=torch.int32)
    grid = torch.randint(-2, len(bitmaps), (batch, heads, rows, columns), dtype=torch.int32)
    grid = torch.where(torch.rand(rows, columns) < 0.5, grid, -2)
    lists = lists_of_grid(grid, bitmaps)
    return Lists(*(t.to(device) for t in lists)), columns


@pytest.mark.op("block_lists_transposed")
def test_transposed(device: str) -> None:
    for _ in range(60):
        lists, columns = random_lists(device)
        expected = oracle.transposed(Lists(*(t.cpu() for t in lists)), columns)
        assert_lists(transposed_lists(lists, columns), expected)


@pytest.mark.op("block_lists_transposed")
def test_transposed_heads_that_share_entries(device: str) -> None:
    """Lists are of another head where they have holes; offsets are a view."""
    lists, columns = Lists(*lists_of_grid(torch.randint(-2, 0, (1, 1, 40, 50), dtype=torch.int32), no_bits())), 50
    shared = lists._replace(offsets=lists.offsets.expand(2, 3, -1))
    expected = oracle.transposed(shared, columns)
    assert_lists(transposed_lists(Lists(*(t.to(device) for t in shared)), columns), expected)
    backwards = shared._replace(offsets=shared.offsets.transpose(0, 1))
    assert_lists(transposed_lists(Lists(*(t.to(device) for t in backwards)), columns), oracle.transposed(backwards, 50))


def no_bits() -> Tensor:
    return torch.empty(0, 32, 1, dtype=torch.int32)


def intervals_of(bounds: Tensor, rule: str = "documents", **changes: Any) -> tuple[Tensor, ...]:
    arguments: dict[str, Any] = dict(seqlen_q=300, seqlen_k=300, block_m=64, block_n=64, offset=0, window_left=-1)
    arguments |= dict(window_right=-1, num_global=0, causal=False, max_blocks=25, max_bitmaps=6)
    return OPS.interval_block_lists(bounds, rule, **{**arguments, **changes})


def test_every_element_is_written(device: str) -> None:
    """What is behind the last block too, whatever was in memory."""
    bounds = int32([0, 100, 170], device)
    first = intervals_of(bounds, max_blocks=40)
    with poisoned_outputs():
        assert all(map(torch.equal, first, intervals_of(bounds, max_blocks=40)))
    offsets, indices, ids, bitmaps = first
    count = int(offsets.max())
    assert count < 40 and not indices[count:].any() and not ids[count:].any()
    used = torch.zeros(len(bitmaps), dtype=torch.bool, device=device)
    used[ids[:count][ids[:count] >= 0].long()] = True
    assert not bitmaps[~used].any()


def test_vmap(device: str) -> None:
    """One call for each sample."""
    bounds = int32([[0, 100, 170], [5, 5, 300]], device)

    def turned(bounds: Tensor) -> tuple[Tensor, ...]:
        return OPS.block_lists_transposed(*intervals_of(bounds), 5, 30)

    expected = [torch.stack(parts) for parts in zip(*map(turned, bounds), strict=True)]
    assert all(map(torch.equal, torch.vmap(turned)(bounds), expected))


@pytest.mark.op("block_lists_transposed")
def test_every_element_of_the_transpose_is_written(device: str) -> None:
    lists, columns = random_lists(device)
    room = len(lists.indices) + 50
    first = OPS.block_lists_transposed(*lists, columns, room)
    with poisoned_outputs():
        assert all(map(torch.equal, first, OPS.block_lists_transposed(*lists, columns, room)))
    assert not first[1][int(first[0].max()) :].any() and not first[2][int(first[0].max()) :].any()


def test_bounds_that_do_not_ascend_stay_in_the_room(device: str) -> None:
    """They make a wrong mask, of blocks and bitmaps that there are."""
    for _ in range(20):
        bounds = torch.randint(-(2**40), 2**40, (between(1, 200),), device=device)
        bounds[::2] %= 400
        offsets, indices, ids, bitmaps = intervals_of(bounds, max_blocks=between(0, 25), max_bitmaps=between(1, 3))
        flat = offsets.flatten()
        assert bool((flat.diff() >= 0).all()) and int(flat[-1]) <= len(indices)
        assert bool((indices >= 0).all()) and bool((indices < 5).all())
        assert bool((ids >= -1).all()) and bool((ids < len(bitmaps)).all())


@pytest.mark.op("block_lists_transposed")
def test_lists_that_are_wrong_stay_in_the_room(device: str) -> None:
    offsets = torch.randint(-100, 100, (2, 2, 41), dtype=torch.int32, device=device)
    indices = torch.randint(-100, 100, (70,), dtype=torch.int32, device=device)
    ids = torch.randint(-(2**31), INT_MAX, (70,), dtype=torch.int32, device=device)
    made = OPS.block_lists_transposed(offsets, indices, ids, no_bits().to(device), 50, 30)
    assert int(made[0].max()) <= 30 and int(made[0].min()) >= 0
    assert bool((made[1] >= 0).all()) and bool((made[1] < 40).all())


@pytest.mark.parametrize(
    ("name", "rule", "bounds", "changes"),
    [
        ("rule", "rows", [0, 3], {}),
        ("bounds", "window", [0, 3], {}),
        ("bounds", "documents", [], {}),
        ("bounds", "documents", [[0, 3]], {}),
        ("bounds", "prefix", [[0, 3]], {}),
        ("bounds", "spans", [[0, 3]], {}),
        ("bounds", "spans", [[[0, 3, 5]]], {}),
        ("seqlen_q", "documents", [0, 3], {"seqlen_q": -1}),
        ("seqlen_k", "documents", [0, 3], {"seqlen_k": 2**31}),
        ("block_m", "documents", [0, 3], {"block_m": 0}),
        ("block_n", "documents", [0, 3], {"block_n": 48}),
        ("block_n", "documents", [0, 3], {"seqlen_k": INT_MAX}),
        ("offset", "documents", [0, 3], {"offset": -(2**31)}),
        ("window_left", "documents", [0, 3], {"window_left": -2}),
        ("window_right", "documents", [0, 3], {"window_right": 2**31}),
        ("num_global", "documents", [0, 3], {"num_global": -1}),
        ("max_blocks", "documents", [0, 3], {"max_blocks": -1}),
        ("max_bitmaps", "documents", [0, 3], {"max_bitmaps": 0}),
        ("rows of blocks", "prefix", [0, 3], {"seqlen_q": INT_MAX, "block_m": 1}),
        ("bitmaps", "documents", [0, 3], {"max_bitmaps": INT_MAX}),
    ],
)
def test_errors(name: str, rule: str, bounds: list[Any], changes: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match=f"flash_ext: .*{name}"):
        intervals_of(torch.tensor(bounds, dtype=torch.int32), rule, **changes)


def test_errors_of_dtypes() -> None:
    with pytest.raises(RuntimeError, match="bounds must be int32 or int64, got int16"):
        intervals_of(torch.zeros(3, dtype=torch.int16))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("offsets", {"offsets": torch.zeros(1, 1, 0, dtype=torch.int32)}),
        ("offsets", {"offsets": torch.zeros(1, 3, dtype=torch.int32)}),
        ("offsets", {"offsets": torch.zeros(1, 1, 3)}),
        ("indices", {"indices": torch.zeros(4)}),
        ("bitmap_ids", {"bitmap_ids": torch.zeros(3, dtype=torch.int32)}),
        ("bitmaps", {"bitmaps": torch.zeros(3, 16, 1, dtype=torch.int32)}),
        ("bitmaps", {"bitmaps": torch.zeros(3, 32, dtype=torch.int32)}),
        ("columns", {"columns": -1}),
        ("max_blocks", {"max_blocks": -1}),
    ],
)
def test_errors_of_the_transpose(name: str, changes: dict[str, Any]) -> None:
    entries = torch.zeros(4, dtype=torch.int32)
    offsets = torch.zeros(1, 1, 3, dtype=torch.int32)
    arguments = dict(offsets=offsets, indices=entries, bitmap_ids=entries, bitmaps=no_bits(), columns=2, max_blocks=4)
    OPS.block_lists_transposed(**arguments)
    with pytest.raises(RuntimeError, match=f"flash_ext: .*{name}"):
        OPS.block_lists_transposed(**{**arguments, **changes})


def test_captured_in_a_graph() -> None:
    """And replayed with other bounds."""
    if not torch.cuda.is_available() or not torch._C._dispatch_has_kernel_for_dispatch_key(
        "flash_ext::interval_block_lists", "CUDA"
    ):
        pytest.skip("needs a GPU")
    blocks, bounds = Blocks(1000, 1000, 128, 64), int32([0, 100, 1000], "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = documents(bounds, blocks, True)
        turned = transposed_lists(made, blocks.columns)
    for values in ([0, 300, 700], [5, 5, 990]):
        bounds.copy_(int32(values, "cuda"))
        graph.replay()
        expected = oracle.lists_of_documents(int32(values), blocks, True)
        assert_lists(made, expected)
        assert_lists(turned, oracle.transposed(expected, blocks.columns))
