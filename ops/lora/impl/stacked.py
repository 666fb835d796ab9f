"""Adapters as products over all slots with a mask: static shapes, and an operation more than products alone.

All slots compute all rows, which costs little as long as slots times rank is a few hundred. Any device has it, and it
is the form of compiled regions: Gaudi's graph compiler fuses a mask with products, and has no grouped one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.lora.implementation import LoraImplementation
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights


class StackedLora(LoraImplementation):
    """Products with a mask, which is made once for a step and is an input of compiled regions."""

    priority: ClassVar[int] = 5

    def route(self, rows: Tensor, slots: int, rank: int) -> Tensor:
        """Returns bool [rows, slots * rank], which columns of the first product belong to other slots."""
        columns = torch.arange(slots, device=rows.device).unsqueeze(1).expand(slots, rank).reshape(-1)
        return rows.unsqueeze(1) != columns

    def add(self, y: Tensor, x: Tensor, routes: Tensor, weights: AdapterWeights) -> Tensor:
        slices, columns = len(weights.outputs), weights.up.shape[1]
        narrow = functional.linear(x.to(weights.down.dtype), weights.down).view(len(x), slices, columns)
        narrow = narrow.masked_fill(routes.unsqueeze(1), 0)
        products = [
            functional.linear(part, up)
            for part, up in zip(narrow.unbind(1), weights.up.split(weights.outputs), strict=True)
        ]
        return y + (products[0] if slices == 1 else torch.cat(products, -1)).to(y.dtype)

    def add_up(self, y: Tensor, narrow: Tensor, routes: Tensor, weights: AdapterWeights) -> Tensor:
        every = narrow.to(weights.up.dtype).repeat(1, weights.slots).masked_fill(routes, 0)
        return y + functional.linear(every, weights.up).to(y.dtype)
