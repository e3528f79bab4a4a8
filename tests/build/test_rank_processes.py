"""What tests/processes.py promises of the ranks that it starts."""

from __future__ import annotations

import atexit
import os
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import needs_gpus, run_processes


def abort_at_finalization(device: str, mesh: Any) -> None:
    atexit.register(os.abort)


def fail_on_the_last_rank(device: str, mesh: Any) -> None:
    if dist.get_rank() == 1:
        raise ValueError("the last rank's own words")


def test_a_rank_leaves_before_python_finalizes(device: str) -> None:
    """There the workers of a group that is still held somewhere would end the process in std::terminate."""
    needs_gpus(device)
    run_processes(device, abort_at_finalization)


def test_a_failed_rank_is_told(device: str) -> None:
    needs_gpus(device)
    with pytest.raises(Exception, match="the last rank's own words"):
        run_processes(device, fail_on_the_last_rank)
