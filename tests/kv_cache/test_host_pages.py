"""Zeroed memory whose pages come when they are used or in idle time, and go with the last tensor."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch

from vllm_gaudi_ucm.kv_cache import allocation
from vllm_gaudi_ucm.kv_cache.allocation import zeroed_pages

SIZE = 64 << 20


def resident() -> int:
    """Bytes of the process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "ucm-pages":
            thread.join(timeout=20)


def test_zeros_that_can_be_written() -> None:
    zeros = zeroed_pages(SIZE + 4)
    assert (zeros.dtype, zeros.shape) == (torch.int8, (SIZE + 4,))
    values = zeros.view(torch.float32)
    values[7] = 3.0
    wait_for_threads()
    assert values[7] == 3.0, "pages that are provided later must keep what was written"
    assert int(torch.count_nonzero(values)) == 1


def test_pages_come_in_idle_time_and_go_with_the_last_view() -> None:
    wait_for_threads()
    before = resident()
    view = zeroed_pages(SIZE)[1 << 20 :]
    wait_for_threads()
    assert resident() - before > 0.9 * SIZE
    del view
    gc.collect()
    assert resident() - before < 0.1 * SIZE


def test_nothing_is_provided_while_it_may_not_be() -> None:
    """An engine that computes: its pages come when they are written; and the thread ends with the memory."""
    wait_for_threads()
    before, allowed = resident(), threading.Event()
    zeros = zeroed_pages(SIZE, allowed.is_set)
    time.sleep(0.2)
    assert resident() - before < 0.1 * SIZE
    zeros[: SIZE // 4] = 1
    assert resident() - before > 0.2 * SIZE
    allowed.set()
    wait_for_threads()
    assert resident() - before > 0.9 * SIZE
    refused = zeroed_pages(4 << 30, lambda: False)
    del refused
    gc.collect()
    wait_for_threads()
    assert "ucm-pages" not in {thread.name for thread in threading.enumerate()}


def test_a_kernel_that_provides_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 5.14: they come when they are used."""
    monkeypatch.setattr(allocation, "_POPULATE_WRITE", 12345)
    before = resident()
    zeros = zeroed_pages(SIZE)
    wait_for_threads()
    assert resident() - before < 0.1 * SIZE
    zeros[: SIZE // 2] = 1
    assert resident() - before > 0.4 * SIZE


def test_memory_that_is_dropped_at_once_is_given_back() -> None:
    """A worker may end while pages are still being provided."""
    before, start = resident(), time.monotonic()
    zeroed_pages(4 << 30)
    gc.collect()
    wait_for_threads()
    assert resident() - before < SIZE
    assert time.monotonic() - start < 10


def test_nothing() -> None:
    assert zeroed_pages(0).shape == (0,)
