"""The attention backend that vLLM's layers find: writes K and V to the cache, then runs Unified Attention.

The runner builds the metadata (execution/step_tensors.py); nothing here looks at a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm_gaudi_ucm.kv_cache.pair import KvPair, in_blocks
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv
from vllm_gaudi_ucm.ops.unified_attention.api import PreparedParts, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheLayout, KVCacheSpec

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase
    from vllm_gaudi_ucm.sparse.selection.layer_selector import LayerSelection, LayerSelector

# 128 tokens: Gaudi's vectors are 128 bf16 wide (gaudi-api.md), and fewer blocks make planning cheaper everywhere
DEFAULT_BLOCK_SIZE = 128


@dataclass(frozen=True)
class UnifiedAttentionMetadata(AttentionMetadata):
    """One step's attention, the same for every layer.

    slots: int64 [rows], where the new K and V go. parts: what the rows see, prepared once per step.
    sparse: the worker side of a sparse method, whose hooks run around the attention of each layer.
    summary_blocks: int64 [n], blocks that are full and to be summarised.
    selection: the choices of the step; None: every request is dense.
    """

    slots: torch.Tensor
    parts: PreparedParts
    sparse: UcmSparseBase | None = None
    summary_blocks: torch.Tensor | None = None
    selection: LayerSelection | None = None


class UnifiedAttentionBackend(AttentionBackend):
    """Registered as CUSTOM: vLLM resolves an out-of-tree backend by this name only."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[UnifiedAttentionImpl]:
        return UnifiedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        # our runner makes the metadata; vLLM only reads class attributes of the builder
        return AttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return DEFAULT_BLOCK_SIZE

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # tokens outside heads: a block's tokens are one run of memory, which is what gathering blocks copies. Of the
        # layouts that vLLM knows this is the nearest; it has none of keys and values apart
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True


class UnifiedAttentionImpl(AttentionImpl[UnifiedAttentionMetadata]):
    """Attention of one layer. Refuses by name what it does not compute."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        asked = {
            "ALiBi": alibi_slopes is not None,
            "sliding-window attention": sliding_window is not None,
            "attention logits soft cap": bool(logits_soft_cap),
            f"attention type {attn_type!r}": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            "attention sinks": others.get("sinks") is not None,
            f"KV cache dtype {kv_cache_dtype!r}": kv_cache_dtype
            not in UnifiedAttentionBackend.supported_kv_cache_dtypes,
            **{f"attention argument {name!r}": value is not None for name, value in others.items() if name != "sinks"},
        }
        for feature, is_asked in asked.items():
            if is_asked:
                raise UnsupportedFeatureError(feature, "an attention layer of the model")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)  # vLLM's name
        self.spec = AttentionSpec(self.scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._layer_index = 0
        self._selector: LayerSelector | None = None
        self._kv_cache: KvPair | None = None
        self._views: KvPair

    def be_sparse(self, layer_index: int, selector: LayerSelector | None) -> None:
        """Once the KV cache is there. layer_index: among the model's layers, for hooks of a method.

        selector: chooses the layer's blocks; None for a method that does not choose blocks.
        """
        self._layer_index, self._selector = layer_index, selector

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KvPair,  # type: ignore[override]  # vLLM's type is one tensor; what was bound comes here as it is
        attn_metadata: UnifiedAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Query, key, value: [rows, heads, head size]; kv_cache: what was bound to the layer.

        Without metadata (a memory measurement) nothing is attended and the output is zero.
        """
        if attn_metadata is None:
            return output.zero_()
        sparse, parts = attn_metadata.sparse, attn_metadata.parts
        written = write_kv(key, value, kv_cache.key, kv_cache.value, attn_metadata.slots)
        key_cache, value_cache = self._in_blocks(kv_cache, written, parts.block_size)
        if sparse is None:
            return unified_attention(query, key, value, key_cache, value_cache, parts, self.spec, out=output)
        # for methods that ask: a compiled region that read it would be one for each layer
        index = self._layer_index
        if self._selector is not None:
            self._selector.attention_begin(query, key_cache, attn_metadata)
        query, key, value, place = sparse.attention_begin(index, query, key, value, attn_metadata, output)
        chosen = None
        if (selection := attn_metadata.selection) is not None:
            chosen = selection.chosen
            if chosen is None and selection.dense_parts is not None:
                parts = selection.dense_parts
        found = unified_attention(
            query, key, value, key_cache, value_cache, parts, self.spec, out=place, selected_blocks=chosen
        )
        finished = sparse.attention_finished(index, found)
        # vLLM's layer reads what it gave
        return output if finished is output or finished is None else output.copy_(finished)

    def _in_blocks(self, kv_cache: KvPair, written: tuple[torch.Tensor, torch.Tensor], block_size: int) -> KvPair:
        """Views of what was written. The cache is bound once, so they need not be made in every step."""
        if torch.compiler.is_compiling():
            # kept views would be inputs of the graph that share memory with those that it writes
            return in_blocks(written, block_size)
        if self._kv_cache is not kv_cache:
            self._kv_cache, self._views = kv_cache, in_blocks(written, block_size)
        return self._views
