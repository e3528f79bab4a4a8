"""Dropout over ranks: which weights are dropped."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_ext.integrations.distributed.passes import own_rng_state
from flash_ext.integrations.distributed.shards import Problem, band, needed_chunks, pieces_of_shard
from tests import reference
from tests.integration.rank_pool import Task, split_of
from tests.oracle import collect_gradients, make_call, random_rng, score_options


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
    return band(problem, rank * problem.rows_q, problem.rows_q, 0, (rank + 1) * problem.rows_k)


def test_dropout_of_ulysses(pools: Any, device: str) -> None:
    call = make_call(1, 48, 48, heads_q=4, heads_kv=4, head_dim=16, dtype=torch.float32)
    v = torch.ones_like(call.v)
    call = replace(call, v=v).with_options(dropout_p=0.5, rng_state=random_rng())
    found = pools(2, device).run(Task(call, "contiguous", "ulysses", ()))["out"]
    halves = found[:, :, :2], found[:, :, 2:]
    assert abs(found.mean().item() - 1) < 0.1 and not torch.equal(*halves)
