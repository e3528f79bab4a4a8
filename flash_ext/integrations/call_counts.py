"""How many calls there were of each operator."""

from __future__ import annotations

import os
import threading
from collections import Counter

MOST_NAMES = 256
OTHERS = "others"


class CallCounts:
    """Counts by operator that miss no call, whatever threads the calls come from.

    Names behind the first ``MOST_NAMES`` count together, as ``OTHERS``: a name may hold numbers of a call.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)  # a thread that the child lacks may have held the old one

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may call an operator while a call is being counted

    def add(self, operator: str) -> None:
        with self._lock:
            known = operator in self._counts or len(self._counts) < MOST_NAMES
            self._counts[operator if known else OTHERS] += 1

    def read(self) -> Counter[str]:
        """A copy, of operators that were called."""
        with self._lock:
            return +self._counts

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()
