"""Keeps freed host memory in the process, so that the results of the next layer do not fault every page in again.

A prompt chunk of 2048 tokens allocates about 80 MB per layer. glibc returns such memory to the kernel when it is freed;
the next allocation gets it back, and the kernel has to zero it first. This took 0.3 of the 8 seconds of a prefill of
4096 tokens, in one thread while the others were idle.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt, from glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MOST_MAPPED = -1, -3, -4
LARGEST_KEPT = 32 << 20  # bytes; the largest threshold that glibc accepts


def keep_freed_memory() -> bool:
    """Makes glibc's allocator keep freed memory, for the whole process. Returns False for other allocators.

    Allocations above `LARGEST_KEPT` still go back to the kernel, such as those made while a model is loaded.
    """
    return _tell(_MMAP_THRESHOLD, LARGEST_KEPT) and _tell(_TRIM_THRESHOLD, 2**31 - 1)


def keep_all_freed_memory() -> bool:
    """Like `keep_freed_memory`, for any size: call it once only steps make large allocations, because steps repeat
        theirs.

    The result of a layer with 4096 tokens and 3072 outputs takes 50 MB; faulting in its pages took a tenth of the
    layer's time.
    """
    return _tell(_MOST_MAPPED, 0)


def give_back_freed_memory() -> bool:
    """Returns freed memory to the kernel, once; False for other allocators than glibc's."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False


def _tell(parameter: int, value: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(parameter, value))
