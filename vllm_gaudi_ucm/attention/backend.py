"""The attention backend that vLLM's layers find: writes K and V to the cache, then runs Unified Attention.

The runner builds the metadata (execution/step_tensors.py); nothing here looks at a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm_gaudi_ucm.kv_cache.allocation import split_key_value
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv
from vllm_gaudi_ucm.ops.unified_attention.api import PreparedParts, unified_attention
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
    from vllm_gaudi_ucm.sparse.selection.block_selector import BlockSelector, LayerSelection

# 128 tokens: Gaudi's vectors are 128 bf16 wide (gaudi-api.md), and fewer blocks make planning cheaper everywhere
DEFAULT_BLOCK_SIZE = 128


@dataclass(frozen=True)
class UnifiedAttentionMetadata(AttentionMetadata):
    """One step's attention, the same for every layer.

    slots: int64 [rows], where the new K and V go. parts: what the rows see, prepared once per step.
    sparse: the worker side of a sparse method, whose hooks run around the attention of each layer.
    summary_blocks: int64 [n], blocks that are full and to be summarised.
    selection: the choices of the step; None: every request is dense.
    selector: chooses the blocks of each layer; None for a method that does not choose blocks.
    """

    slots: torch.Tensor
    parts: PreparedParts
    sparse: UcmSparseBase | None = None
    summary_blocks: torch.Tensor | None = None
    selection: LayerSelection | None = None
    selector: BlockSelector | None = None


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
        # tokens outside heads: a block's tokens are one run of memory, which is what gathering blocks copies
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

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
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        # place among the model's attention layers; the runner sets it
        self.layer_index = 0
        self._kv_cache: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, torch.Tensor]

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: UnifiedAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Query, key, value: [rows, heads, head size]; kv_cache: vLLM's [blocks, kv heads, block size, k | v].

        Without metadata (a memory measurement) nothing is attended and the output is zero.
        """
        if attn_metadata is None:
            return output.zero_()
        key_cache, value_cache = self._split(kv_cache)
        write_kv(key, value, key_cache, value_cache, attn_metadata.slots)
        sparse, parts = attn_metadata.sparse, attn_metadata.parts
        if sparse is None:
            return unified_attention(query, key, value, key_cache, value_cache, parts, self.scale, out=output)
        index = self.layer_index
        if attn_metadata.selector is not None:
            attn_metadata.selector.attention_begin(index, query, attn_metadata)
        query, key, value, place = sparse.attention_begin(index, query, key, value, attn_metadata, output)
        chosen = None
        if (selection := attn_metadata.selection) is not None:
            chosen = selection.chosen
            if chosen is None and selection.dense_parts is not None:
                parts = selection.dense_parts
        found = unified_attention(
            query, key, value, key_cache, value_cache, parts, self.scale, out=place, selected_blocks=chosen
        )
        finished = sparse.attention_finished(index, found)
        # vLLM's layer reads what it gave
        return output if finished is output or finished is None else output.copy_(finished)

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the layer's keys and values. The cache is bound once, so they need not be made in every step."""
        if torch.compiler.is_compiling():
            # kept views would be two inputs of the graph that share memory
            return split_key_value(kv_cache, self.head_size)
        if self._kv_cache is not kv_cache:
            self._kv_cache, self._views = kv_cache, split_key_value(kv_cache, self.head_size)
        return self._views
