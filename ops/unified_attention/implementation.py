"""What an implementation of Unified Attention is, and the registry of those that there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

if TYPE_CHECKING:  # the configuration knows the names, and is light
    from torch import Tensor

    from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts


class AttentionImplementation(Implementation[AttentionSpec], ABC):
    """One way to compute Unified Attention: plans a step once, then attends in each of its layers."""

    def supports(self, spec: AttentionSpec) -> bool:
        """Plain attention, unless a subclass computes more."""
        return spec.is_plain

    def plan(self, parts: AttentionParts, block_size: int) -> Any:
        """What `attend` needs of a step, derived once for all its layers; here the parts themselves."""
        return parts

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: Any,
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
    ) -> bool:
        """Writes the attention of one layer to `out` [rows, heads, value_dim].

        Tensors as in `unified_attention`, validated. plan: what `plan` gave. selected_blocks: int64 [selected], or None
        for those of the selected part. False where only the reference is exact for these tensors: it computes them.
        """


ATTENTION: Implementations[AttentionImplementation] = Implementations(
    "unified_attention",
    "vllm_gaudi_ucm.attention_implementations",
    reference="vllm_gaudi_ucm.ops.unified_attention.impl.reference:ReferenceAttention",
    cpu="vllm_gaudi_ucm.ops.unified_attention.impl.cpu:CpuAttention",
    native="vllm_gaudi_ucm.ops.unified_attention.impl.native:NativeAttention",
    hpu="vllm_gaudi_ucm.ops.unified_attention.impl.hpu:HpuAttention",
    cuda="vllm_gaudi_ucm.ops.unified_attention.impl.cuda:CudaAttention",
)
