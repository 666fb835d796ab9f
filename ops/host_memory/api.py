"""Keeps freed host memory in the process, so that the next layer's results do not fault every page in anew.

A prompt chunk of 2048 tokens allocates some 80 MB per layer. glibc gives such memory back to the kernel when it is
freed and asks for it again, which has to zero it: 0.3 of 8 seconds of a prefill of 4096 tokens were spent there, in one
thread while the others waited.
"""

from __future__ import annotations

import ctypes

# mallopt's parameters, from glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MOST_MAPPED = -1, -3, -4
LARGEST_KEPT = 32 << 20  # bytes; the largest threshold that glibc takes


def keep_freed_memory() -> bool:
    """Tells the allocator so, for the whole process. False where it is not glibc's, which then decides alone.

    Allocations of more than `LARGEST_KEPT` still come and go: those of a model that is being loaded.
    """
    return _tell(_MMAP_THRESHOLD, LARGEST_KEPT) and _tell(_TRIM_THRESHOLD, 2**31 - 1)


def keep_all_freed_memory() -> bool:
    """The same whatever the size: for when only steps allocate much, which do so again and again.

    The result of a layer of 4096 tokens and 3072 outputs is 50 MB, whose pages took a tenth of the layer's time.
    """
    return _tell(_MOST_MAPPED, 0)


def _tell(parameter: int, value: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(parameter, value))
