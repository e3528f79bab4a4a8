"""``attention`` of DTensors sharded along the sequence: context parallelism over that dimension of the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from flash_ext.argument_checks import as_flag, as_number, describe
from flash_ext.functional import SCORE_OPTIONS, check_type_of_block_mask
from flash_ext.integrations.distributed import context_parallel_attention, prepare
from flash_ext.integrations.distributed.checks import stand_in
from flash_ext.integrations.distributed.dtensor_checks import check_mesh, check_whole
from flash_ext.integrations.distributed.placements import Side, change_tensors, dim_of

_WAY_OUT = "redistribute() it by heads, or by batch entries"


def is_sharded_sequence(q: Any, k: Any, v: Any, packed: bool) -> bool:
    rows = 0 if packed else 1
    return any(isinstance(x, DTensor) and _mesh_dims_of(x, rows) for x in (q, k, v))


@torch.compiler.disable
def attend(attention: Callable[..., Any], q: Any, k: Any, v: Any, **options: Any) -> Any:
    """``attention``, by ``context_parallel_attention`` of what each rank has.

    Args:
        q, k, v: DTensors of one mesh, sharded along the sequence on one dimension of it; on others by heads, batch
            entries or not at all, all three alike. One that is replicated where another is sharded is cut first.
        options: those of ``attention``. DTensors of the same mesh, with any placements, or plain tensors of which every
            rank has a copy. Biases and masks with rows of queries are cut like q.

    Returns:
        out, sharded as q, k and v are, or (out, lse).

    Raises:
        NotImplementedError: dropout, max_logit, shards of two dimensions of the mesh, shards of something else.
        ValueError: a sequence or heads that do not divide, or a DTensor on another mesh.
        TypeError: one of q, k and v is no DTensor, or a plain option requires a gradient.
    """
    return_lse = as_flag("return_lse", options.pop("return_lse"))
    _refuse_max_logit(options.pop("return_max_logit"))
    _refuse_dropout(options)
    shards = _Shards.of(q, k, v, packed=options["cu_seqlens_q"] is not None)
    check_whole(q, k, v, options)
    local = [shards.local(x, shards.placements, shards.placements) for x in (q, k, v)]
    given = shards.local_options(options, shards.local)
    out, lse = context_parallel_attention(*local, shards.group(), return_lse=True, **given)
    of_out = shards.whole(out, (*q.shape[:-1], v.shape[-1]), shards.placements)
    if not return_lse:
        return of_out
    return of_out, shards.whole(lse, _shape_of_lse(q.shape), shards.placements_of_lse())


def method_of_call(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[str, int]:
    """(the method by which ``attend`` would compute, the number of ranks). Raises what it would raise; nothing
    travels."""
    _refuse_max_logit(options.get("return_max_logit", False))
    _refuse_dropout(options)
    shards = _Shards.of(q, k, v, packed=options.get("cu_seqlens_q") is not None)
    check_whole(q, k, v, options)
    options = {name: value for name, value in options.items() if name in SCORE_OPTIONS}
    q, k, v = (shards.stand_in(x, shards.placements, shards.placements) for x in (q, k, v))
    given = shards.local_options(options, shards.stand_in)
    return prepare(q, k, v, shards.group(), "contiguous", "auto", given).method, shards.mesh.size(shards.along)


def _refuse_dropout(options: dict[str, Any]) -> None:
    if as_number("dropout_p", options.get("dropout_p", 0.0)) > 0:
        raise NotImplementedError(
            "flash_ext: dropout_p of DTensors sharded along the sequence is not supported, because ranks would draw "
            "other random bits than one GPU: pass to_local() of q, k and v to context_parallel_attention()"
        )


def _refuse_max_logit(flag: Any) -> None:
    if as_flag("return_max_logit", flag):
        raise NotImplementedError(
            "flash_ext: return_max_logit of DTensors sharded along the sequence is not supported: " + _WAY_OUT
        )


def _mesh_dims_of(x: DTensor, rows: int) -> list[int]:
    """The dimensions of the mesh that shard the sequence."""
    mesh = x.device_mesh
    return [dim for dim, place in enumerate(x.placements) if place.is_shard(rows) and mesh.size(dim) > 1]


def _shape_of_lse(q: torch.Size) -> tuple[int, ...]:
    *batch, rows, heads, _ = q
    return (*batch, heads, rows)


@dataclass(frozen=True)
class _Shards:
    """How q, k, v and out lie on the mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    along: int  # the dimension of the mesh that shards the sequence
    packed: bool

    @staticmethod
    def of(q: Any, k: Any, v: Any, packed: bool) -> _Shards:
        tensors = {"q": q, "k": k, "v": v}
        mesh = next(x.device_mesh for x in tensors.values() if isinstance(x, DTensor))
        rows = 0 if packed else 1
        for name, x in tensors.items():
            _check_dtensor(name, x, mesh, dims=rows + 3)
        along = sorted({dim for x in tensors.values() for dim in _mesh_dims_of(x, rows)})
        if len(along) > 1:
            raise NotImplementedError(
                f"flash_ext: a sequence that dimensions {along} of the mesh shard is not supported: shard it along one "
                "of them, or make one of them all (init_device_mesh)"
            )
        placements = tuple(_common_placement(tensors, dim, along[0], rows) for dim in range(mesh.ndim))
        shards = _Shards(mesh, placements, along[0], packed)
        shards.check_sizes(tensors)
        shards.check_order()
        return shards

    def sides(self) -> list[Side | None]:
        """What each dimension of the mesh shards."""
        names: list[Side] = ["rows", "heads"] if self.packed else ["batch", "rows", "heads"]
        return [names[place.dim] if isinstance(place, Shard) else None for place in self.placements]

    def check_sizes(self, tensors: dict[str, Any]) -> None:
        size, rows = self.mesh.size(self.along), 0 if self.packed else 1
        of_heads = math.prod(self.mesh.size(dim) for dim, side in enumerate(self.sides()) if side == "heads")
        for name, x in tensors.items():
            if x.shape[rows] % size:
                raise ValueError(
                    f"{name} must have a number of rows that the {size} ranks divide along which the sequence is "
                    f"sharded, got {x.shape[rows]}: pad the sequence, or {_WAY_OUT}"
                )
            if x.shape[rows + 1] % of_heads:
                raise ValueError(
                    f"{name} must have a number of heads that the {of_heads} ranks divide along which they are "
                    f"sharded, got {x.shape[rows + 1]}"
                )

    def check_order(self) -> None:
        """A process group sorts its ranks."""
        own = self.mesh.get_coordinate()
        if own is None:
            raise ValueError("q must lie on a mesh that this process belongs to")
        place = tuple(slice(None) if dim == self.along else at for dim, at in enumerate(own))
        ranks = self.mesh.mesh[place].tolist()
        if ranks != sorted(ranks):
            raise NotImplementedError(
                f"flash_ext: a sequence on ranks {ranks}, which do not ascend, is not supported: make a mesh of them "
                "in order"
            )

    def group(self) -> Any:
        return self.mesh.get_group(self.along)

    # ---- From the whole to the rank's own, and back

    def local(self, x: Any, placements: Sequence[Placement], gradients: Sequence[Placement]) -> Tensor:
        """``redistribute`` stands there for the gradient too: it brings it back to where x has its own."""
        own: Tensor = x.redistribute(placements=placements).to_local(grad_placements=gradients)
        return own

    def stand_in(self, x: Any, placements: Sequence[Placement], gradients: Sequence[Placement]) -> Tensor:
        """In place of ``local``, to be checked: nothing travels."""
        if all(place.is_replicate() for place in (*x.placements, *placements)):
            own: Tensor = x.to_local()
            return own
        shape = list(x.shape)
        for dim, place in enumerate(placements):
            if isinstance(place, Shard):
                shape[place.dim] //= self.mesh.size(dim)
        return stand_in(x.to_local(), shape)

    def whole(self, x: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def placements_of_lse(self) -> list[Placement]:
        """Its heads come before its rows."""
        dims = (1, 0) if self.packed else (0, 2, 1)
        return [Shard(dims[place.dim]) if isinstance(place, Shard) else place for place in self.placements]

    # ---- Options

    def local_options(self, options: dict[str, Any], local: Callable[..., Tensor]) -> dict[str, Any]:
        """``local``: the method of that name, or ``stand_in``."""
        if options.get("block_mask") is not None:
            check_type_of_block_mask(options["block_mask"])
        return change_tensors(options, lambda name, x: self.local_option(name, x, local))

    def local_option(self, name: str, x: Tensor, local: Callable[..., Tensor]) -> Tensor:
        """What all ranks share has the sum of their gradients."""
        placements: list[Placement] = []
        gradients: list[Placement] = []
        for side in self.sides():
            dim = None if side is None or (side == "rows" and self.packed) else dim_of(name, x, side)
            placements.append(Replicate() if dim is None else Shard(dim))
            gradients.append(Partial() if dim is None and side is not None else placements[-1])
        if isinstance(x, DTensor):
            check_mesh(name, x, self.mesh)
        else:
            if torch.is_grad_enabled() and x.requires_grad:
                raise TypeError(f"{name} must be a DTensor, as q, k and v are, to have a gradient: distribute_tensor()")
            if all(place == Replicate() for place in placements):
                return x
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return local(x, placements, gradients)


def _check_dtensor(name: str, x: Any, mesh: DeviceMesh, dims: int) -> None:
    if not isinstance(x, DTensor):
        raise TypeError(f"{name} must be a DTensor, as others are: see distribute_tensor(). Got {describe(x)}")
    check_mesh(name, x, mesh)
    if x.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(x.shape)}")


def _common_placement(tensors: dict[str, Any], dim: int, along: int, rows: int) -> Placement:
    """Of q, k and v on a dimension of the mesh. What is not sharded there can be cut without others."""
    if tensors["q"].device_mesh.size(dim) == 1:
        return Replicate()
    sharded = {name: x.placements[dim] for name, x in tensors.items() if x.placements[dim].is_shard()}
    first = Shard(rows) if dim == along else next(iter(sharded.values()), Replicate())
    for name, x in tensors.items():
        place = x.placements[dim]
        whole = place.is_replicate() or place.is_partial()
        # A strided shard has other rows, and yet compares equal to a Shard.
        if not whole and (type(place) is not Shard or place != first or place.dim > rows + 1):
            raise NotImplementedError(
                f"flash_ext: {name} is a DTensor with placement {place} on dimension {dim} of the mesh, beside a "
                f"sequence sharded along dimension {along}; there it must be {_allowed(first, rows)}, as q, k and v "
                "alike: redistribute() it"
            )
    return first


def _allowed(first: Placement, rows: int) -> str:
    if isinstance(first, Shard) and first.dim <= rows + 1:
        return f"{first}"
    return "sharded by heads or batch entries"
