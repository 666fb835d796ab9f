"""Helpers of `test_deliver.py` that other tests use, too."""

from __future__ import annotations

import threading


class Receiver:
    """What `deliver` was called with; it waits for `gate`, and raises for the indices in `broken`."""

    def __init__(self, is_open: bool = True, broken: tuple[int, ...] = ()) -> None:
        self.blocks: dict[int, bytes] = {}
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.broken = broken
        if is_open:
            self.gate.set()

    def __call__(self, index: int, block: memoryview) -> None:
        self.entered.set()
        assert self.gate.wait(60)
        if index in self.broken:
            raise RuntimeError("device")
        assert index not in self.blocks
        self.blocks[index] = bytes(block)
        self.threads.add(threading.current_thread().name)
