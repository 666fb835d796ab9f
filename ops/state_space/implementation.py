"""The interface of an implementation of state-space layers, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from torch.nn import functional

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.state_rows import StateRows


class SpaceRows(NamedTuple):
    """A layer's inputs of each row, see `state_space`."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor


class SpaceImplementation(Implementation[None], ABC):
    """One way to compute state-space layers."""

    @abstractmethod
    def scan(self, rows: SpaceRows, a: Tensor, d: Tensor | None, states: Tensor, step: StateRows) -> Tensor:
        """Tensors as in `state_space`, validated."""

    def time_steps(self, dt: Tensor, bias: Tensor) -> Tensor:
        """Tensors as in `time_steps`."""
        return functional.softplus(dt.float() + bias.float())


STATE_SPACES: Implementations[SpaceImplementation] = Implementations(
    "state_space",
    "vllm_gaudi_ucm.state_space_implementations",
    reference="vllm_gaudi_ucm.ops.state_space.impl.reference:ReferenceSpace",
    tiled="vllm_gaudi_ucm.ops.state_space.impl.tiled:TiledSpace",
    cuda="vllm_gaudi_ucm.ops.state_space.impl.cuda.update:CudaSpace",
)
