"""Which files below a folder this process has open: other tests' threads may open files elsewhere at any time."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path


def open_files(folder: Path) -> set[str]:
    """Returns their names, as the system gives them, after closing what is no longer referenced."""
    gc.collect()
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in found if name.startswith(f"{folder}/")}
