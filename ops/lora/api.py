"""Adapters of low rank: prepares a step's rows once, validates, and calls the implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.lora.implementation import LORA, LoraImplementation
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights
from vllm_gaudi_ucm.ops.registry import AUTO


@dataclass(frozen=True, slots=True)
class Routes:
    """The adapters of a step's rows, in the form that an implementation reads.

    rows: int64 [rows], see `add_adapters`.
    """

    implementation: LoraImplementation
    rows: Tensor
    form: Any


@dataclass(frozen=True, slots=True)
class Begun:
    """Products of a layer that were started before its own one. x: the layer's input. own: the layer's own product
    without a bias, [rows, outputs], if it is among them; `add_adapters` then takes it as y.
    """

    x: Tensor
    products: Any
    own: Tensor | None = None

    def is_of(self, x: Tensor) -> bool:
        """Returns whether x is the input that the products were computed of."""
        return self.x.data_ptr() == x.data_ptr() and self.x.shape == x.shape and self.x.stride() == x.stride()


def route_rows(rows: Tensor, slots: int, rank: int, *, implementation: str = AUTO, captured: bool = False) -> Routes:
    """Prepares the slots of a step's rows, for all layers.

    rows: int64 [rows], see `add_adapters`. captured: the layers run while a graph is captured, at static shapes.

    Raises ValueError if no implementation, or not the requested one, is for this device.
    """
    chosen = LORA.choose(implementation, rows.device.type, captured=captured)
    return Routes(chosen, rows, chosen.route(rows, slots, rank))


def begin_adapters(x: Tensor, routes: Routes, weights: AdapterWeights) -> Begun | None:
    """Starts products of a layer before its own one is computed, if that is faster, for `add_adapters`.

    x: [rows, inputs], not written and not freed until then. Returns None if nothing was started.
    """
    shape = (len(routes.rows), weights.down.shape[1])
    if not routes.implementation.begins or tuple(x.shape) != shape:
        # a layer that changes its input first
        return None
    products = routes.implementation.begin(x, routes.form, weights)
    return None if products is None else Begun(x, products, routes.implementation.own(products, weights))


def add_adapters(y: Tensor, x: Tensor, routes: Routes, weights: AdapterWeights, begun: Begun | None = None) -> Tensor:
    """y + up[slot] (down[slot] x) for each row and slice, with the matrices of the row's slot.

    y: [rows, outputs], the result of the layer without adapters. x: [rows, inputs].
    routes: the slot of each row, 0 to slots - 1; `NO_ADAPTER` adds nothing. begun: from `begin_adapters`.

    Returns [rows, outputs] in the dtype of y; it may be y, which is then overwritten. The weights of all slots must be
    finite; NaN in a row does not reach other rows.
    Raises ValueError if shapes or devices do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _validate(y, x, weights.down.shape[1], routes, weights)
    implementation = routes.implementation
    if begun is not None:
        if begun.is_of(x):
            return implementation.finish(y, begun.products, routes.form, weights)
        implementation.wait(begun.products)
    return implementation.add(y, x, routes.form, weights)


def add_up(y: Tensor, narrow: Tensor, routes: Routes, weights: AdapterWeights) -> Tensor:
    """y + up[slot] narrow: the second product alone, for embeddings, whose first one is a look-up. One slice.

    narrow: [rows, rank]. Everything else as in `add_adapters`.
    """
    if not torch.compiler.is_compiling():
        _validate(y, narrow, weights.rank, routes, weights)
    return routes.implementation.add_up(y, narrow, routes.form, weights)


def _validate(y: Tensor, x: Tensor, inputs: int, routes: Routes, weights: AdapterWeights) -> None:
    found, count = (tuple(y.shape), tuple(x.shape)), len(routes.rows)
    expected = (count, len(weights.up)), (count, inputs)
    if found != expected:
        raise ValueError(
            f"adapters: found y, x of shapes {found[0]}, {found[1]}, expected {expected[0]}, {expected[1]}"
        )
    devices = {one.device for one in (y, x, routes.rows, weights.down, weights.up)}
    if len(devices) > 1:
        raise ValueError(f"adapters: found tensors on {', '.join(map(str, devices))}, expected one device")
