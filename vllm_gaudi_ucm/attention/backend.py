"""The attention backend that vLLM's layers use: writes K and V to the cache, then runs Unified Attention.

The runner builds the metadata (execution/step_tensors.py); this module does not look at a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm_gaudi_ucm.attention.cache_scales import CacheScales
from vllm_gaudi_ucm.batch.window import WHOLE, Window
from vllm_gaudi_ucm.kv_cache.pair import KvPair, in_blocks
from vllm_gaudi_ucm.kv_cache.tile import DEFAULT_BLOCK_SIZE
from vllm_gaudi_ucm.ops.kv_cache.api import write_kv
from vllm_gaudi_ucm.ops.narrow_floats import E4M3, narrow
from vllm_gaudi_ucm.ops.unified_attention.ahead import add_ahead
from vllm_gaudi_ucm.ops.unified_attention.api import PreparedParts, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec, PerHead
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
    chunk_of,
)
from vllm_gaudi_ucm.vllm_api.cache_options import FLOAT_KV_DTYPES
from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheLayout, KVCacheSpec

if TYPE_CHECKING:
    from vllm_gaudi_ucm.attention.groups import GroupStep
    from vllm_gaudi_ucm.attention.spans import StepSpans
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase
    from vllm_gaudi_ucm.sparse.selection.layer_selector import LayerSelection, LayerSelector


@dataclass(frozen=True)
class UnifiedAttentionMetadata(AttentionMetadata):
    """The attention metadata of one step, the same for every layer of a KV-cache group.

    slots: int64 [rows], the slots to which the new K and V are written. parts: what the rows see, prepared once per
    step.
    sparse: the worker side of a sparse method, whose hooks run around the attention of each layer.
    summary_blocks: int64 [n], full blocks to be summarised.
    selection: the choices of the step; None if every request is dense.
    new_tokens: the causal part, which is then missing from `parts`; None if `parts` is complete. See
    `LatentSizes.divides`.
    chooses: whether rows attend to the tokens that they choose (DSA), because some may see more than they may choose.
    """

    slots: torch.Tensor
    parts: PreparedParts
    sparse: UcmSparseBase | None = None
    summary_blocks: torch.Tensor | None = None
    selection: LayerSelection | None = None
    new_tokens: PreparedParts | None = None
    chooses: bool = False


class UnifiedAttentionBackend(AttentionBackend):
    """Registered as CUSTOM: vLLM resolves an out-of-tree backend by this name only."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        *FLOAT_KV_DTYPES,
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type[UnifiedAttentionImpl]:
        chunk = chunk_of(cls)
        return UnifiedAttentionImpl if chunk is None else _attention_in_chunks(chunk)

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
        # tokens outside heads: a block's tokens are one run of memory, which is what gathering blocks copies. This is
        # the nearest of vLLM's layouts; none of them has separate keys and values
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True


class UnifiedAttentionImpl(AttentionImpl[UnifiedAttentionMetadata]):
    """Computes the attention of one layer, and refuses unsupported features by name.

    chunk: tokens of a chunk, if rows see only their own chunk (Llama 4); see `chunk_of`.
    attention_type: vLLM's type of the layers that a class computes.
    """

    chunk: ClassVar[int | None] = None
    attention_type: ClassVar[str] = AttentionType.DECODER

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
        narrow_cache = kv_cache_dtype.startswith("fp8")
        asked = {
            "ALiBi with a sliding window": alibi_slopes is not None and sliding_window is not None,
            "ALiBi with chunked local attention": alibi_slopes is not None and self.chunk is not None,
            "a sliding window with chunked local attention": sliding_window is not None and self.chunk is not None,
            # the scales belong to the other layer
            "keys and values of another layer in 8-bit floats (leave --kv-cache-dtype out)": (
                kv_sharing_target_layer_name is not None and narrow_cache
            ),
            f"attention type {attn_type!r}": attn_type != self.attention_type,
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
        self.sliding_window = sliding_window
        self._sinks: torch.Tensor | None = others.get("sinks")
        self._slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.spec = AttentionSpec(
            self.scale,
            # 0 stands for none
            logits_soft_cap or None,
            is_local=sliding_window is not None or self.chunk is not None,
            has_sinks=self._sinks is not None,
            has_slopes=self._slopes is not None,
        )
        self._per_head = PerHead(self._sinks, self._slopes)
        # another layer writes the keys and values of the new tokens
        self.shares = kv_sharing_target_layer_name is not None
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._layer_index = 0
        self._selector: LayerSelector | None = None
        self._kv_cache: KvPair | None = None
        self._views: KvPair | None = None
        self._group: GroupStep | None = None
        self._spans: StepSpans | None = None

    @property
    def window(self) -> Window | None:
        """Returns how far back rows see; None if they see all of their contexts."""
        if self.chunk is not None:
            return Window(self.chunk, chunked=True)
        by_distance = self.spec.has_slopes
        if self.sliding_window is None and not by_distance:
            return None
        return Window(self.sliding_window or WHOLE, by_distance=by_distance)

    def join(self, group: GroupStep | None) -> None:
        """Makes the layer read this group's steps, once the KV cache is allocated or given back; None if there is one
        group.
        """
        self._group = group
        # of the cache before
        self._kv_cache = self._views = None

    def see_spans(self, spans: StepSpans) -> None:
        """Makes rows of a span see each other in both directions."""
        self._spans = spans

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called by vLLM's loader once sinks have their values, in the dtype of the model."""
        sinks = None if self._sinks is None else self._sinks.detach().float()
        self._per_head = PerHead(sinks, self._slopes)

    def be_sparse(self, layer_index: int, selector: LayerSelector | None) -> None:
        """Makes the layer sparse, once the KV cache is allocated.

        layer_index: index among the model's layers, for hooks of a method.
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
        """Computes the attention of a step. Query, key, value: [rows, heads, head size]; kv_cache: the cache bound to
        the layer.

        Without metadata (in a memory measurement) attention is skipped and the output is zero.
        """
        if attn_metadata is None:
            return output.zero_()
        if self._group is not None:
            attn_metadata = self._group.metadata
        scales = None
        if self.shares:
            written = (kv_cache.key, kv_cache.value)
            key, value = (rows.index_select(0, attn_metadata.slots).to(query.dtype) for rows in written)
        elif kv_cache.key.dtype != E4M3:
            written = write_kv(key, value, kv_cache.key, kv_cache.value, attn_metadata.slots)
        else:
            scales = CacheScales.from_layer(layer, query.dtype)
            query, key, value = scales.divide(query, key, value)
            narrowed = narrow(key), narrow(value)
            written = write_kv(*narrowed, kv_cache.key, kv_cache.value, attn_metadata.slots)
        key_cache, value_cache = self._in_blocks(kv_cache, written, attn_metadata.parts.block_size)
        found = self._attend(
            query, key, value, key_cache, value_cache=value_cache, attn_metadata=attn_metadata, output=output
        )
        return found if scales is None else scales.restore(found, key.shape[1])

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        attn_metadata: UnifiedAttentionMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Runs attention, and the hooks of a sparse method around it."""
        sparse, parts = attn_metadata.sparse, attn_metadata.parts
        spans = self._spans
        if spans is not None and spans.current is not None and parts.parts.causal is not None:
            log_sums = query.new_empty(query.shape[:2], dtype=torch.float32)
            tensors = (query, key, value)
            unified_attention(
                *tensors, key_cache, value_cache=value_cache, parts=parts, spec=self.spec, out=output, log_sums=log_sums
            )
            return add_ahead(
                *tensors, spans.current, longest=spans.longest, spec=self.spec, out=output, log_sums=log_sums
            )
        if sparse is None:
            return unified_attention(
                query,
                key,
                value,
                key_cache,
                value_cache=value_cache,
                parts=parts,
                spec=self.spec,
                out=output,
                per_head=self._per_head,
            )
        # for methods that need it: a compiled region that reads it would be compiled once for each layer
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
            query,
            key,
            value,
            key_cache,
            value_cache=value_cache,
            parts=parts,
            spec=self.spec,
            out=place,
            selected_blocks=chosen,
            per_head=self._per_head,
        )
        finished = sparse.attention_finished(index, found)
        # vLLM's layer reads the output that it passed in
        return output if finished is output or finished is None else output.copy_(finished)

    def _in_blocks(self, kv_cache: KvPair, written: tuple[torch.Tensor, torch.Tensor], block_size: int) -> KvPair:
        """Returns views of the written cache. The cache is bound once, so the views are not made anew in every step."""
        if torch.compiler.is_compiling():
            # kept views would be graph inputs that share memory with the tensors that the graph writes
            return in_blocks(written, block_size)
        if self._views is None or self._kv_cache is not kv_cache:
            self._kv_cache, self._views = kv_cache, in_blocks(written, block_size)
        return self._views


@cache
def _attention_in_chunks(chunk: int) -> type[UnifiedAttentionImpl]:
    """Returns a class that knows the chunk size, because vLLM makes the object without passing the size."""
    return type("ChunkedAttentionImpl", (UnifiedAttentionImpl,), {"chunk": chunk})
