"""Products with quantised weights: the methods that all implementations have, and what one is chosen for."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight


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
