"""Copies that do not wait.

From the host: the source is read later, and until the host has waited it must stay as it is.

On a Gaudi a thread of the host stages a large tensor. Here the copy waits in its stream's queue: it reads the source
when something behind it in the stream runs. Where the host changes the source before it has waited for the stream, what
arrives is the changed one.

To the host: nothing that anybody could use is there until the host waits.
"""

from typing import NamedTuple

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.launch_queue import LaunchQueue
from habana_frameworks.torch.simulator.poison import poison

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

LATE = 33
LEAST_BYTES = 1 << 20
"""Smaller tensors are copied into a buffer at once."""


class LateCopy(NamedTuple):
    """A copy that has run, for whose end the host has not waited. read: what it has found in the source."""

    target: Tensor
    source: Tensor
    read: Tensor

    def settle(self) -> None:
        """The host waits: the source must still hold what was read, else the target gets what it holds now."""
        with torch.inference_mode(), torch._C.DisableTorchFunction(), _disable_current_modes():
            if _same(self.source, self.read):
                return
            found = f"the source of a non_blocking copy of {self.read.nbytes} bytes was changed before the host waited"
            if duties.spoils(LATE, "copy", found, "wait for an event behind the copy, or keep two buffers"):
                self.target.copy_(self.source)


class Arrival(NamedTuple):
    """A copy to the host that has run. read: what it has found in the source, which the host finds once it waits."""

    target: Tensor
    read: Tensor

    def settle(self) -> None:
        with torch.inference_mode(), torch._C.DisableTorchFunction(), _disable_current_modes():
            self.target.copy_(self.read)


def is_late(source: Tensor, target: Tensor, non_blocking: bool) -> bool:
    """Whether a copy to the card returns before it has read its source."""
    same = source.dtype == target.dtype and source.shape == target.shape
    return non_blocking and same and source.nbytes >= LEAST_BYTES and duties.on(LATE)


def delay(queue: LaunchQueue, source: Tensor, target: Tensor) -> None:
    """Launches the copy; until it runs the target holds nothing that anybody could use."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        poison(target)
    card.late_copies += 1

    def run() -> None:
        with torch.inference_mode(), torch._C.DisableTorchFunction(), _disable_current_modes():
            read = source.clone()
            target.copy_(read)
        queue.in_flight.append(LateCopy(target, source, read))

    queue.launch(run)


def is_late_to_host(source: Tensor, target: Tensor, non_blocking: bool) -> bool:
    """Whether a copy from the card returns before anything has arrived, be it ever so small."""
    return non_blocking and source.dtype == target.dtype and source.shape == target.shape and duties.on(LATE)


def deliver(queue: LaunchQueue, source: Tensor, target: Tensor) -> None:
    """Launches the copy to the host; until the host waits for it the target holds nothing that anybody could use."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        poison(target)
    card.late_copies += 1

    def run() -> None:
        with torch.inference_mode(), torch._C.DisableTorchFunction(), _disable_current_modes():
            queue.in_flight.append(Arrival(target, source.clone()))

    queue.launch(run)


def _same(one: Tensor, other: Tensor) -> bool:
    """To the bit, so that NaN equals itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
