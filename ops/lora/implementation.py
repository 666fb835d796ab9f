"""The interface of an implementation of adapters, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights


class LoraImplementation(Implementation[None], ABC):
    """One way to add the products of adapters.

    A step's routes are made once, and all layers read them. Where steps are graphs, they are made outside of the
    graphs of layers, and are tensors, so that a graph has one form whichever adapters a step has.
    """

    @abstractmethod
    def route(self, rows: Tensor, slots: int, rank: int) -> Any:
        """Prepares what the layers of a step read of its rows' slots. rows: int64 [rows], see `add_adapters`."""

    @abstractmethod
    def add(self, y: Tensor, x: Tensor, routes: Any, weights: AdapterWeights) -> Tensor:
        """Returns y plus the products, maybe in the memory of y. Tensors as in `add_adapters`."""

    @abstractmethod
    def add_up(self, y: Tensor, narrow: Tensor, routes: Any, weights: AdapterWeights) -> Tensor:
        """Returns y plus the second products alone. Tensors as in `add_up`."""


LORA: Implementations[LoraImplementation] = Implementations(
    "adapters",
    "vllm_gaudi_ucm.lora_implementations",
    reference="vllm_gaudi_ucm.ops.lora.impl.reference:ReferenceLora",
    stacked="vllm_gaudi_ucm.ops.lora.impl.stacked:StackedLora",
    cpu="vllm_gaudi_ucm.ops.lora.impl.cpu.groups:CpuLora",
    cuda="vllm_gaudi_ucm.ops.lora.impl.cuda.products:CudaLora",
)
