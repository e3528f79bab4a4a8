"""How many calls of torch's operators this library computed, as ``doctor`` and ``run --report`` say it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import flash_ext
from flash_ext.integrations import sdpa_provider
from flash_ext.integrations.call_counts import MOST_NAMES, OTHERS, CallCounts
from tests.integration.test_sdpa_provider import CPU_FLASH


class SlowName(str):
    """As a key of a dict it lets other threads run between what reads a value and what writes one."""

    def __hash__(self) -> int:
        time.sleep(1e-5)
        return super().__hash__()


def test_no_call_of_several_threads_is_missed() -> None:
    count, operator = 50, SlowName(CPU_FLASH)
    with flash_ext.activated():
        sdpa_provider.forget_calls()
        serving = sdpa_provider._with_torchs(operator, "CPU", lambda: "served")
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda _: serving(), range(count))) == {"served"}
        assert sdpa_provider.calls_served() == {CPU_FLASH: count}
        sdpa_provider.forget_calls()
        assert not sdpa_provider.calls_served()


def test_names_do_not_grow_without_bound() -> None:
    """A reason may hold numbers of a call, which may differ in each."""
    counts = CallCounts()
    for n in range(MOST_NAMES + 7):
        counts.add(f"operator (got {n})")
    counts.add("operator (got 3)")
    found = counts.read()
    assert len(found) == MOST_NAMES + 1 and found[OTHERS] == 7 and found["operator (got 3)"] == 2
