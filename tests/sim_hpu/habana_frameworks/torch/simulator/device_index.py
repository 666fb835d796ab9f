"""One process drives one card: which one it has chosen."""

from typing import Any

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.duties import duties

import torch

ONE_CARD = 35


class _Chosen:
    """Of the process; None until somebody names one."""

    index: int | None = None


def choose(device: Any) -> None:
    """`set_device`: the first choice stays. Raises HpuConstraintError for another one, ValueError for no card."""
    index = _index(device)
    if not 0 <= index < card.device_count:
        raise ValueError(f"card {index} of {card.device_count}")
    if _Chosen.index not in (None, index):
        duties.refuse(
            ONE_CARD,
            "set_device",
            f"card {index}, but this process drives card {_Chosen.index}",
            "start a process for each card; HABANA_VISIBLE_MODULES or HLS_MODULE_ID chooses",
        )
    _Chosen.index = index


def check(device: Any) -> None:
    """A tensor is asked for on a device: raises HpuConstraintError for a card that this process does not drive."""
    if isinstance(device, str) and device.startswith("hpu"):
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type != "hpu" or device.index in (None, current()):
        return
    found = f"{device} is asked for, but this process drives card {current()}"
    duties.refuse(ONE_CARD, "device", found, "leave the index out: 'hpu'")


def current() -> int:
    """The card of this process, 0 until one was chosen."""
    return _Chosen.index or 0


def forget() -> None:
    """As in a process that has just started."""
    _Chosen.index = None


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0
