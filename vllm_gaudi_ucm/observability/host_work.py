"""Counts what steps with static shapes wait for, and what they do on the host although a device could."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class HostCounts(NamedTuple):
    """Counts of one step. reads: reads of the device's memory; each waits for all pending work of the device.
    stages: names of what ran on the host, each once, in their order.
    """

    reads: int
    stages: tuple[str, ...]


NO_HOST_WORK = HostCounts(0, ())


class HostWork:
    """Counts reads of the device and stages on the host. One read is the least that a step with tokens has.

    A copy to the device is not a read: the host does not wait for it.

    Args:
        on_read, on_stage: called with the reason of each read and with the name of each stage. Each is a label: they do
            not name requests.
    """

    def __init__(
        self, on_read: Callable[[str], None] = lambda reason: None, on_stage: Callable[[str], None] = lambda name: None
    ) -> None:
        self._on_read = on_read
        self._on_stage = on_stage
        self._reads = 0
        self._stages: dict[str, None] = {}

    def fetch(self, tensor: torch.Tensor, reason: str) -> torch.Tensor:
        """The tensor on the host; waits for it."""
        self.waited(reason)
        return tensor.cpu()

    def waited(self, reason: str) -> None:
        """Something of the device's memory, whose copy was queued before, is waited for."""
        self._reads += 1
        self._on_read(reason)

    def stage(self, name: str) -> None:
        """Something runs on the host in this step."""
        self._stages[name] = None
        self._on_stage(name)

    def take_counts(self) -> HostCounts:
        """The counts since the last call."""
        counts = HostCounts(self._reads, tuple(self._stages))
        self._reads, self._stages = 0, {}
        return counts
