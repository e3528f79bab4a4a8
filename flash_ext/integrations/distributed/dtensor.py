"""How operators compute on ``DTensor`` (tensor parallelism): by batch entries, by heads, or all on each rank.

Of a sharded sequence no operator can compute: its ranks have to exchange keys. ``sequence_dtensors`` does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from flash_ext.argument_checks import allow_class
from flash_ext.functional import serve_class
from flash_ext.integrations.distributed import dtensor_plans
from flash_ext.integrations.distributed.placements import Side, dim_of, sides_of_operator
from flash_ext.integrations.distributed.sequence_dtensors import attend, is_sharded_sequence
from flash_ext.ops import ScoreOptions
from flash_ext.planning import ServedClass, explain_class
from flash_ext.torch_private import DTENSOR

_OPS = torch.ops.flash_ext
_Placements = list[Any]
_Strategy = tuple[_Placements, _Placements]  # of results, of arguments (None for what is no tensor)

_registered = False


def register_dtensor() -> None:
    """Lets ``flash_ext.attention`` and its backward take DTensors, without gathering those that are sharded by batch
    entries, by heads, or along the sequence. The last are computed by ``context_parallel_attention``, over the ranks of
    that dimension of the mesh; the options are those that it has, but for dropout.

    Raises:
        Nothing of its own.
    """
    global _registered
    if _registered:
        return
    register_sharding(_OPS.attention_forward_plain.default)(_forward)
    register_sharding(_OPS.attention_forward.default)(_forward)
    register_sharding(_OPS.attention_forward_max_logit.default)(_forward_max_logit)
    register_sharding(_OPS.attention_backward.default)(_backward)
    allow_class(DTENSOR)
    serve_class(is_sharded_sequence, attend)
    explain_class(ServedClass(dtensor_plans.is_dtensor, dtensor_plans.check_call, dtensor_plans.local_call))
    _registered = True


def _forward(q: Any, k: Any, v: Any, *rest: Any) -> Sequence[_Strategy]:
    return _strategies(q, k, v, rest, with_max_logit=False)


def _forward_max_logit(q: Any, k: Any, v: Any, *rest: Any) -> Sequence[_Strategy]:
    return _strategies(q, k, v, rest, with_max_logit=True)


def _strategies(q: Any, k: Any, v: Any, rest: tuple[Any, ...], with_max_logit: bool) -> Sequence[_Strategy]:
    options = ScoreOptions(*rest[: len(ScoreOptions._fields)])
    _refuse_shards_of_sequence(0 if options.cu_seqlens_q is not None else 1, q=q, k=k, v=v)
    everywhere = [Replicate()] * (2 + with_max_logit), [Replicate()] * 3 + _all(rest)
    strategies: list[_Strategy] = [everywhere]
    packed = options.cu_seqlens_q is not None
    for side in _sides(q, k, v, options):
        rows, lse = _dims_of(side, packed)
        max_logit = [Shard(0 if side == "batch" else 1)] * with_max_logit
        results = [Shard(rows), Shard(lse), *max_logit]
        strategies.append((results, [Shard(rows)] * 3 + _sharded(rest, options, side)))
    return strategies


def _backward(
    grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any
) -> Sequence[_Strategy]:
    flags, given = rest[:6], rest[6:]  # deterministic, and which gradients are needed
    options, needed = ScoreOptions(*given), flags[1:]
    packed = options.cu_seqlens_q is not None
    tensors = (grad_out, grad_lse, q, k, v, out, lse)
    nones = [None] * len(flags)
    everywhere = [Replicate()] * 5, [*_all(tensors), *nones, *_all(given)]
    strategies: list[_Strategy] = [everywhere]
    for side in _sides(q, k, v, options):
        rows, of_lse = (Shard(dim) for dim in _dims_of(side, packed))
        places = (rows, of_lse, rows, rows, rows, rows, of_lse)
        arguments = [None if t is None else place for t, place in zip(tensors, places, strict=True)]
        gradients = [rows, rows, rows, _of_option("bias", options, side), _of_option("sink", options, side)]
        # What is not needed comes back empty.
        results = [place if need else Replicate() for place, need in zip(gradients, needed, strict=True)]
        strategies.append((results, [*arguments, *nones, *_sharded(given, options, side)]))
    return strategies


def _refuse_shards_of_sequence(rows: int, **tensors: Any) -> None:
    """Gathering them would take the memory that they save, and nobody would see it."""
    for name, x in tensors.items():
        if any(place.is_shard(rows) and x.mesh.size(dim) > 1 for dim, place in enumerate(x.placements)):
            raise NotImplementedError(
                f"flash_ext: {name} is a DTensor sharded along the sequence (dimension {rows}), which this operator "
                "cannot compute on: call flash_ext.attention()"
            )


def _sides(q: Any, k: Any, v: Any, options: ScoreOptions) -> list[Side]:
    given = zip(ScoreOptions._fields, options, strict=True)
    tensors = {"q": q, "k": k, "v": v, **{name: x for name, x in given if _is_tensor(x)}}
    return sides_of_operator(q.mesh.shape, tensors, options.cu_seqlens_q is not None, options.dropout_p > 0)


def _dims_of(side: Side, packed: bool) -> tuple[int, int]:
    """(of q, k, v and out; of lse)."""
    if side == "batch":
        return 0, 0
    return (1, 0) if packed else (2, 1)


def _all(values: Sequence[Any]) -> list[Any]:
    """Everything on each rank."""
    return [Replicate() if _is_tensor(value) else None for value in values]


def _sharded(values: Sequence[Any], options: ScoreOptions, side: Side) -> list[Any]:
    names = [*ScoreOptions._fields, "deterministic"]
    places: list[Any] = []
    for name, value in zip(names, values, strict=False):
        if not _is_tensor(value):
            places.append(None)
            continue
        dim = dim_of(name, value, side)
        places.append(Replicate() if dim is None else Shard(dim))
    return places


def _of_option(name: str, options: ScoreOptions, side: Side) -> Any:
    """The gradient of a bias or sink: of one that all share, each rank has a part."""
    value = getattr(options, name)
    if value is None:
        return Replicate()
    dim = dim_of(name, value, side)
    return Partial() if dim is None else Shard(dim)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "placements")
