"""Which tensors of the card are views with another dtype than their storage was made with."""

from collections import OrderedDict

from habana_frameworks.torch.simulator.memory import memory

import torch

_MOST = 1 << 16


class DtypeViews:
    """Views that were made, by storage and dtype. Serial numbers are never used again; the oldest are forgotten."""

    def __init__(self) -> None:
        self._made_as: OrderedDict[int, torch.dtype] = OrderedDict()

    def note(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """A view of `source` was made that may have another dtype."""
        serial = memory.serial(source)
        if serial is None or source.dtype == result.dtype:
            return
        self._made_as.setdefault(serial, source.dtype)
        if len(self._made_as) > _MOST:
            self._made_as.popitem(last=False)

    def made_as(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype of the tensor that the storage was first seen with."""
        serial = memory.serial(tensor)
        return tensor.dtype if serial is None else self._made_as.get(serial, tensor.dtype)


dtype_views = DtypeViews()
