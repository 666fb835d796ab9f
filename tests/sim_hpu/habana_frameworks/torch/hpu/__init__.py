"""The module `torch.hpu` of the simulated card."""

from typing import Any, NamedTuple

from habana_frameworks.torch.hpu import graphs, random
from habana_frameworks.torch.hpu.memory import (
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
)
from habana_frameworks.torch.hpu.sdp import enable_recompute_sdp, recompute_sdp_enabled, sdp_kernel
from habana_frameworks.torch.hpu.streams import Event, Stream, current_stream, default_stream, stream
from habana_frameworks.torch.simulator import device_index
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.constraint import MissingInEagerModeError
from habana_frameworks.torch.simulator.launch_queue import run_everything
from habana_frameworks.torch.simulator.state import is_lazy, state

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "enable_recompute_sdp",
    "get_device_properties",
    "is_available",
    "is_initialized",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "random",
    "recompute_sdp_enabled",
    "reset_peak_memory_stats",
    "sdp_kernel",
    "set_device",
    "stream",
    "synchronize",
]

_LAZY_NAMES = ("wrap_in_hpu_graph", "HPUGraph", "graph", "make_graphed_callables", "ModuleCacher", "CachedParams")


def __getattr__(name: str) -> Any:
    """HPU graphs exist in lazy mode alone (duty 3). Raises MissingInEagerModeError, an AttributeError."""
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_lazy():
        raise MissingInEagerModeError(f"torch.hpu.{name}", "there are no HPU graphs in eager mode", 3, "torch.compile")
    return getattr(graphs, name)


class DeviceProperties(NamedTuple):
    """The two properties that callers read."""

    name: str
    total_memory: int


def _lazy_init() -> None:
    """torch 2.11 calls this where a device is named; importing the bridge has started the card."""


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
    """A process drives one card; seen from it, it is card 0 unless another one was set."""
    return device_index.current()


def set_device(device: Any) -> None:
    """Chooses the card of this process, once."""
    device_index.choose(device)


def synchronize(device: Any = None) -> None:
    """Launches what waits, and returns when all of it has run, whatever its stream."""
    state.cut()
    run_everything()
    card.synchronizations += 1


def get_device_properties(device: int = 0) -> DeviceProperties:
    """Name and memory of a card; raises for a card that does not exist."""
    if not 0 <= device < card.device_count:
        raise ValueError(f"card {device} of {card.device_count}")
    return DeviceProperties(card.device_type.replace("synDevice", "").upper(), card.total_bytes)
