"""Models, their layers, and the context of a forward pass: `vllm.model_executor`, `vllm.forward_context`.

Extension point: a platform plugin replaces a `CustomOp`, such as `RMSNorm`, `GemmaRMSNorm`, `SiluAndMul`, `GeluAndMul`,
`GeluAndMulSparse` (the gate of Gemma 3n), `MMEncoderAttention` (the attention of encoders of pictures),
`RotaryEmbedding` and those derived from it (`LinearScalingRotaryEmbedding`, `Llama3RotaryEmbedding`,
`NTKScalingRotaryEmbedding`, `DynamicNTKScalingRotaryEmbedding`, `DynamicNTKAlphaRotaryEmbedding`,
`YaRNScalingRotaryEmbedding`), by a subclass; `op_registry_oot` is vLLM's registry of them.
Internal: `Attention`, `AttentionLayerBase`, `ChunkedLocalAttention`, `EncoderOnlyAttention`, `LinearBase`,
`ParallelLMHead`, `UnquantizedEmbeddingMethod`, `UnquantizedLinearMethod` and `VocabParallelEmbedding`, the layers that
we search for in a model; `ForwardContext`, `get_forward_context`, `is_forward_context_available` and
`set_forward_context`, through which layers find the step's metadata; `PPMissingLayer`, which stands for a layer of
another stage of a pipeline; `extract_layer_index`, which reads the number in a layer's name; `BasevLLMParameter`, the
class of loaded weights.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available, set_forward_context
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import GeluAndMul, GeluAndMulSparse, SiluAndMul
from vllm.model_executor.layers.attention import (
    Attention,
    ChunkedLocalAttention,
    EncoderOnlyAttention,
    MMEncoderAttention,
)
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
from vllm.model_executor.models.utils import PPMissingLayer, extract_layer_index
from vllm.model_executor.parameter import BasevLLMParameter

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_ucm.vllm_api.attention import AttentionLayer

__all__ = [
    "Attention",
    "AttentionLayerBase",
    "ChunkedLocalAttention",
    "CustomOp",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "EncoderOnlyAttention",
    "ForwardContext",
    "GeluAndMul",
    "GeluAndMulSparse",
    "GemmaRMSNorm",
    "LinearBase",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "MMEncoderAttention",
    "NTKScalingRotaryEmbedding",
    "PPMissingLayer",
    "ParallelLMHead",
    "RMSNorm",
    "RotaryEmbedding",
    "SiluAndMul",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "VocabParallelEmbedding",
    "YaRNScalingRotaryEmbedding",
    "as_trained",
    "extract_layer_index",
    "follow_indexer_types",
    "forget_names",
    "get_forward_context",
    "has_attention",
    "is_forward_context_available",
    "op_registry_oot",
    "plain_parameters",
    "set_forward_context",
    "shares_chosen_tokens",
    "text_model",
    "tokens_to_choose",
]


class NamelessAttention(Attention):
    """vLLM's attention layer, which finds the step's metadata without its own name, if all layers have the same.

    Not for connectors that are called in layers.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """query: [rows, heads * head size] or [rows, heads, head size]; key, value: the same of the KV heads; None in a
        layer that reads what another one has written.
        """
        shape = (query.shape[0], self.num_heads * self.head_size_v) if output_shape is None else output_shape
        output = torch.empty(shape, dtype=output_dtype or query.dtype, device=query.device)
        metadata: Any = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            metadata = metadata[self.layer_name]
        self.impl.forward(
            cast("AttentionLayer", self),
            query.view(-1, self.num_heads, self.head_size),
            cast(torch.Tensor, None if key is None else key.view(-1, self.num_kv_heads, self.head_size)),
            cast(torch.Tensor, None if value is None else value.view(-1, self.num_kv_heads, self.head_size_v)),
            self.kv_cache,
            metadata,
            output=output.view(-1, self.num_heads, self.head_size_v),
        )
        return output.view(-1, shape[-1])


class NamelessChunkedAttention(NamelessAttention, ChunkedLocalAttention):
    """The same of a layer whose rows see their own chunk alone."""


class NamelessEncoderAttention(NamelessAttention, EncoderOnlyAttention):
    """The same of a layer whose rows see both ways."""


_NAMELESS: dict[type, type] = {
    Attention: NamelessAttention,
    ChunkedLocalAttention: NamelessChunkedAttention,
    EncoderOnlyAttention: NamelessEncoderAttention,
}


def has_attention(layer: AttentionLayerBase) -> bool:
    """Returns whether a layer has attention; others keep a state, or nothing.

    Reason: vLLM's base class names `impl` for all layers, and layers with a state do not set it.
    Remove when: the base class tells the kinds of layers apart.
    """
    return hasattr(layer, "impl")


def forget_names(model: nn.Module) -> None:
    """Makes a model's attention layers `NamelessAttention`: their names are in no graph any more.

    Reason: `Attention.forward` looks itself up by its name, a string that differs between layers: dynamo compiles each
    layer once more for it, and `hpu_backend` a recipe. The name reaches vLLM's opaque operator as a tensor's like, but
    that operator has no lowering on Gaudi.
    Remove when: `Attention.forward` calls its own `impl` with its own cache.
    """
    for module in model.modules():
        if nameless := _NAMELESS.get(type(module)):
            module.__class__ = nameless


def plain_parameters(model: nn.Module) -> None:
    """Makes every loaded weight an `nn.Parameter` over the same memory, shared ones still shared.

    Reason: dynamo follows `__torch_function__` of vLLM's parameters into endless recursion if a layer reads an
    attribute of its weight, as the gate of GLM-4.5's and DeepSeek V3's experts does. The purpose of these classes, the
    loading of weights, is over by then.
    Remove when: they leave `__torch_function__` alone, as it does nothing there.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(weight, BasevLLMParameter):
                plain = made.setdefault(id(weight), nn.Parameter(weight.data, requires_grad=False))
                module.register_parameter(name, plain)


def as_trained(model: nn.Module, family: str) -> None:
    """Gives a loaded BLOOM the activation that it was trained with: GELU by its approximation with tanh.

    Reason: `BloomMLP` takes the exact GELU, which moves logprobs of a small random model by 0.001, while float32 and
    float64 of Transformers agree to 0.00001.
    Remove when: `BloomMLP` takes "gelu_pytorch_tanh".
    family: the `model_type` of its configuration.
    """
    if family != "bloom":
        return
    from vllm.model_executor.models.bloom import BloomMLP

    for module in model.modules():
        if isinstance(module, BloomMLP):
            module.gelu_impl = nn.GELU(approximate="tanh")


def text_model(model: nn.Module) -> nn.Module:
    """Returns the part of a model that a step runs: the model of text in one that reads pictures, otherwise all of it.

    Reason: only models with several parts have `get_language_model`.
    Remove when: every model of vLLM has it.
    """
    found = getattr(model, "get_language_model", None)
    return model if found is None else cast("nn.Module", found())


def sees_both_ways_in_windows(model: nn.Module) -> bool:
    """Returns whether rows of a picture see each other only in layers with a window, as in Gemma 4.

    Reason: such a model takes the spans of pictures out of the metadata of its other layers, which is vLLM's own.
    Remove when: a layer says what it sees.
    """
    return hasattr(model, "_clear_mm_prefix_for_full_attn_layers")


def tokens_to_choose(vllm_config: "VllmConfig") -> int:
    """Returns how many tokens each row of the model chooses by itself (DSA); 0 for every other family, and if no
    context has more.

    Reason: only the configurations of those families have `index_topk`, and vLLM has no property that says it.
    Remove when: `ModelConfig` has one.
    """
    found = cast("int | None", getattr(vllm_config.model_config.hf_text_config, "index_topk", None))
    return found if found is not None and found < vllm_config.model_config.max_model_len else 0


def follow_indexer_types(model_config: "ModelConfig") -> None:
    """Gives a configuration that lists the kinds of indexers the pattern that vLLM's models read.

    Reason: `deepseek_v2` does not read `indexer_types`, which a checkpoint of GLM-5 may have alone. It would make an
    indexer without weights in each layer.
    Remove when: it does.
    """
    config = model_config.hf_text_config
    kinds = getattr(config, "indexer_types", None)
    if kinds and hasattr(config, "index_topk") and getattr(config, "index_topk_pattern", None) is None:
        config.index_topk_pattern = "".join("S" if kind == "shared" else "F" for kind in kinds)


def shares_chosen_tokens(model_config: "ModelConfig") -> bool:
    """Returns whether some layers of such a model take the choices of an earlier layer.

    Reason: only the configuration of the model tells it, by a pattern or by how many layers share a choice.
    Remove when: as for `tokens_to_choose`.
    """
    config = model_config.hf_text_config
    pattern = getattr(config, "index_topk_pattern", None)
    return "S" in pattern if pattern is not None else getattr(config, "index_topk_freq", 1) > 1
