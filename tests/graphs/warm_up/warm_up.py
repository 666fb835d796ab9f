"""Helpers of `test_warm_up.py` that other tests use, too."""

from __future__ import annotations

from vllm_gaudi_ucm.graphs.warm_up.records import GraphKey

GIB = 2**30


class Machine:
    """A device whose clock and memory move only when a graph runs."""

    def __init__(self, seconds: float = 2.0, size: int = GIB, free: int = 100 * GIB) -> None:
        self.seconds, self.size, self.free = seconds, size, free
        self.now = 0.0
        self.ran: list[GraphKey] = []
        self.broken: dict[GraphKey, Exception] = {}

    def run(self, key: GraphKey) -> None:
        self.now += self.seconds
        if key in self.broken:
            raise self.broken[key]
        self.ran.append(key)
        self.free -= self.size
