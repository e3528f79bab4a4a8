"""What ``attention`` would refuse of whole DTensors is refused on all ranks alike, before anything travels: shards of
what does not fit may fit on one rank, whose call would then wait for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flash_ext.eager import call
from flash_ext.functional import SCORE_OPTIONS, checked_score_options
from flash_ext.integrations.distributed.checks import stand_in
from flash_ext.integrations.distributed.placements import change_tensors

_CHECK = torch.ops.flash_ext.attention_check.default


def check_whole(q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """The operator's own checks. Of lengths and indices it sees the values where a rank has all of them."""
    of_scores = {name: value for name, value in options.items() if name in SCORE_OPTIONS}
    given = change_tensors(of_scores, lambda _, x: _whole_stand_in(x))
    with torch.no_grad():
        q, k, v = (_whole_stand_in(x) for x in (q, k, v))
        call(_CHECK, q, k, v, *checked_score_options(q, k, **given))


def _whole_stand_in(x: Any) -> Tensor:
    """A tensor of the whole shape: the rank's own where it has all, as of a plain tensor."""
    if not isinstance(x, DTensor):
        plain: Tensor = x
        return plain
    own: Tensor = x.to_local()
    return own if all(place.is_replicate() for place in x.placements) else stand_in(own, x.shape)


def check_mesh(name: str, x: DTensor, mesh: DeviceMesh) -> None:
    """From another mesh a gradient would be brought back to ranks that have other parts of it."""
    if x.device_mesh != mesh:
        raise ValueError(
            f"{name} must lie on the mesh of the others, {mesh}, got {x.device_mesh}: distribute_tensor() its "
            "full_tensor() there"
        )
