"""The interface of an implementation of RMSNorm with a gate, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor


class GatedNormImplementation(Implementation[None], ABC):
    """One way to compute RMSNorm with a gate."""

    @abstractmethod
    def norm(self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool) -> Tensor:
        """Tensors as in `gated_norm`, validated."""


GATED_NORMS: Implementations[GatedNormImplementation] = Implementations(
    "gated_norm",
    "vllm_gaudi_ucm.gated_norm_implementations",
    reference="vllm_gaudi_ucm.ops.gated_norm.impl.reference:ReferenceGatedNorm",
    cuda="vllm_gaudi_ucm.ops.gated_norm.impl.cuda.norm:CudaGatedNorm",
)
