"""``supports`` and ``explain`` of DTensors: what a rank runs, found by one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import flash_ext
from flash_ext.integrations.distributed.dtensor import register_dtensor
from tests.oracle import cumulative

BATCH, ROWS, HEADS, HEADS_KV, DIM = 2, 16, 4, 2, 16
Places = tuple[Any, ...]


def make(mesh: DeviceMesh, places: Places | dict[str, Places], **options: Places) -> dict[str, Any]:
    """q, k, v and options by the name of their shape, with their placements."""
    shapes = {
        "q": (BATCH, ROWS, HEADS, DIM),
        "k": (BATCH, ROWS, HEADS_KV, DIM),
        "v": (BATCH, ROWS, HEADS_KV, DIM),
        "bias": (1, HEADS, ROWS, ROWS),
        "sink": (HEADS,),
        "alibi_slopes": (HEADS,),
        "seqused_k": (BATCH,),
    }
    of_tensors = places if isinstance(places, dict) else dict.fromkeys("qkv", places)
    torch.manual_seed(0)
    found = {}
    for name, own in {**of_tensors, **options}.items():
        x = torch.randn(shapes[name]) if name != "seqused_k" else torch.full(shapes[name], 5, dtype=torch.int32)
        found[name] = distribute_tensor(x.to(mesh.device_type), mesh, own)
    return found


def told(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- What runs ------------------------------------------------------------------------------------------------------

# placements of q, k and v; of options; what each dimension of the mesh shards the call by
ALIKE: list[tuple[Any, dict[str, Places], Places]] = [
    ((Replicate(),), {}, (Replicate(),)),
    ((Shard(0),), {}, (Shard(0),)),
    ((Shard(2),), {"bias": (Replicate(),), "sink": (Replicate(),)}, (Shard(2),)),
    ((Shard(2),), {"bias": (Shard(1),)}, (Shard(2),)),
    ((Replicate(),), {"bias": (Shard(1),)}, (Shard(2),)),
    ({"q": (Shard(2),), "k": (Replicate(),), "v": (Replicate(),)}, {}, (Shard(2),)),
    ((Shard(0),), {"seqused_k": (Shard(0),)}, (Shard(0),)),
    ((Replicate(),), {"alibi_slopes": (Replicate(),)}, (Replicate(),)),
    ((Shard(0), Shard(2)), {"bias": (Replicate(), Shard(1))}, (Shard(0), Shard(2))),
    ((Shard(2), Replicate()), {}, (Shard(2), Replicate())),
]


def explained(places: Any, options: dict[str, Places], ran: Places, device: str) -> list[bool]:
    """One rank asks, the call shows what runs, and each rank asks about its part."""
    register_dtensor()
    mesh = init_device_mesh(device, (2,) * len(ran))
    given = make(mesh, places, **options)
    with CommDebugMode() as communication:
        if dist.get_rank() == 0:
            flash_ext.explain(**given, causal=True)
            assert flash_ext.supports(**given, causal=True) == (True, "")
    out: Any = flash_ext.attention(**given, causal=True)
    with CommDebugMode() as also:
        found = {operation: flash_ext.explain(**given, causal=True, operation=operation) for operation in OPERATIONS}
    assert communication.get_total_counts() == also.get_total_counts() == 0
    assert out.placements == ran
    right = []
    for operation, explanation in found.items():
        assert "\n  this rank's part of DTensors\n" in str(explanation)
        expected = flash_ext.explain(**local_parts(given, ran), causal=True, operation=operation)
        right.append(str(explanation.problem) == str(expected.problem))
        batch, rows, heads, _ = out.to_local().shape
        problem = explanation.problem
        right.append((problem.batch, problem.seqlen_q, problem.heads_q) == (batch, rows, heads))
    return right


OPERATIONS = ("forward", "backward")
DIMS = {"bias": {0: None, 2: 1}, "sink": {0: None, 2: 0}, "seqused_k": {0: 0, 2: None}}


def local_parts(given: dict[str, Any], ran: Places) -> dict[str, Tensor]:
    def part(name: str, x: Any) -> Tensor:
        dims = [DIMS.get(name, {0: 0, 2: 2})[place.dim] if place.is_shard() else None for place in ran]
        own: Tensor = x.redistribute(placements=[Replicate() if dim is None else Shard(dim) for dim in dims]).to_local()
        return own

    return {name: part(name, x) for name, x in given.items()}


@pytest.mark.parametrize(("places", "options", "ran"), ALIKE, ids=str)
def test_explain_shows_the_call_of_this_rank(
    pools: Any, places: Any, options: dict[str, Places], ran: Places, device: str
) -> None:
    assert all(pools(2 ** len(ran), device).run(partial(explained, places, options, ran)))


# ---- What explain() cannot show -------------------------------------------------------------------------------------


def not_shown(places: Any, options: dict[str, Any], device: str) -> dict[str, Any]:
    """What each rank is told, without a transfer, of a call that is supported."""
    register_dtensor()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    tensors = {name: value for name, value in options.items() if isinstance(value, tuple)}
    given = {**make(mesh, places, **tensors), **{name: x for name, x in options.items() if name not in tensors}}
    with CommDebugMode() as communication:
        text = told(flash_ext.explain, **given)
        supported = flash_ext.supports(**given)
    assert communication.get_total_counts() == 0
    works = told(flash_ext.attention, **given)
    return {"texts": of_all_ranks(text), "supported": of_all_ranks(supported), "works": works}


SEQUENCE = "NotImplementedError: flash_ext: a call on DTensors sharded along the sequence is several"
MOVED = "NotImplementedError: flash_ext: explain() does not show a call for which torch redistributes DTensors first: "
BY_HEADS = {"q": (Shard(2),), "k": (Shard(0),), "v": (Replicate(),)}
NOT_SHOWN: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    ((Shard(1),), {}, (SEQUENCE, "over 2 ranks with method 'ring'")),
    ((Shard(1),), {"alibi_slopes": (Replicate(),), "causal": True}, (SEQUENCE, "with method 'gather'")),
    ((Shard(1),), {"alibi_slopes": (Replicate(),)}, (SEQUENCE, "with method 'ulysses'")),
    ((Shard(1),), {"bias": (Shard(1),)}, (SEQUENCE, "with method 'ring'")),
    (BY_HEADS, {}, (MOVED, "redistribute() all of them alike, by batch or heads", "k (Shard(dim=0),)")),
    ((Shard(3),), {}, (MOVED, "pass full_tensor()")),
    ((Shard(2),), {"alibi_slopes": (Replicate(),)}, (f"{MOVED}pass full_tensor()",)),
    ((Shard(0),), {"bias": (Shard(1),)}, (MOVED, "bias (Shard(dim=1),)")),
]


@pytest.mark.parametrize(("places", "options", "parts"), NOT_SHOWN, ids=str)
def test_explain_names_the_way_out(
    pools: Any, places: Any, options: dict[str, Any], parts: tuple[str, ...], device: str
) -> None:
    answer = pools(2, device).run(partial(not_shown, places, options))
    first, second = answer["texts"]
    assert first == second and all(part in first for part in parts), first
    assert answer["supported"] == [(True, "")] * 2 and answer["works"] == ""


# ---- What is not supported ------------------------------------------------------------------------------------------


def plain_bias(mesh: DeviceMesh, places: Places) -> dict[str, Any]:
    return {**make(mesh, places), "bias": torch.zeros(1, 1, 1, ROWS, device=mesh.device_type)}


def bias_of(shape: tuple[int, ...], mesh: DeviceMesh, places: Places) -> dict[str, Any]:
    bias = distribute_tensor(torch.zeros(shape, device=mesh.device_type), mesh, [Replicate()])
    return {**make(mesh, places), "bias": bias}


def dropout(mesh: DeviceMesh, places: Places) -> dict[str, Any]:
    return {**make(mesh, places), "dropout_p": 0.5}


def max_logit(mesh: DeviceMesh, places: Places) -> dict[str, Any]:
    return {**make(mesh, places), "return_max_logit": True}


def plain_keys(mesh: DeviceMesh, places: Places) -> dict[str, Any]:
    given = make(mesh, places)
    return {**given, "k": given["k"].full_tensor()}


def other_heads(mesh: DeviceMesh, places: Places) -> dict[str, Any]:
    given = make(mesh, places)
    return {**given, "v": distribute_tensor(given["v"].full_tensor()[:, :, :1].contiguous(), mesh, [Replicate()])}


def too_long(mesh: DeviceMesh, places: Places) -> dict[str, Any]:
    """Lengths that only a CPU looks at."""
    q = distribute_tensor(torch.zeros(ROWS, HEADS, DIM, device=mesh.device_type), mesh, places)
    lengths = distribute_tensor(cumulative([5, 20]).to(mesh.device_type), mesh, [Replicate()])
    return {"q": q, "k": q, "v": q, "cu_seqlens_q": lengths, "cu_seqlens_k": lengths}


BIAS = "bias must have shape (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1): expected (2, 4, 16, 16)"
UNSUPPORTED: dict[str, tuple[Any, Places, str]] = {
    "plain bias": (plain_bias, (Shard(2),), "bias must be a DTensor, as others are"),
    "plain keys": (plain_keys, (Shard(0),), "k must be a DTensor, as others are"),
    "plain keys of a sequence": (plain_keys, (Shard(1),), "k must be a DTensor, as others are"),
    "dropout": (dropout, (Shard(2),), "rng_state must be a DTensor, as q, k and v are"),
    "dropout of a sequence": (
        dropout,
        (Shard(1),),
        "dropout_p of DTensors sharded along the sequence is not supported",
    ),
    "max_logit of a sequence": (
        max_logit,
        (Shard(1),),
        "return_max_logit of DTensors sharded along the sequence is not",
    ),
    "heads of bias": (partial(bias_of, (1, 3, ROWS, ROWS)), (Shard(2),), BIAS),
    "heads of bias of a sequence": (partial(bias_of, (1, 3, ROWS, ROWS)), (Shard(1),), BIAS),
    "rows of bias of a sequence": (partial(bias_of, (1, HEADS, ROWS + 1, ROWS)), (Shard(1),), BIAS),
    "batch of bias": (partial(bias_of, (3, HEADS, ROWS, ROWS)), (Shard(0),), BIAS),
    "heads of v": (other_heads, (Shard(2),), "v.size(2) must equal k.size(2)"),
    "lengths of a sequence": (too_long, (Shard(1),), "cu_seqlens_q"),
}


def not_supported(make: Any, places: Places, device: str) -> dict[str, Any]:
    register_dtensor()
    given = make(init_device_mesh(device, (dist.get_world_size(),)), places)
    reason, refused = flash_ext.supports(**given)[1], told(flash_ext.attention, **given)
    return {"reasons": of_all_ranks(reason), "refused": of_all_ranks(refused)}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused_on_all_ranks(pools: Any, name: str, device: str) -> None:
    """A shard of what does not fit may fit on one rank, which would wait for the others."""
    make, places, text = UNSUPPORTED[name]
    if make is too_long and device != "cpu":
        pytest.skip("lengths on a GPU are not read")
    answer = pools(2, device).run(partial(not_supported, make, places))
    assert answer["reasons"] == [answer["reasons"][0]] * 2 and text in answer["reasons"][0]
    assert all(answer["refused"]), answer["refused"]


def other_functions(device: str) -> list[str]:
    register_dtensor()
    given = make(init_device_mesh(device, (dist.get_world_size(),)), (Shard(0),))
    texts = []
    for operation in ("weights", "weights_backward", "decode"):
        texts.append(told(flash_ext.explain, **given, operation=operation))
        assert flash_ext.supports(**given, operation=operation) == (False, texts[-1].partition("flash_ext: ")[2])
    return texts


def test_functions_that_have_no_dtensors(pools: Any, device: str) -> None:
    texts = pools(2, device).run(other_functions)
    assert ["attention_weights()" in text for text in texts] == [True, True, False] and "decode()" in texts[2]
    assert all("does not take DTensors: pass to_local() of them" in text for text in texts)


def partial_sums(device: str) -> list[Any]:
    register_dtensor()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    given = make(mesh, (Shard(1),))
    given["q"] = DTensor.from_local(torch.zeros(BATCH, ROWS, HEADS, DIM, device=device), mesh, [Partial()])
    return of_all_ranks(flash_ext.supports(**given) if dist.get_rank() == 0 else None)


def test_sums_that_are_still_to_be_made(pools: Any, device: str) -> None:
    """The call reduces them; the question does not."""
    assert pools(2, device).run(partial_sums) == [(True, ""), None]
