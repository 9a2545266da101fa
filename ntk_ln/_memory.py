"""What fits in memory, asked before the work starts."""

import os
from pathlib import Path


def available() -> float:
    """Bytes that can be had without swapping; infinity where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def check(needed: float, call: str, way_out: str) -> None:
    """Raises where an array of so many bytes cannot be had."""
    there = available()
    if needed > there:
        raise MemoryError(f"`{call}` needs {needed / 1e9:.3g} GB, {there / 1e9:.3g} GB are free. {way_out}")
