"""The interface of an implementation of the mixture of experts, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_ucm.ops.moe.spec import PLAIN, MoeSpec
from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.moe.codes import CodedExperts


class ExpertWeights(NamedTuple):
    """Plain weights of the experts on this device.

    w13: [experts, 2 * inner, hidden], gates and up. w2: [experts, hidden, inner]. w13_bias: [experts, 2 * inner].
    w2_bias: [experts, hidden]. All of one dtype, on one device.
    """

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None


class MoeImplementation(Implementation[MoeSpec], ABC):
    """One way to compute the experts of a layer: prepares weights once, then computes rows."""

    def supports(self, spec: MoeSpec) -> bool:
        """True if the weights are plain; a subclass may support more, or less."""
        return spec.weights == PLAIN

    def prepare(self, weights: ExpertWeights, spec: MoeSpec) -> Any:
        """Prepares the `form` that `compute` gets, once for a layer; here the weights themselves."""
        return weights

    def takes_codes(self, weights: CodedExperts) -> bool:
        """True if `compute` reads these weights as they are, in about the time that plain ones take."""
        return False

    def prepare_codes(self, weights: CodedExperts, spec: MoeSpec) -> Any:
        """Like `prepare`, if `supports` is true for a spec of `CODES`."""
        return weights

    @abstractmethod
    def compute(self, x: Tensor, ids: Tensor, shares: Tensor, form: Any, spec: MoeSpec) -> Tensor:
        """Tensors as in `mixture_of_experts`, validated. form: the result of `prepare`."""


MOE: Implementations[MoeImplementation] = Implementations(
    "mixture_of_experts",
    "vllm_gaudi_ucm.moe_implementations",
    reference="vllm_gaudi_ucm.ops.moe.impl.reference:ReferenceMoe",
    cpu="vllm_gaudi_ucm.ops.moe.impl.cpu.experts:CpuMoe",
    cuda="vllm_gaudi_ucm.ops.moe.impl.cuda.experts:CudaMoe",
    grouped="vllm_gaudi_ucm.ops.moe.impl.cuda.grouped:GroupedMoe",
    hpu="vllm_gaudi_ucm.ops.moe.impl.hpu.experts:HpuMoe",
)
