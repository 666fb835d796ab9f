"""Large zeroed host memory that is there at once: the kernel provides its pages when they are used, or in idle time."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable

import torch

_POPULATE_WRITE = 23  # of madvise, Linux 5.14: pages as if they had been written, values as they are
_PIECE = 4 << 20  # bytes provided per call, so that the thread ends soon after the memory is no longer wanted
_LOWEST_PRIORITY = 19
_PAUSE_SECONDS = 0.05


def zeroed_pages(size: int, may_provide: Callable[[], bool] = lambda: True) -> torch.Tensor:
    """Zeros, int8 [size], whose pages a thread of lowest priority provides while nothing else is to be done.

    Why: writing zeros to a KV cache of 4 GiB took 4 to 10 of the 23 seconds of a start, and most of such a cache is not
    used soon. A page that is written before the thread came to it costs a page fault then.

    may_provide: asked before every piece. Lowest priority alone is not enough where every core has a thread that
        computes: one that waits for the others waits for the kernel's zeros, and decode steps of 17 ms took 27.
    """
    if size == 0:
        return torch.zeros(0, dtype=torch.int8)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a decode reads runs of some hundred KB: 51 GB/s in place of 32 of two threads of a Zen 5
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    zeros = torch.frombuffer(pages, dtype=torch.int8)
    arguments = (weakref.ref(pages), zeros.data_ptr(), size, may_provide)
    threading.Thread(target=_provide, args=arguments, name="ucm-pages", daemon=True).start()
    return zeros


def _provide(pages: weakref.ref[mmap.mmap], address: int, size: int, may_provide: Callable[[], bool]) -> None:
    """Until all pages are there, nobody holds the memory any more, or the kernel refuses: then uses provide them."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    # unlike mmap's own method this lets other threads run meanwhile
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, size, _PIECE):
        while not may_provide():
            time.sleep(_PAUSE_SECONDS)
            if pages() is None:
                return
        held = pages()
        if held is None or madvise(address + start, min(_PIECE, size - start), _POPULATE_WRITE):
            return
        del held
