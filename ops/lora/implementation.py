"""The interface of an implementation of adapters, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights


class LoraImplementation(Implementation[None], ABC):
    """One way to add the products of adapters.

    A step's routes are made once, and all layers read them. Where steps are graphs, they are made outside of the
    graphs of layers, and are tensors, so that a graph has one form whichever adapters a step has.

    begins: it may start products before the layer's own one is computed, or compute that one with them.
    """

    begins: ClassVar[bool] = False

    @abstractmethod
    def route(self, rows: Tensor, slots: int, rank: int) -> Any:
        """Prepares what the layers of a step read of its rows' slots. rows: int64 [rows], see `add_adapters`."""

    @abstractmethod
    def add(self, y: Tensor, x: Tensor, routes: Any, weights: AdapterWeights) -> Tensor:
        """Returns y plus the products, maybe in the memory of y. Tensors as in `add_adapters`."""

    def measure(self, weights: AdapterWeights) -> None:
        """Measures what it chooses from, if it has not done so, for layers like this one. The weights are not read."""

    def begin(self, x: Tensor, routes: Any, weights: AdapterWeights) -> Any:
        """Starts products that need the layer's input alone, for `finish`; None if `add` computes all of them."""
        return None

    def own(self, begun: Any, weights: AdapterWeights) -> Tensor | None:
        """Returns the layer's own product without a bias, [rows, outputs], if `begin` computed it."""
        return None

    def wait(self, begun: Any) -> None:
        """Has the current stream wait for products that `begin` started."""

    def finish(self, y: Tensor, begun: Any, routes: Any, weights: AdapterWeights) -> Tensor:
        """Returns what `add` does, from products that `begin` started."""
        raise NotImplementedError(f"adapters: implementation {self.name!r} begins no products")

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
