"""Copies of tensors to the host that nothing waits for until they are read."""

from collections.abc import Sequence

import torch


class HostCopies:
    """Copies to the host, queued behind the device's work, into pinned memory. They are copies even on a CPU, where the
    next step may write to the same memory.

    Args:
        tensors: on one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [tensor.to("cpu", copy=True, non_blocking=True) for tensor in tensors]
        self._copied: torch.Event | None = None
        if tensors[0].device.type != "cpu":
            self._copied = torch.Event(tensors[0].device)
            self._copied.record()

    def read(self) -> list[torch.Tensor]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies
