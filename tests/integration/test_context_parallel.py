"""Attention over ranks: each has a shard of the sequence, and together they are held against the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_ext
from flash_ext.integrations.distributed import context_parallel_attention, join_sequence, split_sequence
from flash_ext.integrations.distributed.gather import _visited_chunks
from flash_ext.integrations.distributed.passes import own_rng_state
from flash_ext.integrations.distributed.shards import Problem, needed_chunks, pieces_by_chunk, pieces_of_shard
from tests import reference
from tests.integration.rank_pool import LAYOUTS, METHODS, OPTIONS, Pool, Task, assert_matches
from tests.oracle import (
    Call,
    collect_gradients,
    cumulative,
    make_call,
    random_rng,
    score_options,
)

# ---- Against the oracle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_masks(pools: Any, kind: str, layout: str, method: str, device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    call = make_call(1, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=dtype, **OPTIONS[kind])
    assert_matches(pools(2, device), call, layout, method)


@pytest.mark.parametrize("method", METHODS)
def test_dtypes(pools: Any, method: str, dtype: torch.dtype, device: str) -> None:
    call = make_call(2, 64, 64, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=16, dtype=dtype, causal=True)
    assert_matches(pools(2, device), call, "zigzag", method)


@pytest.mark.parametrize(("layout", "method"), [("zigzag", "ring"), ("contiguous", "gather"), ("zigzag", "ulysses")])
@pytest.mark.parametrize("kind", ["causal", "window of both sides"])
def test_three_ranks(pools: Any, kind: str, layout: str, method: str, device: str) -> None:
    call = make_call(1, 60, 60, heads_q=6, heads_kv=3, head_dim=16, dtype=torch.float32, **OPTIONS[kind])
    assert_matches(pools(3, device), call, layout, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(16, 48), (48, 16)])
@pytest.mark.parametrize("top_left", [False, True])
def test_queries_and_keys_of_other_lengths(
    pools: Any, seqlen_q: int, seqlen_k: int, top_left: bool, method: str, device: str
) -> None:
    options: dict[str, Any] = dict(causal=True, top_left=top_left)
    call = make_call(1, seqlen_q, seqlen_k, heads_q=2, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(2, device), call, "contiguous", method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 4, 48, 48), (2, 1, 48, 48), (2, 4, 1, 48), (1, 1, 48, 1)])
def test_bias_and_sink(pools: Any, shape: tuple[int, ...], layout: str, method: str, device: str) -> None:
    options = dict(causal=True, bias=torch.randn(shape), sink=torch.randn(4))
    call = make_call(2, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(2, device), call, layout, method)


@pytest.mark.parametrize("method", METHODS)
def test_mask(pools: Any, method: str, device: str) -> None:
    mask = torch.rand(2, 1, 48, 48) < 0.6
    mask[:, :, 5] = False  # a query that sees nothing
    call = make_call(2, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, mask=mask, sink=torch.randn(4))
    assert_matches(pools(2, device), call, "zigzag", method)
    keys = torch.rand(2, 1, 1, 48) < 0.6
    assert_matches(pools(2, device), call.with_options(mask=keys), "contiguous", method)


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["causal", "window", "narrow", "full", "alibi", "sink"])
def test_varlen(pools: Any, kind: str, layout: str, method: str, device: str) -> None:
    """Sequences of which some lie on both ranks, and some are empty."""
    options: dict[str, Any] = {"alibi": {"causal": True, "alibi_slopes": torch.rand(4)}, **OPTIONS}.get(kind, {})
    if kind == "narrow":  # the sequences reach over more ranks than the window
        options = {"window_size": (3, 0)}
    if kind == "sink":
        options = {"causal": True, "sink": torch.randn(4)}
    cu_seqlens = cumulative([5, 0, 30, 1, 12])
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=30, max_seqlen_k=30)
    call = make_call(
        seqlen_q=48, seqlen_k=48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **lengths, **options
    )
    assert_matches(pools(2, device), call, layout, method)


@pytest.mark.parametrize("alibi", [False, True])
def test_keys_begin_behind_the_start_of_a_sequence(pools: Any, alibi: bool, device: str) -> None:
    """A window so short that the last rank has only the end of a sequence's keys."""
    cu_seqlens = cumulative([5, 0, 47, 8])
    options: dict[str, Any] = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, window_size=(3, 0))
    options |= {"alibi_slopes": torch.rand(4)} if alibi else {}
    call = make_call(seqlen_q=60, seqlen_k=60, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(3, device), call, "contiguous", "gather")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 4, 30, 30), (1, 1, 30, 30), (5, 1, 1, 30), (1, 4, 30, 1)])
def test_varlen_with_bias_and_mask(pools: Any, shape: tuple[int, ...], layout: str, device: str) -> None:
    """Both count from the start of each sequence, and each rank has all of them."""
    cu_seqlens = cumulative([5, 0, 30, 1, 12])
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=30, max_seqlen_k=30)
    options = dict(causal=True, bias=torch.randn(shape), mask=torch.rand(shape) < 0.7)
    call = make_call(
        seqlen_q=48, seqlen_k=48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **lengths, **options
    )
    assert_matches(pools(2, device), call, layout, "ulysses")
    for name in ("bias", "mask"):
        one = replace(
            call, options={n: value for n, value in call.options.items() if n not in {"bias", "mask"} - {name}}
        )
        message = f"{name} of packed sequences is not supported with method 'gather', but with 'ulysses'"
        assert message in refusal(pools(2, device), one, layout=layout, method="gather")


def poisoned(device: str) -> dict[str, Any]:
    """Attention of rank 0 while places of keys that did not travel hold Inf and NaN, and of all on one rank."""
    from flash_ext.integrations.distributed import gather

    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 11, 40, 64], dtype=torch.int32, device=device)
    options: dict[str, Any] = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True, window_size=(5, 0))
    q, k, v, gradient = torch.randn(4, 64, 2, 16, device=device)
    poisons: list[float] = []

    def poison(like: Tensor, shape: Any) -> Tensor:
        poisons.append([torch.nan, torch.inf][len(poisons) % 2])
        return like.new_full(shape, poisons[-1])

    def results(attend: Any, *inputs: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

    unfilled, gather.unfilled = gather.unfilled, poison
    try:
        parts = [split_sequence(x, None, layout="zigzag", dim=0) for x in (q, k, v, gradient)]
        method = dict(layout="zigzag", method="gather", **options)
        found = results(lambda *x: context_parallel_attention(*x, None, **method), *parts)
    finally:
        gather.unfilled = unfilled
    whole = results(lambda *x: flash_ext.attention(*x, **options), q, k, v, gradient)
    right = [split_sequence(x, None, layout="zigzag", dim=0) for x in whole]
    return {"found": [x.cpu() for x in found], "right": [x.cpu() for x in right], "poisons": len(poisons)}


def test_keys_that_did_not_travel_have_no_effect(pools: Any, device: str) -> None:
    """Rank 0 has the first and the last chunk, and a short window does not reach between them."""
    answer = pools(2, device).run(poisoned)
    assert answer["poisons"] == 4  # of keys and of values, forward and backward
    for found, right in zip(answer["found"], answer["right"], strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("top_left", "method"), [(False, "gather"), (False, "ulysses"), (True, "ulysses")])
def test_varlen_of_other_lengths(pools: Any, top_left: bool, method: str, device: str) -> None:
    lengths_q, lengths_k = [5, 30, 13], [20, 4, 8]
    options: dict[str, Any] = dict(cu_seqlens_q=cumulative(lengths_q), cu_seqlens_k=cumulative(lengths_k))
    options |= dict(max_seqlen_q=30, max_seqlen_k=20, causal=True, top_left=top_left)
    call = make_call(seqlen_q=48, seqlen_k=32, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(2, device), call, "contiguous", method)


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("heads", [1, 4])
def test_block_mask(pools: Any, heads: int, method: str, device: str) -> None:
    visible = torch.rand(1, heads, 128, 128) < 0.3
    visible &= (torch.rand(1, heads, 4, 4) < 0.5).repeat_interleave(32, 2).repeat_interleave(32, 3)
    mask = flash_ext.BlockMask.from_dense(visible, (32, 32))
    call = make_call(1, 128, 128, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, block_mask=mask)
    assert_matches(pools(2, device), replace(call, block_visible=visible), "zigzag", method)


def test_alibi(pools: Any, device: str) -> None:
    call = make_call(1, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32)
    call = call.with_options(causal=True, alibi_slopes=torch.rand(4), window_size=(20, 0))
    for layout, method in itertools.product(LAYOUTS, ("auto", "ulysses")):
        assert_matches(pools(2, device), call, layout, method)
    assert_matches(pools(2, device), call.with_options(causal=False, window_size=(-1, -1)), "zigzag", "ulysses")


@pytest.mark.parametrize("needed", [("q",), ("k",), ("v", "sink"), ("bias",)])
@pytest.mark.parametrize("method", METHODS)
def test_some_gradients(pools: Any, method: str, needed: tuple[str, ...], device: str) -> None:
    options = dict(causal=True, bias=torch.randn(1, 4, 48, 48), sink=torch.randn(4))
    call = make_call(1, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, **options)
    assert_matches(pools(2, device), call, "zigzag", method, needed)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_of_lse_alone(pools: Any, method: str, device: str) -> None:
    call = make_call(1, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, causal=True)
    call = replace(call.with_random_gradients(), grad_out=None)
    assert_matches(pools(2, device), call, "contiguous", method, ("q", "k"))


@pytest.mark.parametrize(("layout", "method"), [("zigzag", "ring"), ("contiguous", "ring"), ("contiguous", "gather")])
def test_dropout(pools: Any, layout: str, method: str, device: str) -> None:
    """Each piece draws bits of its own; put together, they are the mask that out and gradients have."""
    world, rows, p, rng_state = 2, 24, 0.4, random_rng()
    call = make_call(1, 48, 48, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.float32, causal=True)
    call = call.with_options(dropout_p=p, rng_state=rng_state).with_random_gradients()
    problem = Problem(world, layout, rows, rows, -1, 0, False)  # type: ignore[arg-type]
    keep = torch.zeros(1, 4, 48, 48, dtype=torch.bool)
    everything = split_of(torch.arange(48), world, layout)
    for rank, owner in itertools.product(range(world), repeat=2):
        here = everything[owner].chunk(problem.chunks_per_rank)
        needed = needed_chunks(problem, rank, owner)
        columns = torch.cat([here[n] for n in needed]) if needed else torch.zeros(0, dtype=torch.long)
        pieces = [(piece, columns) for piece in pieces_of_shard(problem, rank, owner)]
        if method == "gather":  # one piece for each rank, of all keys up to its last query
            whole = torch.arange((rank + 1) * rows)
            piece = problem_piece(problem, rank)
            pieces = [(piece, whole)] if owner == 0 else []
        for piece, where in pieces:
            i, j = everything[rank][piece.rows], where[piece.keys]
            state = own_rng_state(rng_state, piece.number)
            keep[:, :, i[:, None], j] = reference.dropout_keep(state, p, 1, 4, len(i), len(j))
    found = pools(world, device).run(Task(call, layout, method, ("q", "k", "v")))
    leaves = {name: x.double().requires_grad_() for name, x in call.inputs().items()}
    options = replace(score_options(call.with_options(dropout_p=0.0), leaves), keep=keep, dropout_p=p)
    out, lse, _ = reference.attention(leaves["q"], leaves["k"], leaves["v"], options)
    expected = collect_gradients(call, out, lse, leaves)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-4)


def problem_piece(problem: Problem, rank: int) -> Any:
    from flash_ext.integrations.distributed.shards import band

    return band(problem, rank * problem.rows_q, problem.rows_q, 0, (rank + 1) * problem.rows_k)


def test_dropout_of_ulysses(pools: Any, device: str) -> None:
    call = make_call(1, 48, 48, heads_q=4, heads_kv=4, head_dim=16, dtype=torch.float32)
    v = torch.ones_like(call.v)
    call = replace(call, v=v).with_options(dropout_p=0.5, rng_state=random_rng())
    found = pools(2, device).run(Task(call, "contiguous", "ulysses", ()))["out"]
    halves = found[:, :, :2], found[:, :, 2:]
    assert abs(found.mean().item() - 1) < 0.1 and not torch.equal(*halves)


# ---- Refusals and neighbours ----------------------------------------------------------------------------------------


def refusal(pool: Pool, call: Call, **how: Any) -> str:
    how = {"layout": "contiguous", "method": "ring", **how}
    with pytest.raises((ValueError, NotImplementedError)) as error:
        pool.run(Task(call, how["layout"], how["method"], ()))
    return str(error.value)


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
    assert "must have rows of blocks that divide the 24 queries" in refusal(
        pool, call.with_options(block_mask=mask), method="gather"
    )


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


def train(device: str) -> float:
    """Loss of a step in which only some ranks' results are used, and attention is recomputed in the backward."""
    torch.manual_seed(0)
    x = torch.randn(1, 16, 2, 16, device=device, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        out = context_parallel_attention(x, x, x, None, layout="zigzag", causal=True)
        assert isinstance(out, Tensor)
        return out

    out = torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)
    (out.sum() * dist.get_rank()).backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    return float(x.grad.abs().sum())


def test_checkpoint_and_unused_results(pools: Any, device: str) -> None:
    assert pools(2, device).run(train) > 0  # rank 0's keys, by what rank 1 made of them


def under_autocast(device: str) -> None:
    """As attention is: computed in autocast's dtype, with gradients in that of the inputs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 16, 4, 16, device=device, requires_grad=True) for _ in range(3))
    parts = [split_sequence(x.detach(), None).clone().requires_grad_() for x in (q, k, v)]
    for method in METHODS:
        with torch.autocast(device, torch.bfloat16):
            whole = flash_ext.attention(q, k, v, causal=True)
            out = context_parallel_attention(*parts, None, method=method, causal=True)  # type: ignore[arg-type]
        assert isinstance(whole, Tensor) and isinstance(out, Tensor) and out.dtype == whole.dtype == torch.bfloat16
        expected = [whole, *torch.autograd.grad(whole.float().square().sum(), (q, k, v))]
        found = [out, *torch.autograd.grad(out.float().square().sum(), parts)]
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(join_sequence(one, None), other, rtol=5e-2, atol=5e-2)


def test_autocast(pools: Any, device: str) -> None:
    pools(2, device).run(under_autocast)


def test_docstrings_name_their_arguments() -> None:
    for function in (context_parallel_attention, split_sequence, join_sequence):
        text = function.__doc__ or ""
        assert "Returns:" in text and "Raises:" in text and "layout" in text


# ---- Plans, without processes ---------------------------------------------------------------------------------------


def split_of(x: Tensor, world: int, layout: str) -> list[Tensor]:
    """Of a vector, each rank's part."""
    if layout == "contiguous":
        return list(x.chunk(world))
    chunks = x.chunk(2 * world)
    return [torch.cat([chunks[rank], chunks[2 * world - 1 - rank]]) for rank in range(world)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_pieces_cover_what_is_visible(world: int, layout: str) -> None:
    """Every visible pair is in one piece, every other one in none, and what is not needed does not travel."""
    sizes = [(8, 8), (4, 12), (12, 4)]
    windows = [(-1, -1), (-1, 0), (0, 0), (3, 0), (9, 0), (2, 5), (-1, 3), (20, -1), (0, 7)]
    for (rows_q, rows_k), (left, right), top_left in itertools.product(sizes, windows, (False, True)):
        problem = Problem(world, layout, rows_q, rows_k, left, right, top_left)  # type: ignore[arg-type]
        i, j = torch.arange(world * rows_q)[:, None], torch.arange(world * rows_k)
        distance = j - i - problem.offset
        visible = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
        queries, keys = split_of(i[:, 0], world, layout), split_of(j, world, layout)
        for ways in (pieces_of_shard, lambda *x: [piece for piece, _ in pieces_by_chunk(*x)]):
            count = torch.zeros(visible.shape, dtype=torch.long)
            for rank, owner in itertools.product(range(world), repeat=2):
                chunks = keys[owner].chunk(problem.chunks_per_rank)
                here = [chunks[n] for n in needed_chunks(problem, rank, owner)]
                for piece in ways(problem, rank, owner):
                    rows, columns = queries[rank][piece.rows], torch.cat(here)[piece.keys]
                    a, b = torch.arange(len(rows))[:, None], torch.arange(len(columns))
                    inside = b - a - (0 if piece.top_left else len(columns) - len(rows))
                    lower, upper = piece.window
                    assert lower >= -1 and upper >= -1
                    shown = ((inside >= -lower) | (lower < 0)) & ((inside <= upper) | (upper < 0))
                    count[rows[:, None], columns] += shown
            assert torch.equal(count, visible.long()), (problem, ways)


def test_only_what_is_needed_travels() -> None:
    causal = Problem(4, "contiguous", 8, 8, -1, 0, False)
    assert [[needed_chunks(causal, r, o) for o in range(4)] for r in (0, 2)] == [
        [(0,), (), (), ()],
        [(0,), (0,), (0,), ()],
    ]
    window = Problem(4, "contiguous", 8, 8, 3, 0, False)
    assert [needed_chunks(window, 2, o) for o in range(4)] == [(), (0,), (0,), ()]
    zigzag = Problem(2, "zigzag", 8, 8, -1, 0, False)
    # Rank 0 has chunks 0 and 3, rank 1 has 1 and 2: rank 1 needs of rank 0 the first half alone.
    assert needed_chunks(zigzag, 1, 0) == (0,) and needed_chunks(zigzag, 0, 1) == (0, 1)
    assert len(pieces_of_shard(zigzag, 0, 1)) == len(pieces_of_shard(zigzag, 1, 0)) == 1


@pytest.mark.parametrize("top_left", [False, True])
def test_only_what_is_needed_of_packed_sequences_travels(top_left: bool) -> None:
    """Where sequences begin the host does not know; a window reaches as far in each of them."""
    window = Problem(4, "contiguous", 8, 8, 5, 0, top_left, packed=True)
    assert [needed_chunks(window, 2, o) for o in range(4)] == [(), (0,), (0,), ()]
    wider = replace(window, left=9)
    assert [needed_chunks(wider, 2, o) for o in range(4)] == [(0,), (0,), (0,), ()]
    assert [needed_chunks(replace(window, left=-1), 2, o) for o in range(4)] == [(0,), (0,), (0,), ()]
    assert [needed_chunks(replace(window, left=-1, right=-1), 0, o) for o in range(4)] == [(0,)] * 4
    zigzag = replace(window, size=2, layout="zigzag", left=4)
    assert needed_chunks(zigzag, 0, 1) == (1,) and needed_chunks(zigzag, 1, 0) == (0,)
    # Where a sequence of queries has its keys the host does not know.
    other = replace(window, same_sequences=False, top_left=False)
    assert [needed_chunks(other, 0, o) for o in range(4)] == [(0,)] * 4


def test_visited_chunks_of_a_block_mask() -> None:
    visible = torch.rand(2, 3, 256, 256) < 0.01
    visible &= (torch.rand(2, 3, 8, 8) < 0.2).repeat_interleave(32, 2).repeat_interleave(32, 3)
    mask = flash_ext.BlockMask.from_dense(visible, (32, 96))
    problem = Problem(4, "contiguous", 64, 64, -1, -1, False)
    blocks = torch.nn.functional.pad(visible, (0, 32)).view(2, 3, 8, 32, 3, 96).any(5).any(3)  # as the kernel visits
    keys = blocks.repeat_interleave(96, 3)[..., :256].view(2, 3, 4, 2, 4, 64)
    assert _visited_chunks(mask, problem) == keys.any(5).any(3).any(1).any(0).tolist()


def benchmark_of(device: str) -> dict[str, Any]:
    """What ``benchmarks.context_parallel`` does in each of its processes."""
    from benchmarks import context_parallel

    sizes = ["--seqlen", "64", "--heads", "2", "--head-dim", "16", "--dtype", "float32", "--rounds", "1"]
    how = ["--device", device, "--ranks", "2", "--methods", "ring", "gather", "--unsplit"]
    chosen = context_parallel.make_parser().parse_args([*sizes, *how])
    here = torch.device(device, dist.get_rank()) if device == "cuda" else torch.device(device)
    for method in chosen.methods:
        context_parallel.check(context_parallel.problem_of(chosen, 64), method, here)
    row = context_parallel.measure(context_parallel.problem_of(chosen, 64), chosen, here)
    context_parallel.add_rates([row])
    return {"measured": row.measured, "figures": row.figures}


def test_benchmark(pools: Any, device: str) -> None:
    row = pools(2, device).run(benchmark_of)
    assert set(row["measured"]) == {
        "flash_ext",
        "flash_ext, gather",
        "flash_ext, gather, one section",
        "flash_ext, one",
    }
    assert row["figures"]["x one"] > 0 and row["figures"]["x one at 64"] > 0


# ---- FSDP -----------------------------------------------------------------------------------------------------------


class Attend(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 96)

    def forward(self, x: Tensor, group: Any = None, parallel: bool = False) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        if parallel:
            out = context_parallel_attention(q, k, v, group, layout="zigzag", causal=True)
        else:
            out = flash_ext.attention(q, k, v, causal=True)
        assert isinstance(out, Tensor)
        return out.flatten(-2)


def fsdp_step(device: str) -> None:
    """A sharded model on shards of the sequence has the gradient of the whole model on the whole sequence."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    world = dist.get_world_size()
    torch.manual_seed(0)
    whole = Attend().to(device)
    sharded = Attend().to(device)
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=init_device_mesh(device, (world,)))
    x = torch.randn(1, 32, 32, device=device)
    whole(x).square().sum().backward()
    mine = split_sequence(x, None, layout="zigzag")
    (sharded(mine, parallel=True).square().sum() * world).backward()  # FSDP means what it sums
    for name, parameter in sharded.named_parameters():
        expected = whole.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-4, atol=1e-4)  # type: ignore


def test_fsdp(pools: Any, device: str) -> None:
    pools(2, device).run(fsdp_step)
