"""`torch.Generator` that can be made for the card."""

from typing import Any

import torch

_TorchGenerator = torch.Generator


class _AnyGenerator(type(_TorchGenerator)):  # type: ignore[misc]
    """Generators that torch made itself, such as the default one, are instances, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TorchGenerator)


class CardGenerator(_TorchGenerator, metaclass=_AnyGenerator):
    """A generator of the host that says which device it was made for."""

    _made_for: torch.device

    def __new__(cls, device: Any = "cpu") -> "CardGenerator":
        asked = torch.device(device)
        made = super().__new__(cls, torch.device("cpu") if asked.type == "hpu" else asked)
        made._made_for = torch.device("hpu", 0) if asked.type == "hpu" else made.device_of_torch
        return made

    @property
    def device_of_torch(self) -> torch.device:
        return _TorchGenerator.device.__get__(self)  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        return self._made_for
