"""Where a tensor is, and the copies between host and card."""

from typing import Any

from habana_frameworks.torch.simulator import device_index
from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.garbage import garbage
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.state import Place, state

import torch

CARD = torch.device("hpu", 0)
HOST = torch.device("cpu")


def place_of(device: Any) -> Place | None:
    """Which of the two a device is; None for any other, such as `meta`."""
    device_index.check(device)
    kind = CARD.type if isinstance(device, int) else torch.device(device).type
    return {"hpu": "card", "cpu": "host"}.get(kind)  # type: ignore[return-value]


def is_on_card(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and _has_storage(tensor) and memory.serial(tensor) is not None


def _has_storage(tensor: torch.Tensor) -> bool:
    # vmap's tensors have none to show
    return tensor.layout == torch.strided and not tensor.is_meta and not torch._C._functorch.is_batchedtensor(tensor)


def move(tensor: torch.Tensor, place: Place, func: Any, *, from_card: bool) -> torch.Tensor:
    """A tensor that was made on the host's side, at the place where it belongs; never a view of one on the other."""
    if place == "host" and not from_card:
        return tensor
    if place == "card" and from_card and is_on_card(tensor):
        return tensor
    if place == "host":
        state.read_on_host(func.__name__)
        garbage.check_read(func.__name__, tensor)
    elif state.region is not None and not from_card:
        raise HpuConstraintError(func.__name__, f"a copy from the host inside a region captured by {state.region}")
    with state.make("host"):
        copy = tensor.clone()
    if place == "card":
        memory.put(copy)
    return copy
