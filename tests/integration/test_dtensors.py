"""``attention`` of DTensors: sharded by batch entries, by heads, and along the sequence, held against the whole."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import flash_ext
from flash_ext.integrations.distributed.dtensor import register_dtensor
from tests.integration.rank_pool import OPTIONS, assert_within_bounds
from tests.oracle import Call, Result, collect_gradients, cumulative, make_call

# ---- By batch entries or heads --------------------------------------------------------------------------------------


def mesh_and_inputs(device: str) -> tuple[DeviceMesh, Tensor, Tensor, Tensor]:
    """Of all ranks; and q, k and v with two batch entries, and two query heads for each of two key heads."""
    register_dtensor()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    q = torch.randn(2, 16, 4, 16, device=device)
    k, v = torch.randn(2, 2, 12, 2, 16, device=device)
    return mesh, q, k, v


def on_dtensors(device: str) -> None:
    """Batch entries or heads stay where they are, and so do gradients; a bias of all has its gradient summed."""
    mesh, q, k, v = mesh_and_inputs(device)
    bias, sink = torch.randn(1, 4, 16, 12, device=device), torch.randn(4, device=device)
    grad = torch.randn(2, 16, 4, 16, device=device)
    for with_options, side in itertools.product((False, True), (0, 2)):
        plain = [x.clone().requires_grad_() for x in (q, k, v, bias, sink)]
        shards = [Shard(side)] * 3 + [Shard(1) if side == 2 else Replicate(), Shard(0) if side == 2 else Replicate()]
        leaves = [
            distribute_tensor(x, mesh, [place]).requires_grad_()
            for x, place in zip((q, k, v, bias, sink), shards, strict=True)
        ]
        results = []
        for tensors in (plain, leaves):
            options: dict[str, Any] = dict(bias=tensors[3], sink=tensors[4]) if with_options else {}
            out = flash_ext.attention(*tensors[:3], causal=True, **options)
            assert isinstance(out, Tensor)
            given = grad if tensors is plain else distribute_tensor(grad, mesh, [Shard(side)])
            wanted = tensors if with_options else tensors[:3]
            results.append([out, *torch.autograd.grad(out, wanted, given)])
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-4)
        assert results[1][0].placements == (Shard(side),) and results[1][2].placements == (Shard(side),)


def test_batch_entries_and_heads(pools: Any, device: str) -> None:
    pools(2, device).run(on_dtensors)


def max_logit_on_dtensors(device: str) -> None:
    mesh, q, k, v = mesh_and_inputs(device)
    expected = flash_ext.attention(q, k, v, causal=True, return_lse=True, return_max_logit=True)
    for side, dim in ((0, 0), (2, 1)):
        shards = [distribute_tensor(x, mesh, [Shard(side)]).requires_grad_() for x in (q, k, v)]
        with CommDebugMode() as communication:
            found: Any = flash_ext.attention(*shards, causal=True, return_lse=True, return_max_logit=True)
        assert communication.get_total_counts() == 0
        assert found[2].placements == (Shard(dim),) and not found[2].requires_grad and found[0].requires_grad
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-4)
    packed = [distribute_tensor(x.flatten(0, 1), mesh, [Shard(1)]) for x in (q, q[:, :, :2], q[:, :, 2:])]
    lengths: Any = distribute_tensor(cumulative([16, 0, 16]).to(device), mesh, [Replicate()])
    found = flash_ext.attention(*packed, cu_seqlens_q=lengths, cu_seqlens_k=lengths, return_max_logit=True)
    whole = flash_ext.attention(q, q[:, :, :2], q[:, :, 2:], return_max_logit=True)
    assert found[1].placements == (Shard(1),) and found[1].full_tensor()[1].isneginf().all()
    torch.testing.assert_close(found[1].full_tensor()[::2], whole[1], rtol=1e-4, atol=1e-4)


def test_max_logit_of_batch_entries_and_heads(pools: Any, device: str) -> None:
    pools(2, device).run(max_logit_on_dtensors)


# ---- Along the sequence ---------------------------------------------------------------------------------------------


@dataclass
class Sharded:
    """A call on a mesh, each dimension of which shards q, k and v by a side, or not at all ("")."""

    call: Call
    mesh: tuple[int, ...]
    sides: tuple[str, ...]
    copies: tuple[str, ...] = ()  # which are replicated where others are sharded
    local_copies: tuple[str, ...] = ()  # options that are plain tensors

    def __call__(self, device: str) -> Result:
        """Whole results and gradients, after their placements are found right."""
        register_dtensor()
        mesh = init_device_mesh(device, self.mesh)
        call = replace(self.call, **{name: self.on(mesh, name, getattr(self.call, name)) for name in _TENSORS})
        call.options = {name: self.on(mesh, name, value) for name, value in call.options.items()}
        if "cu_seqlens_q" in call.options:
            call.options["cu_seqlens_k"] = call.options["cu_seqlens_q"]
        leaves = {
            name: x.detach().requires_grad_() for name, x in call.inputs().items() if name not in self.local_copies
        }
        given = {**call.options, "q": call.q, "k": call.k, "v": call.v, **leaves}
        with CommDebugMode() as communication:
            out, lse = flash_ext.attention(**given, return_lse=True)
            found = collect_gradients(call, out, lse, leaves)
        if all(name in "qkv" for name in call.inputs()) and not self.copies:
            assert communication.get_total_counts() == 0, communication.get_comm_counts()  # but for what is ours
        assert out.placements == self.placements("grad_out") and lse.placements == self.placements("grad_lse")
        for name, x in leaves.items():
            gradient: Any = found[f"d{name}"]
            assert gradient.placements == x.placements, name
        return {name: x.full_tensor() for name, x in found.items()}  # type: ignore[attr-defined]

    def on(self, mesh: DeviceMesh, name: str, x: Any) -> Any:
        if isinstance(x, flash_ext.BlockMask):
            return x.to(mesh.device_type)
        if not isinstance(x, Tensor):
            return x
        x = x.to(mesh.device_type)
        return x if name in self.local_copies else distribute_tensor(x, mesh, self.placements(name))

    def placements(self, name: str) -> tuple[Any, ...]:
        dims = _DIMS_PACKED if self.call.varlen else _DIMS
        if name in self.copies or name not in dims:
            return (Replicate(),) * len(self.sides)
        return tuple(Shard(dims[name][side]) if side else Replicate() for side in self.sides)


_TENSORS = ("q", "k", "v", "grad_out", "grad_lse")
_DIMS = {name: {"batch": 0, "rows": 1, "heads": 2} for name in _TENSORS[:4]} | {
    "grad_lse": {"batch": 0, "heads": 1, "rows": 2},
    "rows of bias": {"batch": 0, "heads": 1, "rows": 2},
}
_DIMS_PACKED = {name: {"rows": 0, "heads": 1} for name in _TENSORS[:4]} | {"grad_lse": {"heads": 0, "rows": 1}}


def assert_matches(pools: Any, device: str, sharded: Sharded) -> None:
    call = sharded.call.with_random_gradients()
    found = pools(torch.Size(sharded.mesh).numel(), device).run(replace(sharded, call=call))
    gradients = tuple(name for name in call.inputs() if name not in sharded.local_copies)
    assert_within_bounds(call, gradients, {name: x.cpu() for name, x in found.items()})


def small_call(batch: int = 2, rows: int = 48, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
    return make_call(batch, rows, rows, heads_q=4, heads_kv=2, head_dim=16, dtype=dtype, **options)


@pytest.mark.parametrize("kind", OPTIONS)
def test_sequence(pools: Any, kind: str, dtype: torch.dtype, device: str) -> None:
    assert_matches(pools, device, Sharded(small_call(dtype=dtype, **OPTIONS[kind]), (2,), ("rows",)))


@pytest.mark.parametrize(
    "sides", [("rows",), ("rows", "heads"), ("batch", "rows"), ("rows", ""), ("", "rows")], ids=str
)
def test_four_ranks(pools: Any, sides: tuple[str, ...], device: str) -> None:
    """What is replicated has the sum of the gradients of all ranks that computed something else with it."""
    bias, sink = torch.randn(1, 4, 1, 48), torch.randn(4)
    call = small_call(causal=True, bias=bias, sink=sink, mask=torch.rand(2, 1, 48, 48) < 0.8)
    assert_matches(pools, device, Sharded(call, (4,) if len(sides) == 1 else (2, 2), sides))


@pytest.mark.parametrize("shape", [(1, 4, 48, 48), (2, 1, 48, 48), (2, 4, 1, 48), (1, 1, 48, 1)], ids=str)
def test_bias(pools: Any, shape: tuple[int, ...], device: str) -> None:
    """Replicated: a rank takes its rows, and the gradient is whole everywhere."""
    assert_matches(pools, device, Sharded(small_call(causal=True, bias=torch.randn(shape)), (2,), ("rows",)))


@pytest.mark.parametrize("sides", [("rows",), ("rows", "heads"), ("batch", "rows")], ids=str)
def test_bias_with_shards_of_rows(pools: Any, sides: tuple[str, ...], device: str) -> None:
    """It lies as q does, and nothing of it travels."""
    call = small_call(causal=True, bias=torch.randn(2, 4, 48, 48))
    task = _ShardedBias(call, (2,) if len(sides) == 1 else (2, 2), sides)
    assert_matches(pools, device, task)


class _ShardedBias(Sharded):
    def placements(self, name: str) -> tuple[Any, ...]:
        return super().placements("rows of bias" if name == "bias" else name)


@pytest.mark.parametrize("copies", [("k", "v"), ("q",)], ids=str)
def test_what_is_replicated_is_cut(pools: Any, copies: tuple[str, ...], device: str) -> None:
    call = small_call(causal=True)
    assert_matches(pools, device, Sharded(call, (2,), ("rows",), copies))


@pytest.mark.parametrize("local", [(), ("alibi_slopes",)], ids=str)
@pytest.mark.parametrize("sides", [("rows",), ("rows", "heads")], ids=str)
def test_alibi(pools: Any, sides: tuple[str, ...], local: tuple[str, ...], device: str) -> None:
    call = small_call(causal=True, alibi_slopes=torch.rand(4))
    assert_matches(pools, device, Sharded(call, (2,) if len(sides) == 1 else (2, 2), sides, (), local))


@pytest.mark.parametrize("heads", [1, 4])
def test_block_mask(pools: Any, heads: int, device: str) -> None:
    visible = torch.rand(1, heads, 128, 128) < 0.3
    visible &= (torch.rand(1, heads, 4, 4) < 0.5).repeat_interleave(32, 2).repeat_interleave(32, 3)
    call = small_call(rows=128, block_mask=flash_ext.BlockMask.from_dense(visible, (32, 32)))
    call = replace(call, block_visible=visible)
    assert_matches(pools, device, Sharded(call, (2,), ("rows",)))
    assert_matches(pools, device, Sharded(call, (2, 2), ("rows", "heads")))


@pytest.mark.parametrize("sides", [("rows",), ("heads", "rows")], ids=str)
@pytest.mark.parametrize("kind", ["causal", "window", "bias"])
def test_packed(pools: Any, kind: str, sides: tuple[str, ...], device: str) -> None:
    """Sequences of which some lie on both ranks, and some are empty."""
    options = {"bias": {"bias": torch.randn(5, 1, 30, 30)}, **OPTIONS}[kind]
    cu_seqlens = cumulative([5, 0, 30, 1, 12])
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=30, max_seqlen_k=30)
    call = make_call(
        seqlen_q=48, seqlen_k=48, heads_q=4, heads_kv=4, head_dim=16, dtype=torch.float32, **lengths, **options
    )
    assert_matches(pools, device, Sharded(call, (2,) if len(sides) == 1 else (2, 2), sides))


def test_one_tensor_of_lengths_stays_one(pools: Any, device: str) -> None:
    """Only then it is known that queries and keys have the same sequences, which this call depends on."""
    cu_seqlens = cumulative([5, 0, 30, 1, 12])
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=30, max_seqlen_k=30)
    call = make_call(
        seqlen_q=48, seqlen_k=48, heads_q=3, heads_kv=3, head_dim=16, causal=True, top_left=True, **lengths
    )
    assert_matches(pools, device, Sharded(call, (2,), ("rows",)))


# ---- By other functions ---------------------------------------------------------------------------------------------


def assert_close(found: Sequence[Any], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-4)


def by_sdpa(device: str) -> None:
    register_dtensor()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    plain = [*torch.randn(3, 2, 4, 16, 24, device=device), torch.randn(2, 1, 16, 16, device=device)]
    sharded = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in plain]
    plain = [x.requires_grad_() for x in plain]
    results: list[Any] = [flash_ext.scaled_dot_product_attention(*x[:3], attn_mask=x[3]) for x in (sharded, plain)]
    assert results[0].placements == (Shard(2),)
    assert_close(results[:1], results[1:])
    gradients = [torch.autograd.grad(o.square().sum(), x) for o, x in zip(results, (sharded, plain), strict=True)]
    assert_close(*gradients)
    results = [flash_ext.scaled_dot_product_attention(*x[:3], is_causal=True) for x in (sharded, plain)]
    assert_close(results[:1], results[1:])


def test_scaled_dot_product_attention(pools: Any, device: str) -> None:
    pools(2, device).run(by_sdpa)


def by_module(device: str) -> None:
    """Its parameters are replicated, and have the sum of the gradients."""
    register_dtensor()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = flash_ext.MultiheadAttention(32, 4, batch_first=True, device=device)
    sharded = copy.deepcopy(whole)
    distribute_module(sharded, mesh)
    x = torch.randn(2, 16, 32, device=device)
    results: list[Any] = []
    for model, given in ((sharded, distribute_tensor(x, mesh, [Shard(1)])), (whole, x)):
        mask = torch.ones(16, 16, dtype=torch.bool, device=device).triu(1)
        mask = distribute_tensor(mask, mesh, [Replicate()]) if model is sharded else mask
        out, _ = model(given, given, given, need_weights=False, attn_mask=mask)
        out.square().sum().backward()
        results.append(out)
    assert results[0].placements == (Shard(1),)
    assert_close(results[:1], results[1:])
    assert_close([p.grad for p in sharded.parameters()], [p.grad for p in whole.parameters()])  # type: ignore[misc]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own linear layers may refuse such DTensors")
def test_module(pools: Any, device: str) -> None:
    pools(2, device).run(by_module)


def compiled(device: str) -> None:
    register_dtensor()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    plain = torch.randn(3, 2, 16, 4, 16, device=device)
    sharded = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in plain]

    def twice(*x: Any) -> Any:
        return flash_ext.attention(*x, causal=True) * 2

    results = [function(*sharded) for function in (torch.compile(twice, backend="aot_eager"), twice)]
    gradients = [torch.autograd.grad(x.sum(), sharded) for x in results]
    assert_close(results[:1], [results[1].full_tensor()])
    assert_close(gradients[0], [x.full_tensor() for x in gradients[1]])


def test_compiled(pools: Any, device: str) -> None:
    pools(2, device).run(compiled)


# ---- Refusals -------------------------------------------------------------------------------------------------------


def refusal(make: Callable[[DeviceMesh], Any], shape: tuple[int, ...], device: str) -> str:
    """What a call on a mesh raises. (What pytest.raises raises would end a rank's process.)"""
    register_dtensor()
    try:
        make(init_device_mesh(device, shape))
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def attend(mesh: DeviceMesh, *places: Any, rows: int = 48, places_k: Any = None, **options: Any) -> Any:
    x = torch.ones(2, rows, 4, 16, device=mesh.device_type)
    k = distribute_tensor(x, mesh, places_k or places)
    return flash_ext.attention(distribute_tensor(x, mesh, places), k, k, **options)


def uneven(mesh: DeviceMesh) -> Any:
    return attend(mesh, Shard(1), rows=49)


def dropout(mesh: DeviceMesh) -> Any:
    return attend(mesh, Shard(1), dropout_p=0.5)


def max_logit(mesh: DeviceMesh) -> Any:
    return attend(mesh, Shard(1), return_max_logit=True)


def options_of_dropout(mesh: DeviceMesh, **options: Any) -> Any:
    rng_state = options.get("rng_state")
    if isinstance(rng_state, Tensor):
        options["rng_state"] = rng_state.to(mesh.device_type)
    return attend(mesh, Shard(1), **options)


def plain_bias(mesh: DeviceMesh) -> Any:
    return attend(mesh, Shard(1), bias=torch.zeros(1, 1, 1, 48, device=mesh.device_type, requires_grad=True))


def other_shards(mesh: DeviceMesh) -> Any:
    return attend(mesh, Shard(1), places_k=[Shard(3)])


def by_head_dim(mesh: DeviceMesh) -> Any:
    return attend(mesh, Shard(1), Shard(3))


def on_two_dimensions(mesh: DeviceMesh) -> Any:
    return attend(mesh, Shard(1), Shard(1))


def descending(mesh: DeviceMesh) -> Any:
    return attend(DeviceMesh(mesh.device_type, mesh.mesh.flip(0)), Shard(1))


def on_two_meshes(name: str, mesh: DeviceMesh) -> Any:
    """q, k and v along one dimension of a mesh, an option on the other."""
    both = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=("data", "sequence"))
    options: dict[str, Any] = {"sink": torch.zeros(4), "mask": torch.ones(2, 1, 48, 48, dtype=torch.bool)}
    options["block_mask"] = flash_ext.BlockMask.causal(48, 48, (24, 32))

    def on_the_other(x: Tensor) -> Any:
        return distribute_tensor(x.to(mesh.device_type), both["data"], [Replicate()])

    option = options[name]
    if name == "block_mask":
        names = ("offsets", "indices", "bitmap_ids", "bitmaps")
        option = replace(option, **{part: on_the_other(getattr(option, part)) for part in names})
    else:
        option = on_the_other(option)
    return attend(both["sequence"], Shard(1), **{name: option})


def plain_keys(mesh: DeviceMesh) -> Any:
    x = torch.ones(2, 48, 4, 16, device=mesh.device_type)
    return flash_ext.attention(distribute_tensor(x, mesh, [Shard(1)]), x, x)


REFUSED: list[tuple[Any, tuple[int, ...], str]] = [
    (uneven, (2,), "ValueError: q must have a number of rows that the 2 ranks divide"),
    (uneven, (2,), "got 49: pad the sequence, or redistribute() it by heads"),
    (
        dropout,
        (2,),
        "NotImplementedError: flash_ext: dropout_p of DTensors sharded along the sequence is not",
    ),
    (max_logit, (2,), "NotImplementedError: flash_ext: return_max_logit of DTensors sharded along the sequence is not"),
    (
        partial(options_of_dropout, dropout_p=-0.5),
        (2,),
        "RuntimeError: flash_ext: dropout_p must be in [0, 1], got -0.5",
    ),
    (
        partial(options_of_dropout, dropout_p=math.nan),
        (2,),
        "RuntimeError: flash_ext: dropout_p must be in [0, 1], got",
    ),
    (partial(options_of_dropout, rng_state=3), (2,), "TypeError: rng_state must be a Tensor or None, got int 3"),
    (partial(options_of_dropout, rng_state=torch.zeros(2, dtype=torch.int64)), (2,), "rng_state belongs to dropout"),
    (plain_bias, (2,), "TypeError: bias must be a DTensor, as q, k and v are, to have a gradient"),
    (other_shards, (2,), "NotImplementedError: flash_ext: k is a DTensor with placement"),
    (by_head_dim, (2, 2), "there it must be sharded by heads or batch entries"),
    (on_two_dimensions, (2, 2), "NotImplementedError: flash_ext: a sequence that dimensions [0, 1] of the mesh shard"),
    (descending, (2,), "NotImplementedError: flash_ext: a sequence on ranks [1, 0], which do not ascend"),
    (plain_keys, (2,), "TypeError: k must be a DTensor, as others are"),
    (partial(on_two_meshes, "sink"), (2, 2), "ValueError: sink must lie on the mesh of the others, "),
    (partial(on_two_meshes, "mask"), (2, 2), "distribute_tensor() its full_tensor() there"),
    (partial(on_two_meshes, "block_mask"), (2, 2), "ValueError: block_offsets must lie on the mesh of the others, "),
]


@pytest.mark.parametrize(("make", "shape", "text"), REFUSED)
def test_refused(pools: Any, make: Any, shape: tuple[int, ...], text: str, device: str) -> None:
    said = pools(torch.Size(shape).numel(), device).run(partial(refusal, make, shape))
    assert text in said


def with_a_parameter(device: str) -> None:
    """Every rank's own copy of a parameter can have no whole gradient, and need not while none is recorded."""
    register_dtensor()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    q, sink = torch.randn(2, 16, 4, 16, device=device), torch.nn.Parameter(torch.randn(4, device=device))
    x: Any = distribute_tensor(q, mesh, [Shard(1)])
    with torch.no_grad():
        found: Any = flash_ext.attention(x, x, x, sink=sink)
        expected: Any = flash_ext.attention(q, q, q, sink=sink)
    assert_close([found], [expected])


def test_a_parameter_without_gradient(pools: Any, device: str) -> None:
    pools(2, device).run(with_a_parameter)


def operator_on_shards(mesh: DeviceMesh) -> Any:
    x = distribute_tensor(torch.ones(2, 48, 4, 16, device=mesh.device_type), mesh, [Shard(1)])
    return torch.ops.flash_ext.attention_forward(x, x, x, 1.0)


def test_the_operator_refuses_shards_of_the_sequence(pools: Any, device: str) -> None:
    """It would have to gather them behind the caller's back."""
    said = pools(2, device).run(partial(refusal, operator_on_shards, (2,)))
    assert "q is a DTensor sharded along the sequence (dimension 1)" in said and "call flash_ext.attention()" in said
