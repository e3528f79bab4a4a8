"""What a call of ``attention`` can be sharded by, and by which dimension of each option."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from flash_ext.masks import BlockMask

Side = Literal["batch", "heads", "rows"]
"""What q, k and v are sharded by."""

# Of each option that is a tensor: its dimensions of batch and of heads, where it has them.
_DIMS: dict[str, tuple[int | None, int | None]] = {
    "bias": (0, 1),
    "mask": (0, 1),
    "sink": (None, 0),
    "seqused_q": (0, None),
    "seqused_k": (0, None),
    "block_offsets": (0, 1),
}


def dim_of(name: str, value: Any, side: Side) -> int | None:
    """None: all ranks share it."""
    if name == "alibi_slopes":
        dim = {"heads": value.dim() - 1, "batch": 0 if value.dim() == 2 else None, "rows": None}[side]
    elif side == "rows":
        dim = 2 if name in ("bias", "mask") else None
    else:
        dim = _DIMS.get(name, (None, None))[side == "heads"]
    return None if dim is None or value.shape[dim] == 1 else dim


def sides_of_operator(mesh: Sequence[int], tensors: Mapping[str, Any], packed: bool, dropout: bool) -> list[Side]:
    """By what the operator can be sharded, given the shape of the mesh, and q, k, v and those options that are tensors,
    or what stands for them. Dropout counts batch entries and heads from the start of what it is given. Tensors that do
    not fit together come whole to the operator, which says so on every rank."""
    q, k, v = (tuple(tensors[name].shape) for name in ("q", "k", "v"))
    if dropout or "alibi_slopes" in tensors or k[:-1] != v[:-1] or not (packed or q[0] == k[0]):
        return []
    found: list[Side] = [] if packed else ["batch"]
    if all(shape[-2] % max(mesh) == 0 for shape in (q, k)):
        found.append("heads")
    sizes = {"batch": q[0], "heads": q[-2]}
    options = [(name, x) for name, x in tensors.items() if name not in ("q", "k", "v")]
    return [side for side in found if all(_has_size(name, x, side, sizes[side]) for name, x in options)]


def _has_size(name: str, x: Any, side: Side, size: int) -> bool:
    dim = dim_of(name, x, side)
    return dim is None or bool(x.shape[dim] == size)


def change_tensors(options: dict[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The options with ``change(name, tensor)`` in place of each tensor, also of those of a block mask. One tensor
    stays one: that two options are the same has a meaning."""
    changed: dict[int, Any] = {}

    def once(name: str, x: Any) -> Any:
        if id(x) not in changed:
            changed[id(x)] = change(name, x)
        return changed[id(x)]

    found = {name: once(name, x) if isinstance(x, Tensor) else x for name, x in options.items()}
    mask = options.get("block_mask")
    if isinstance(mask, BlockMask):
        parts = ("offsets", "indices", "bitmap_ids", "bitmaps")
        own: dict[str, Any] = {part: once(f"block_{part}", getattr(mask, part)) for part in parts}
        found["block_mask"] = replace(mask, **own)
    return found
