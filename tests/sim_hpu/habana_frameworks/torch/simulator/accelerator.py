"""`torch.accelerator`'s memory calls: on a Gaudi they find no allocator that they could ask."""

from collections.abc import Callable
from typing import Any, NoReturn

from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.duties import duties

import torch

ALLOCATOR = 5
_NAMES = (
    *("empty_cache", "empty_host_cache", "get_memory_info", "max_memory_allocated", "max_memory_reserved"),
    "memory_allocated",
    *("memory_reserved", "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats"),
)


def refuse_allocator_calls() -> None:
    """From now on torch's own calls raise, unless the duty is off; one that is or will be replaced is left alone."""
    for name in _NAMES:
        call = getattr(torch.accelerator, name, None)  # `get_memory_info` is younger than the others
        if call is not None and call.__module__.partition(".")[0] == "torch":
            setattr(torch.accelerator, name, _refusing(name, call))


def _refusing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        return _refuse(name) if duties.on(ALLOCATOR) else call(*args, **kwargs)

    return refuse


def _refuse(name: str) -> NoReturn:
    raise HpuConstraintError(
        f"torch.accelerator.{name}",
        "Allocator for hpu is not a DeviceAllocator",
        ALLOCATOR,
        f"call torch.hpu, or replace torch.accelerator.{name} before vLLM calls it",
    )
