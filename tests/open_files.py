"""What this process has open: threads that other tests left behind may close files of theirs at any time."""

from __future__ import annotations

import contextlib
import gc
import os


def open_files() -> set[str]:
    """Files, pipes and sockets, each by the name that the system gives it; what nobody refers to is closed before.

    A test compares by `open_files() - before`: what was opened and not closed.
    """
    gc.collect()
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found
