"""Adapters on a CPU: rows grouped by adapter on the host, and plain products of each group.

Rows without an adapter cost nothing. The groups depend on a step's data, so the graphs of other modes cannot hold them.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vllm_gaudi_ucm.ops.lora.implementation import LoraImplementation
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights


class Group(NamedTuple):
    """The rows of one adapter. rows: int64 [n]; None for all rows of the step."""

    slot: int
    rows: Tensor | None


class CpuLora(LoraImplementation):
    """Products of the adapters that a step has."""

    devices: ClassVar[frozenset[str] | None] = frozenset({"cpu"})
    priority: ClassVar[int] = 10
    capturable: ClassVar[bool] = False
    traceable: ClassVar[bool] = False

    def route(self, rows: Tensor, slots: int, rank: int) -> list[Group]:
        found = [slot for slot in torch.unique(rows).tolist() if slot >= 0]
        if len(found) == 1 and bool((rows == found[0]).all()):
            return [Group(found[0], None)]
        return [Group(slot, (rows == slot).nonzero().squeeze(1)) for slot in found]

    def add(self, y: Tensor, x: Tensor, routes: list[Group], weights: AdapterWeights) -> Tensor:
        downs, ups = weights.down_of_slices(), weights.up_of_slices()
        for slot, rows in routes:
            taken = (x if rows is None else x.index_select(0, rows)).to(weights.down.dtype)
            products = [
                functional.linear(functional.linear(taken, down[slot, 0]), up[slot, 0])
                for down, up in zip(downs, ups, strict=True)
            ]
            _add(y, products, rows, weights)
        return y

    def add_up(self, y: Tensor, narrow: Tensor, routes: list[Group], weights: AdapterWeights) -> Tensor:
        (up,) = weights.up_of_slices()
        for slot, rows in routes:
            taken = (narrow if rows is None else narrow.index_select(0, rows)).to(weights.up.dtype)
            _add(y, [functional.linear(taken, up[slot, 0])], rows, weights)
        return y


def _add(y: Tensor, products: list[Tensor], rows: Tensor | None, weights: AdapterWeights) -> None:
    for part, product in zip(y.split(weights.outputs, -1), products, strict=True):
        if rows is None:
            part.add_(product)
        else:
            part.index_add_(0, rows, product.to(y.dtype))
