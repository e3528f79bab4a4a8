# The compiled planner, csrc/plan/bindings.cpp, which documents itself.
from typing import Any

def __getattr__(name: str) -> Any: ...
