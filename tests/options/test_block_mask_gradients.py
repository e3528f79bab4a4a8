"""Gradients of a block mask alone, whose lists drive the backward for Hopper.

Entries of the lists are pieces of 32 queries at head dims up to 64, tiles of 64 beyond. A tile of 128 keys may lie in
two columns of blocks, of which an entry's queries see one or both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.options.test_block_mask import blocked
from tests.oracle import Call, assert_kernel_on_hopper, assert_matches_oracle, make_call, random, run_library

BLOCKS = [(64, 128), (128, 128), (192, 256), (64, 64), (128, 64), (64, 192)]
GRADIENTS = ("q", "k", "v")
# None: whole blocks of 64 x 64, without bitmaps.
POISONED_CASES = [((64, 128), 64), ((64, 64), 64), ((64, 64), 128), (None, 64), (None, 128)]


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def visible_of(kind: torch.Tensor, block: tuple[int, int], seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Blocks of kind 2 are full, those of kind 1 show every second pair, by chance."""
    kind = kind.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, :seqlen_q, :seqlen_k]
    return (kind == 2) | ((kind == 1) & (torch.rand(kind.shape, device=kind.device) < 0.5))


def blocks_of(block: tuple[int, int], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    return -(-seqlen_q // block[0]), -(-seqlen_k // block[1])


def listed_call(call: Call, see: torch.Tensor, block: tuple[int, int]) -> Call:
    call = blocked(call, see, *block)
    widest = max(call.q.shape[-1], call.v.shape[-1])
    assert_kernel_on_hopper(call, "sm90/backward_persistent" if widest <= 64 else "sm90/backward", "backward")
    return call.with_random_gradients()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (40, 40), (64, 24), (24, 64), (128, 128)])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_dims_of_heads(device: str, dtype: torch.dtype, block: tuple[int, int], head_dim: int, head_dim_v: int) -> None:
    """Ends of both sequences within a piece and a tile; heads of a group see other blocks; sinks."""
    seqlen_q, seqlen_k = 459, 701
    kind = torch.randint(0, 3, (2, 4, *blocks_of(block, seqlen_q, seqlen_k)), device=device)
    see = visible_of(kind, block, seqlen_q, seqlen_k)
    sink = random(4, device=device)
    call = make_call(2, seqlen_q, seqlen_k, 4, 2, head_dim, head_dim_v, device=device, dtype=dtype, sink=sink)
    assert_matches_oracle(listed_call(call, see, block))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("rest", [20, 32, 50, 64])
def test_lists_of_any_length(device: str, dtype: torch.dtype, rest: int, full: bool) -> None:
    """Column c of blocks lists c // 2 blocks of two pieces, and the last one, of one piece or two, where c is odd."""
    block, rows, cols = (64, 128), 7, 12
    seqlen_q, seqlen_k = 64 * (rows - 1) + rest, 128 * cols - 70
    kind = torch.zeros(1, 2, rows, cols, dtype=torch.int64, device=device)
    for col in range(cols):
        kind[:, 0, (rows - 1 - torch.arange(col // 2)) % (rows - 1), col] = 2 if full else 1
        kind[:, 1, -1, col] = 2 * (col % 2)
    see = visible_of(kind, block, seqlen_q, seqlen_k)
    call = make_call(1, seqlen_q, seqlen_k, 2, 1, 64, device=device, dtype=dtype)
    assert_matches_oracle(listed_call(call, see, block), GRADIENTS)


@pytest.mark.parametrize("seqlen_q", [1, 31, 32, 33, 64, 95, 97, 129])
@pytest.mark.parametrize("seqlen_k", [1, 63, 128, 130, 191])
@pytest.mark.parametrize(("block", "head_dim"), [((64, 128), 64), ((64, 64), 64), ((64, 64), 128)], ids=str)
def test_short_sequences(
    device: str, dtype: torch.dtype, block: tuple[int, int], head_dim: int, seqlen_q: int, seqlen_k: int
) -> None:
    kind = torch.randint(0, 3, (2, 4, *blocks_of(block, seqlen_q, seqlen_k)), device=device)
    see = visible_of(kind, block, seqlen_q, seqlen_k)
    call = make_call(2, seqlen_q, seqlen_k, 4, 2, head_dim, device=device, dtype=dtype)
    assert_matches_oracle(listed_call(call, see, block), GRADIENTS)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("masked_heads", [1, 4])
@pytest.mark.parametrize("bitmaps", [False, True])
@pytest.mark.parametrize("block", [(64, 64), (128, 64)], ids=str)
def test_key_tiles_of_two_columns(
    device: str, dtype: torch.dtype, block: tuple[int, int], bitmaps: bool, masked_heads: int, head_dim: int
) -> None:
    """Of which queries see the first, the second, both or none. The last tile has one column. Columns 4 and 5, a whole
    tile, are seen by nobody, and of the next tile only the second one is seen. Some queries see nothing."""
    seqlen_q, seqlen_k = 459, 9 * 64 - 27
    rows, cols = blocks_of(block, seqlen_q, seqlen_k)
    kind = torch.randint(0, 2, (2, masked_heads, rows, cols), device=device) * (1 if bitmaps else 2)
    kind[..., :3, :2] = torch.tensor([[2, 0], [0, 2], [2, 2]], device=device)
    kind[..., 4:7], kind[..., 7] = 0, 2
    kind[..., -1, :] = 0
    see = visible_of(kind, block, seqlen_q, seqlen_k)
    call = make_call(2, seqlen_q, seqlen_k, 4, 2, head_dim, device=device, dtype=dtype)
    call = listed_call(call, see, block)
    assert (len(call.options["block_mask"].bitmaps) > 0) == bitmaps
    assert_matches_oracle(call)


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_more_key_tiles_than_sms(device: str, density: float, heads: int) -> None:
    """A CTA goes on from one list to the next, some of them empty."""
    block = (128, 128)
    seqlen_q, seqlen_k = (1100, 3000) if device == "cuda" else (300, 600)
    kind = 2 * (torch.rand(1, heads, *blocks_of(block, seqlen_q, seqlen_k), device=device) < density).int()
    kind[:, :, 1::2, 1::3] //= 2
    see = visible_of(kind, block, seqlen_q, seqlen_k)
    call = make_call(2, seqlen_q, seqlen_k, 8, 8, 64, device=device, dtype=torch.bfloat16)
    assert_matches_oracle(listed_call(call, see, block), GRADIENTS)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
def test_gradients_that_are_wanted(device: str, dtype: torch.dtype, wanted: str) -> None:
    block, seqlen_q, seqlen_k = (64, 128), 330, 410
    kind = torch.randint(0, 3, (1, 4, *blocks_of(block, seqlen_q, seqlen_k)), device=device)
    call = make_call(1, seqlen_q, seqlen_k, 4, 2, 64, device=device, dtype=dtype)
    see = visible_of(kind, block, seqlen_q, seqlen_k)
    assert_matches_oracle(listed_call(call, see, block), tuple(wanted))


def call_of_bitmaps(
    device: str, dtype: torch.dtype, block: tuple[int, int], head_dim: int, hidden: slice, **options: Any
) -> Call:
    """Every block has a bitmap, and keys that no query sees; lists of one piece more than whole steps."""
    seqlen_q, seqlen_k = 300, 500
    see = torch.rand(1, 2, seqlen_q, seqlen_k, device=device) < 0.6
    see[..., 0] = True
    see[..., hidden] = False
    call = make_call(1, seqlen_q, seqlen_k, 2, 1, head_dim, device=device, dtype=dtype, **options)
    return listed_call(call, see, block)


def call_of_whole_blocks(
    device: str, dtype: torch.dtype, head_dim: int, hidden: tuple[slice, slice], **options: Any
) -> Call:
    """Without bitmaps: all pairs are visible but `hidden`, whole blocks of 64 x 64."""
    seqlen_q, seqlen_k = 300, 500
    see = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    see[(..., *hidden)] = False
    call = make_call(1, seqlen_q, seqlen_k, 2, 1, head_dim, device=device, dtype=dtype, **options)
    call = listed_call(call, see, (64, 64))
    assert len(call.options["block_mask"].bitmaps) == 0
    return call


@pytest.mark.parametrize(("block", "head_dim"), POISONED_CASES, ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_what_nobody_sees_reaches_no_gradient(
    device: str, dtype: torch.dtype, sinks: bool, poison: float, block: tuple[int, int] | None, head_dim: int
) -> None:
    """Neither by the pairs that bitmaps hide, nor by the half of a key tile that no list names, nor by the pieces that
    a last step lacks."""
    hidden = slice(40, 97) if block else slice(64, 128)
    options = {"sink": random(2, device=device)} if sinks else {}
    if block:
        call = call_of_bitmaps(device, dtype, block, head_dim, hidden, **options)
    else:
        call = call_of_whole_blocks(device, dtype, head_dim, (slice(None), hidden), **options)
    expected = run_library(call, GRADIENTS)
    call.k[:, hidden] = call.v[:, hidden] = poison
    result = run_library(call, GRADIENTS)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-2
    for name in ("dq", "dk", "dv"):  # additions to dq have no order
        torch.testing.assert_close(result[name], expected[name], rtol=tolerance, atol=tolerance)
    assert (result["dk"][:, hidden] == 0).all() and (result["dv"][:, hidden] == 0).all()


@pytest.mark.parametrize("poisoned", ["q", "grad_out"])
def test_a_query_of_nan_reaches_no_key_that_a_bitmap_hides(device: str, dtype: torch.dtype, poisoned: str) -> None:
    """Its piece's step has pieces of other blocks."""
    query, hidden = 41, slice(40, 97)
    seqlen_q, seqlen_k = 300, 500
    see = torch.rand(1, 2, seqlen_q, seqlen_k, device=device) < 0.6
    see[:, :, query] = True
    see[:, :, query, hidden] = False
    call = make_call(1, seqlen_q, seqlen_k, 2, 1, 64, device=device, dtype=dtype)
    call = listed_call(call, see, (64, 128))
    tensor = call.grad_out if poisoned == "grad_out" else call.q
    assert tensor is not None
    tensor[:, query] = torch.nan
    result = run_library(call, GRADIENTS)
    assert result["dk"][:, hidden].isfinite().all() and result["dv"][:, hidden].isfinite().all()
    assert result["dk"][:, hidden.stop :].isnan().all()
    others = torch.arange(seqlen_q) != query
    assert result["dq"][:, others].isfinite().all()


@pytest.mark.parametrize("poisoned", ["q", "grad_out"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("column", [0, 1, 4])
def test_a_query_of_nan_reaches_no_key_of_a_column_it_does_not_see(
    device: str, dtype: torch.dtype, column: int, head_dim: int, poisoned: str
) -> None:
    """It sees the other column of that tile, in a mask without bitmaps."""
    query, hidden = 41, slice(64 * column, 64 * column + 64)
    call = call_of_whole_blocks(device, dtype, head_dim, (slice(0, 64), hidden))
    tensor = call.grad_out if poisoned == "grad_out" else call.q
    assert tensor is not None
    tensor[:, query] = torch.nan
    result = run_library(call, GRADIENTS)
    seen = torch.ones(500, dtype=torch.bool)
    seen[hidden] = False
    assert result["dk"][:, hidden].isfinite().all() and result["dv"][:, hidden].isfinite().all()
    assert result["dk"][:, seen].isnan().all()
    others = torch.arange(300) != query
    assert result["dq"][:, others].isfinite().all()


@pytest.mark.parametrize(("block", "head_dim"), [((64, 128), 64), ((64, 64), 64), ((64, 64), 128)], ids=str)
def test_a_few_rows_of_large_scores(device: str, dtype: torch.dtype, block: tuple[int, int], head_dim: int) -> None:
    """Of one head: weights of its pieces are bounded, in full blocks too, and those of other steps stay right."""
    seqlen_q, seqlen_k = 330, 410
    kind = torch.randint(1 if block[1] == 128 else 0, 3, (1, 4, *blocks_of(block, seqlen_q, seqlen_k)), device=device)
    call = make_call(1, seqlen_q, seqlen_k, 4, 2, head_dim, device=device, dtype=dtype)
    call.q[:, 200:203, 1] = call.q[:, 200:203, 1] * 500
    see = visible_of(kind, block, seqlen_q, seqlen_k)
    result = run_library(listed_call(call, see, block), GRADIENTS)
    assert all(result[name].isfinite().all() for name in ("dq", "dk", "dv"))


def test_a_last_step_that_lacks_pieces(device: str, dtype: torch.dtype) -> None:
    """Where scores lie so far below 0 that a score of 0, as those of rows that are not there, weighs infinitely."""
    block, seqlen_q, seqlen_k = (64, 128), 320, 400
    kind = torch.full((1, 1, *blocks_of(block, seqlen_q, seqlen_k)), 2, device=device)
    call = make_call(1, seqlen_q, seqlen_k, 1, 1, 64, device=device, dtype=dtype)
    call.q[:], call.k[:] = call.q / 16 + 5, call.k / 16 - 5
    assert_matches_oracle(listed_call(call, visible_of(kind, block, seqlen_q, seqlen_k), block), GRADIENTS)
