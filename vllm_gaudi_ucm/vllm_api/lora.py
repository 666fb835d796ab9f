"""Adapters of low rank: `vllm.lora`.

Extension point: `PunicaWrapperBase`, which a platform names and the layers with adapters call.
Internal: `LRUCacheWorkerLoRAManager` and `LRUCacheLoRAModelManager`, which load adapters and give them slots;
`LoRAModel` and `LoRALayerWeights`, what they load; `BaseLayerWithLoRA`, `BaseLinearLayerWithLoRA`,
`LogitsProcessorWithLoRA` and `VocabParallelEmbeddingWithLoRA`, the layers that they put in a model; `LoRARequest`, the
adapter that a request names; `LoRAAdapterNotFoundError`, which a server answers by 404; `MoERunner`,
`PPMissingLayer`, `QKVParallelLinear` and `MergedColumnParallelLinear`, the kinds of layers that differ;
`SupportsLoRA`, models with such layers.
"""

import torch
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.layers import (
    BaseLayerWithLoRA,
    LogitsProcessorWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.models import SupportsLoRA
from vllm.model_executor.models.utils import PPMissingLayer

__all__ = [
    "BaseLayerWithLoRA",
    "BaseLinearLayerWithLoRA",
    "LRUCacheLoRAModelManager",
    "LRUCacheWorkerLoRAManager",
    "LoRAAdapterNotFoundError",
    "LoRALayerWeights",
    "LoRAModel",
    "LoRARequest",
    "LogitsProcessorWithLoRA",
    "MergedColumnParallelLinear",
    "MoERunner",
    "PPMissingLayer",
    "PunicaWrapperBase",
    "QKVParallelLinear",
    "SupportsLoRA",
    "VocabParallelEmbeddingWithLoRA",
    "full_outputs",
    "write_through",
]


def full_outputs(layer: BaseLinearLayerWithLoRA) -> tuple[int, ...]:
    """Returns the outputs of each slice of a linear layer on all ranks together, as a checkpoint has them.

    Reason: a layer with adapters knows the outputs of its own rank, and each class of linear layers keeps the others
    under names of its own; heads of keys may be on several ranks.
    Remove when: `LinearBase` has the sizes of a checkpoint's matrices.
    """
    base = layer.base_layer
    if isinstance(base, QKVParallelLinear):
        keys = base.total_num_kv_heads
        sizes = base.total_num_heads * base.head_size, keys * base.head_size, keys * base.v_head_size
        return sizes if layer.n_slices == 3 else (sum(sizes),)
    if isinstance(base, MergedColumnParallelLinear):
        whole = tuple(base.output_sizes)
        return whole if layer.n_slices == len(whole) else (sum(whole),)
    return (base.output_size,)


def write_through(layer: BaseLayerWithLoRA, downs: tuple[torch.Tensor, ...], ups: tuple[torch.Tensor, ...]) -> None:
    """Has vLLM write adapters to these tensors instead of the stacked matrices that a layer was made with.

    downs: [slots, 1, rank, inputs] of each slice; of an embedding [slots, tokens, rank]. ups: [slots, 1, outputs, rank]
    of each slice.

    Reason: a layer allocates a tensor for each slice, and writes an adapter to a slot of it.
    Remove when: a layer can be given the memory of its adapters.
    """
    if isinstance(layer, BaseLinearLayerWithLoRA):
        layer.lora_a_stacked, layer.lora_b_stacked = downs, ups
    else:
        (layer.lora_a_stacked,), (layer.lora_b_stacked,) = downs, ups
