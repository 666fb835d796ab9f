"""The interface of an implementation of short convolutions, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.state_rows import StateRows


class ConvolutionImplementation(Implementation[None], ABC):
    """One way to compute short convolutions."""

    @abstractmethod
    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: StateRows, *, silu: bool
    ) -> Tensor:
        """Tensors as in `causal_conv1d`, validated."""


CONVOLUTIONS: Implementations[ConvolutionImplementation] = Implementations(
    "causal_conv1d",
    "vllm_gaudi_ucm.convolution_implementations",
    reference="vllm_gaudi_ucm.ops.causal_conv1d.impl.reference:ReferenceConvolution",
    cuda="vllm_gaudi_ucm.ops.causal_conv1d.impl.cuda.convolution:CudaConvolution",
)
