"""The module `torch.hpu` of the simulated card."""

from typing import Any, NamedTuple

from habana_frameworks.torch.hpu import random
from habana_frameworks.torch.hpu.graphs import wrap_in_hpu_graph
from habana_frameworks.torch.hpu.streams import Event, Stream, current_stream, default_stream, stream
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.launch_queue import run_everything
from habana_frameworks.torch.simulator.state import state

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "get_device_properties",
    "is_available",
    "is_initialized",
    "mem_get_info",
    "random",
    "stream",
    "synchronize",
    "wrap_in_hpu_graph",
]


class DeviceProperties(NamedTuple):
    """The two properties that callers read."""

    name: str
    total_memory: int


def is_available() -> bool:
    """Whether a card is there: a test may take the last one away."""
    return card.device_count > 0


def is_initialized() -> bool:
    """Importing the bridge starts the card."""
    return True


def device_count() -> int:
    """Number of cards."""
    return card.device_count


def current_device() -> int:
    """A process drives one card."""
    return 0


def synchronize(device: Any = None) -> None:
    """Launches what waits, and returns when all of it has run, whatever its stream."""
    state.cut()
    run_everything()
    card.synchronizations += 1


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) in bytes, as set, less what tensors and captured graphs take."""
    return card.free(), card.total_bytes


def get_device_properties(device: int = 0) -> DeviceProperties:
    """Name and memory of a card; raises for a card that does not exist."""
    if not 0 <= device < card.device_count:
        raise ValueError(f"card {device} of {card.device_count}")
    return DeviceProperties(card.device_type.replace("synDevice", "").upper(), card.total_bytes)
