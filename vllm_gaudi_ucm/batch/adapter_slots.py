"""The row input of adapters: the slot of each row's adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from vllm_gaudi_ucm.batch.row_input import RowInput

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_ucm.vllm_api.lora import LoRARequest
    from vllm_gaudi_ucm.vllm_api.steps import NewRequestData

T = TypeVar("T")

NO_ADAPTER = -1
"""The slot of a row without an adapter, and of a pad."""


class AdapterSlots(RowInput):
    """Slots of adapters. A request names its adapter; which slot that has is set for each step (`place`).

    Layers with adapters read the tensor, not the arguments of the model's forward.
    """

    name = "adapter_slots"
    pad = NO_ADAPTER

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        super().__init__(num_rows, max_model_len)
        self._adapters: dict[int, LoRARequest] = {}

    @classmethod
    def is_read_by(cls, model: nn.Module) -> bool:
        """Returns whether the model has slots for adapters; a draft model has none."""
        return "lora_manager" in vars(model)

    @classmethod
    def kwargs(cls, values: T) -> dict[str, T]:
        return {}

    def add(self, row: int, new: NewRequestData) -> None:
        self.kept[row] = NO_ADAPTER
        self._adapters.pop(row, None)
        if new.lora_request is not None:
            self._adapters[row] = new.lora_request

    def remove(self, row: int) -> None:
        self.kept[row] = NO_ADAPTER
        self._adapters.pop(row, None)

    def adapter(self, row: int) -> LoRARequest | None:
        """Returns the adapter that the request of a row names."""
        return self._adapters.get(row)

    def place(self, row: int, slot: int) -> None:
        """Sets the slot of a request's adapter from now on."""
        self.kept[row] = slot
