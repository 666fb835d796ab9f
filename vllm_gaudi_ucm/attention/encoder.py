"""The attention backend of an encoder's layers: rows see all tokens of their request, and nothing is cached."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionBackend, UnifiedAttentionImpl, UnifiedAttentionMetadata
from vllm_gaudi_ucm.ops.unified_attention.api import unified_attention
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.attention import AttentionLayer, AttentionType

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.batch.window import Window
    from vllm_gaudi_ucm.kv_cache.pair import KvPair


class EncoderAttentionBackend(UnifiedAttentionBackend):
    """The backend of vLLM's `EncoderOnlyAttention`."""

    @classmethod
    def get_impl_cls(cls) -> type[UnifiedAttentionImpl]:
        return EncoderAttentionImpl


class EncoderAttentionImpl(UnifiedAttentionImpl):
    """Computes the attention of one layer of an encoder.

    With `sliding_window`, rows see tokens less than this far away, in either direction.
    """

    attention_type = AttentionType.ENCODER_ONLY

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        asked = {
            "ALiBi in an encoder": self.spec.has_slopes,
            "keys and values of another layer in an encoder": self.shares,
        }
        for feature, is_asked in asked.items():
            if is_asked:
                raise UnsupportedFeatureError(feature, "an attention layer of the model")
        self.spec = replace(self.spec, is_local=False, both_ways=True, reach=self.sliding_window)

    @property
    def window(self) -> Window | None:
        """Returns None: nothing is cached, and the reach of a row is a part of the specification."""
        return None

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KvPair,  # type: ignore[override]  # an empty tensor, which is not read
        attn_metadata: UnifiedAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the attention of a step, as UnifiedAttentionImpl does."""
        if attn_metadata is None:
            return output.zero_()
        parts = attn_metadata.parts
        no_blocks = key.new_empty((0, parts.block_size, *key.shape[1:]))
        no_values = value.new_empty((0, parts.block_size, *value.shape[1:]))
        return unified_attention(
            query,
            key,
            value,
            no_blocks,
            value_cache=no_values,
            parts=parts,
            spec=self.spec,
            out=output,
            per_head=self._per_head,
        )
