"""Models, their layers, and the context of a forward pass: `vllm.model_executor`, `vllm.forward_context`.

Extension point: a platform plugin replaces a `CustomOp`, such as `RMSNorm`, `GemmaRMSNorm`, `SiluAndMul`,
`RotaryEmbedding` and those derived from it (`LinearScalingRotaryEmbedding`, `Llama3RotaryEmbedding`,
`NTKScalingRotaryEmbedding`, `DynamicNTKScalingRotaryEmbedding`, `DynamicNTKAlphaRotaryEmbedding`,
`YaRNScalingRotaryEmbedding`), by a subclass; `op_registry_oot` is where vLLM keeps them.
Internal: `get_model`; `Attention`, `AttentionLayerBase`, `LinearBase`, `ParallelLMHead`, `UnquantizedEmbeddingMethod`,
`UnquantizedLinearMethod` and `VocabParallelEmbedding`, the layers that we look for in a model; `ForwardContext`,
`get_forward_context`, `is_forward_context_available` and `set_forward_context`, through which layers find the step's
metadata.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available, set_forward_context
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope import DynamicNTKAlphaRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import DynamicNTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import get_model

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.attention import AttentionLayer

__all__ = [
    "Attention",
    "AttentionLayerBase",
    "CustomOp",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "ForwardContext",
    "GemmaRMSNorm",
    "LinearBase",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "NTKScalingRotaryEmbedding",
    "ParallelLMHead",
    "RMSNorm",
    "RotaryEmbedding",
    "SiluAndMul",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "VocabParallelEmbedding",
    "YaRNScalingRotaryEmbedding",
    "forget_names",
    "get_forward_context",
    "get_model",
    "is_forward_context_available",
    "op_registry_oot",
    "set_forward_context",
]


class NamelessAttention(Attention):
    """vLLM's attention layer, which finds the step's metadata without its own name, where all layers have the same.

    Not for connectors that are called in layers.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """query: [rows, heads * head size] or [rows, heads, head size]; key, value: the same of the KV heads."""
        shape = (query.shape[0], self.num_heads * self.head_size_v) if output_shape is None else output_shape
        output = torch.empty(shape, dtype=output_dtype or query.dtype, device=query.device)
        metadata: Any = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            metadata = metadata[self.layer_name]
        self.impl.forward(
            cast("AttentionLayer", self),
            query.view(-1, self.num_heads, self.head_size),
            key.view(-1, self.num_kv_heads, self.head_size),
            value.view(-1, self.num_kv_heads, self.head_size_v),
            self.kv_cache,
            metadata,
            output=output.view(-1, self.num_heads, self.head_size_v),
        )
        return output.view(-1, shape[-1])


def forget_names(model: nn.Module) -> None:
    """Makes a model's attention layers `NamelessAttention`: their names are in no graph any more.

    Reason: `Attention.forward` looks itself up by its name, a string that differs between layers: dynamo compiles each
    layer once more for it, and `hpu_backend` a recipe. The name reaches vLLM's opaque operator as a tensor's like, but
    that operator has no lowering on Gaudi.
    Remove when: `Attention.forward` calls its own `impl` with its own cache.
    """
    for module in model.modules():
        if type(module) is Attention:
            module.__class__ = NamelessAttention
