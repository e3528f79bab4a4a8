"""Which dimension of an option of ``attention`` is that of batch entries, of heads, or of rows of queries."""

from __future__ import annotations

from typing import Any, Literal

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
