"""Adapters by definition: every slot computes every row, and a row takes the products of its own slot.

Static shapes, and nothing is read on the host, so it may be captured and traced.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.lora.implementation import LoraImplementation
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights


class ReferenceLora(LoraImplementation):
    """The reference: computes in float32, or in float64 for float64, and rounds once."""

    def route(self, rows: Tensor, slots: int, rank: int) -> Tensor:
        return rows

    def add(self, y: Tensor, x: Tensor, routes: Tensor, weights: AdapterWeights) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        total, x = y.to(wide), x.to(wide)
        downs, ups = weights.down_of_slices(), weights.up_of_slices()
        for slot in range(weights.slots):
            products = [
                functional.linear(functional.linear(x, down[slot, 0].to(wide)), up[slot, 0].to(wide))
                for down, up in zip(downs, ups, strict=True)
            ]
            total = total + _of_slot(torch.cat(products, -1), routes, slot)
        return total.to(y.dtype)

    def add_up(self, y: Tensor, narrow: Tensor, routes: Tensor, weights: AdapterWeights) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        total, narrow = y.to(wide), narrow.to(wide)
        (up,) = weights.up_of_slices()
        for slot in range(weights.slots):
            total = total + _of_slot(functional.linear(narrow, up[slot, 0].to(wide)), routes, slot)
        return total.to(y.dtype)


def _of_slot(products: Tensor, routes: Tensor, slot: int) -> Tensor:
    """Returns the products of the rows that have this slot; zeros for the others, whatever theirs are."""
    return products.masked_fill((routes != slot).unsqueeze(-1), 0)
