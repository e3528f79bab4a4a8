"""Other programs that are asked."""

from __future__ import annotations

import subprocess


def output_of(*command: str) -> str | None:
    """What a program prints, or None where there is no such program or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
