"""The module `torch.hpu` of the simulated card."""

from typing import NamedTuple

from habana_frameworks.torch.hpu import random
from habana_frameworks.torch.simulator import card

__all__ = [
    "current_device",
    "device_count",
    "get_device_properties",
    "is_available",
    "mem_get_info",
    "random",
    "synchronize",
]


class DeviceProperties(NamedTuple):
    """The two properties that callers read."""

    name: str
    total_memory: int


def is_available() -> bool:
    """Whether a card is there: a test may take the last one away."""
    return card.device_count > 0


def device_count() -> int:
    """Number of cards."""
    return card.device_count


def current_device() -> int:
    """A process drives one card."""
    return 0


def synchronize() -> None:
    """Counts: everything has finished already, because it ran on the CPU."""
    card.synchronizations += 1


def mem_get_info() -> tuple[int, int]:
    """(free, total) in bytes, as set."""
    return card.free_bytes, card.total_bytes


def get_device_properties(device: int = 0) -> DeviceProperties:
    """Name and memory of a card; raises for a card that does not exist."""
    if not 0 <= device < card.device_count:
        raise ValueError(f"card {device} of {card.device_count}")
    return DeviceProperties(card.device_type.replace("synDevice", "").upper(), card.total_bytes)
