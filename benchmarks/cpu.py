"""``python -m benchmarks.cpu``: forward and backward on a CPU beside torch's own.

The same as ``python -m benchmarks training --device cpu --peers sdpa``, whose arguments it takes.
"""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

PRESET = ("training", "--device", "cpu", "--peers", "sdpa")

if __name__ == "__main__":
    sys.exit(main(preset=PRESET, module="benchmarks.cpu"))
