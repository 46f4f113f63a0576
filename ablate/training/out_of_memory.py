"""Signs that a process ended because memory was out."""

from collections.abc import Iterable
from pathlib import Path

_SIGNS = ("out of memory", "outofmemory", "memoryerror", "allocate memory")


def kernel_kills() -> int:
    """Return the number of processes that Linux has killed since boot for lack of memory; 0 if not known."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def sign(lines: Iterable[str]) -> str | None:
    """Return the last line that names a lack of memory, as torch, CUDA and Python do; None if none does."""
    return next((line for line in reversed(list(lines)) if any(s in line.lower() for s in _SIGNS)), None)
