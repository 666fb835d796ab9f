"""Models, their layers, and the context of a forward pass: `vllm.model_executor`, `vllm.forward_context`.

Extension point: a platform plugin replaces a `CustomOp`, such as `RMSNorm`, `RotaryEmbedding` and `SiluAndMul`, by a
subclass; `op_registry_oot` is where vLLM keeps them.
Internal: `get_model`; `Attention`, `AttentionLayerBase`, `LinearBase`, `ParallelLMHead`, `UnquantizedEmbeddingMethod`
and `UnquantizedLinearMethod`, the layers that we look for in a model; `ForwardContext`, `get_forward_context`,
`is_forward_context_available` and `set_forward_context`, through which layers find the step's metadata.
"""

from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available, set_forward_context
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model

__all__ = [
    "Attention",
    "AttentionLayerBase",
    "CustomOp",
    "ForwardContext",
    "LinearBase",
    "ParallelLMHead",
    "RMSNorm",
    "RotaryEmbedding",
    "SiluAndMul",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "get_forward_context",
    "get_model",
    "is_forward_context_available",
    "op_registry_oot",
    "set_forward_context",
]
