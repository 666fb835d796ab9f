"""Linear layers with quantised weights: chooses the form in which a device keeps them, and the product with it.

A device without a form of its own gets plain weights. `dequantise` defines the result of all products;
`rounding.multiply_rounded` defines products of rows rounded to integers, `narrowed_rows.multiply_narrowed` of rows
rounded to 8-bit floats by a measured scale.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.quantised_linear.narrowed_rows import NarrowedRows
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight, dequantise
from vllm_gaudi_ucm.registry import Registry, those_installed

__all__ = ["Product", "QuantisedWeight", "Target", "choose_product", "dequantise"]


class Product(Protocol):
    """A product of rows with a weight that stays quantised."""

    def pack(self, weight: QuantisedWeight) -> dict[str, Tensor]:
        """Returns the tensors that `multiply` reads as attributes of the layer."""

    def multiply(self, x: Tensor, layer: nn.Module, bias: Tensor | None) -> Tensor:
        """x [..., inputs] in the model's dtype -> [..., outputs] in that dtype."""


class Target(NamedTuple):
    """The device that computes a layer. largest: the largest magnitude of its e4m3."""

    device: str
    dtype: torch.dtype
    largest: float = 448.0


_PRODUCTS: Registry[Callable[[QuantisedWeight, Target], Product | None]] = Registry(
    "product with quantised weights",
    **those_installed(
        cpu="vllm_gaudi_ucm.ops.quantised_linear.impl.cpu.int8:choose",
        cuda="vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.products:choose",
        hpu="vllm_gaudi_ucm.ops.quantised_linear.impl.hpu.products:choose",
    ),
)


def choose_product(weight: QuantisedWeight, target: Target) -> Product | None:
    """Chooses the product with such a weight in quantised form; None if plain weights are as good or the only way."""
    of_device = _PRODUCTS.get(target.device)(weight, target) if target.device in _PRODUCTS else None
    if of_device is None and weight.narrowing is not None:
        return NarrowedRows(None, weight, target.dtype)
    return of_device
