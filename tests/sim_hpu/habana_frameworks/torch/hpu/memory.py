"""Figures of the card's memory pool. There is no cache in it, and nothing to empty."""

from typing import Any

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.memory import memory


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(limit - in use, limit) of the pool in bytes, not of the card."""
    return memory.free(), card.free_bytes


def memory_allocated(device: Any = None) -> int:
    """Bytes in use: tensors, workspaces of recipes that have run, captured graphs."""
    return memory.used()


def max_memory_allocated(device: Any = None) -> int:
    """The most that was in use at an allocation since the last reset."""
    return max(memory.peak, memory.used())


def memory_reserved(device: Any = None) -> int:
    """The limit, always: the pool is taken when the card starts."""
    return card.free_bytes


def max_memory_reserved(device: Any = None) -> int:
    return memory_reserved()


def reset_peak_memory_stats(device: Any = None) -> None:
    memory.reset_peak()


def memory_stats(device: Any = None) -> dict[str, int]:
    """As the bridge names them, in bytes."""
    return {"Limit": card.free_bytes, "InUse": memory.used(), "MaxInUse": max_memory_allocated()}
