"""What ``supports`` and ``explain`` say of DTensors. Nothing is transferred: one rank may ask alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from flash_ext.argument_checks import as_number, describe
from flash_ext.integrations.distributed import sequence_dtensors
from flash_ext.integrations.distributed.dtensor_checks import check_mesh, check_whole
from flash_ext.integrations.distributed.placements import Side, change_tensors, dim_of, sides_of_operator
from flash_ext.integrations.distributed.sequence_dtensors import is_sharded_sequence


def is_dtensor(q: Any, k: Any, v: Any) -> bool:
    return any(isinstance(x, DTensor) for x in (q, k, v))


def check_call(q: Any, k: Any, v: Any, operation: str, options: dict[str, Any]) -> None:
    """Raises what the call of ``supports`` would raise, on all ranks the same."""
    _check_operation(operation)
    if _is_sequence(q, k, v, options):
        sequence_dtensors.method_of_call(q, k, v, options)
        return
    _check_tensors(q, k, v, options)
    check_whole(q, k, v, options)


def local_call(
    q: Any, k: Any, v: Any, operation: str, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """The call on plain tensors that this rank makes.

    Raises:
        NotImplementedError: no such function has DTensors, the call would redistribute them first, or it is several.
        ValueError, TypeError: as for the call.
    """
    _check_operation(operation)
    if _is_sequence(q, k, v, options):
        method, ranks = sequence_dtensors.method_of_call(q, k, v, options)
        raise NotImplementedError(
            "flash_ext: a call on DTensors sharded along the sequence is several, which explain() does not show: "
            f"context_parallel_attention() over {ranks} ranks with method {method!r} makes them. explain() of "
            "to_local() of q, k and v shows the one over a rank's own keys"
        )
    _check_tensors(q, k, v, options)
    tensors = {"q": q, "k": k, "v": v}
    change_tensors(options, lambda name, x: tensors.setdefault(name, x))
    sides = _sides(tensors, options)

    def local(name: str, x: Any) -> Tensor:
        own: Tensor = x.detach().redistribute(placements=_placements(name, x, sides)).to_local()
        return own

    own_q, own_k, own_v = (local(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    return own_q, own_k, own_v, change_tensors(options, local)


def _is_sequence(q: Any, k: Any, v: Any, options: dict[str, Any]) -> bool:
    return is_sharded_sequence(q, k, v, options.get("cu_seqlens_q") is not None)


def _drops(options: dict[str, Any]) -> bool:
    return as_number("dropout_p", options.get("dropout_p", 0.0)) > 0


def _check_operation(operation: str) -> None:
    if operation not in ("forward", "backward"):
        function = "decode" if operation == "decode" else "attention_weights"
        raise NotImplementedError(f"flash_ext: {function}() does not take DTensors: pass to_local() of them")


def _check_tensors(q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """All are DTensors of one mesh: torch mixes them with nothing else."""
    mesh = next(x.device_mesh for x in (q, k, v) if isinstance(x, DTensor))

    def check(name: str, x: Any) -> Any:
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} must be a DTensor, as others are: see distribute_tensor(). Got {describe(x)}")
        check_mesh(name, x, mesh)
        return x

    for name, x in (("q", q), ("k", k), ("v", v)):
        check(name, x)
    change_tensors(options, check)
    if _drops(options) and options.get("rng_state") is None:
        raise TypeError("rng_state must be a DTensor, as q, k and v are: distribute_tensor() that of draw_rng_state()")


# ---- What a dimension of the mesh shards ----------------------------------------------------------------------------


def _sides(tensors: dict[str, Any], options: dict[str, Any]) -> list[Side | None]:
    """What each dimension of the mesh shards the call by: torch takes the first way for which nothing travels."""
    mesh, packed = tensors["q"].device_mesh, options.get("cu_seqlens_q") is not None
    sharded = sides_of_operator(mesh.shape, tensors, packed, _drops(options))
    found = []
    for dim in range(mesh.ndim):
        ways: list[Side | None] = [None, *sharded]
        free = [side for side in ways if all(_is_free(name, x, dim, side, packed) for name, x in tensors.items())]
        if not free:
            places = ", ".join(f"{name} {x.placements}" for name, x in tensors.items())
            alike = f"redistribute() all of them alike, by {' or '.join(sharded)}, or " if sharded else ""
            raise NotImplementedError(
                "flash_ext: explain() does not show a call for which torch redistributes DTensors first: "
                f"{alike}pass full_tensor(). Got {places}"
            )
        found.append(free[0])
    return found


def _is_free(name: str, x: Any, dim: int, side: Side | None, packed: bool) -> bool:
    """Torch takes no shards of which some rank would have nothing."""
    size, place, target = x.device_mesh.size(dim), x.placements[dim], _place(name, x, side, packed)
    if isinstance(target, Shard) and x.shape[target.dim] < size:
        return False
    return bool(size == 1 or place.is_replicate() or place == target)


def _place(name: str, x: Any, side: Side | None, packed: bool) -> Placement:
    if side is None:
        return Replicate()
    if name in ("q", "k", "v"):
        return Shard({"batch": 0, "heads": 1 if packed else 2}[side])
    dim = dim_of(name, x, side)
    return Replicate() if dim is None else Shard(dim)


def _placements(name: str, x: Any, sides: Sequence[Side | None]) -> list[Placement]:
    packed = name in ("q", "k", "v") and x.dim() == 3
    return [_place(name, x, side, packed) for side in sides]
