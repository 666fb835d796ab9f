"""The interface of an implementation of Unified Attention, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead

if TYPE_CHECKING:  # the configuration imports the names and must stay light
    from torch import Tensor

    from vllm_gaudi_ucm.ops.selected_list import SelectedList
    from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts


class AttentionImplementation(Implementation[AttentionSpec], ABC):
    """One way to compute Unified Attention: plans a step once, then attends in each of its layers."""

    gives_log_sums = False
    """True if `attend` writes `log_sums` for new tokens alone, and for cached blocks whose keys hold their values."""

    def supports(self, spec: AttentionSpec) -> bool:
        """True if it is plain attention; a subclass may support more."""
        return spec.is_plain

    def plan(self, parts: AttentionParts, block_size: int) -> Any:
        """Makes the plan of a step that `attend` gets in all layers; here the parts themselves."""
        return parts

    def selected_list(self, plan: Any, rows: int) -> SelectedList | None:
        """Returns the list to which a choice may write the blocks that layers read; None: blocks are only passed to
        `attend`.

        rows: rows of the query. Blocks that the list `holds` need not be copied there.
        """
        return None

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
        per_head: PerHead = NOTHING_PER_HEAD,
        log_sums: Tensor | None = None,
    ) -> bool:
        """Writes the attention of one layer to `out` [rows, heads, value_dim].

        Tensors as in `unified_attention`, validated. plan: the result of `plan`. selected_blocks: int64 [selected], or
        None for the blocks of the selected part. per_head: the tensors that `spec` declares. log_sums: fp32 [rows,
        heads], also written. Returns False if only the reference is exact for these tensors: the caller then uses the
        reference.
        """


ATTENTION: Implementations[AttentionImplementation] = Implementations(
    "unified_attention",
    "vllm_gaudi_ucm.attention_implementations",
    reference="vllm_gaudi_ucm.ops.unified_attention.impl.reference:ReferenceAttention",
    cpu="vllm_gaudi_ucm.ops.unified_attention.impl.cpu.attention:CpuAttention",
    native="vllm_gaudi_ucm.ops.unified_attention.impl.cpu.native:NativeAttention",
    hpu="vllm_gaudi_ucm.ops.unified_attention.impl.hpu.attention:HpuAttention",
    cuda="vllm_gaudi_ucm.ops.unified_attention.impl.cuda.attention:CudaAttention",
    encoder="vllm_gaudi_ucm.ops.unified_attention.impl.encoder:EncoderAttention",
    hpu_encoder="vllm_gaudi_ucm.ops.unified_attention.impl.hpu.encoder:HpuEncoder",
    cuda_encoder="vllm_gaudi_ucm.ops.unified_attention.impl.cuda.encoder:CudaEncoder",
)
