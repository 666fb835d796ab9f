"""One line about the machine, for the head of a table."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """Describes CPU model, cores in use, memory and system, as far as Linux tells."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_cpu_model()}, {cores} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
