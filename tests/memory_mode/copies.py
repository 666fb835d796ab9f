"""Helpers of `test_copies.py` that other tests use, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

BLOCK_BYTES = 64


def wait_for(finished: Callable[[], Sequence[tuple[object, object]]]) -> list[tuple[object, object]]:
    end = time.monotonic() + 60
    found: list[tuple[object, object]] = []
    while not found and time.monotonic() < end:
        found = list(finished())
        time.sleep(0.001)
    return found


def block(value: int) -> memoryview:
    return memoryview(bytes([value]) * BLOCK_BYTES)
