"""torch.fx: modules of this library stand in a graph as one node, as those of ``torch.nn`` do that they replace."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError


def proxy_of_call(module: nn.Module, *args: Any) -> Any:
    """The node of a call of ``module``, or None where no argument comes from a tracer.

    torch.fx decides by the name of a class's package whether it traces into a module, so it traces into ours.

    Raises:
        torch.fx.proxy.TraceError: ``module`` is the root of the trace, and so no node of it.
    """
    traced = next((x for x in args if isinstance(x, Proxy)), None)
    if traced is None:
        return None
    tracer: Any = traced.tracer
    path = tracer.path_of_module(module)
    if not path:
        name = type(module).__name__
        raise TraceError(f"flash_ext.{name} is one node of a graph and cannot be traced itself, only inside a model")
    return tracer.create_proxy("call_module", path, args, {})
