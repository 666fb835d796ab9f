"""Items of prompts that are no text: `vllm.multimodal`.

Internal: `MultiModalFeatureSpec`, an item with its place in a prompt and its hash, and its `MultiModalKwargsItem`, the
tensors that a processor has made of it; `MULTIMODAL_REGISTRY`, which has the processors; `MultiModalBudget`, which
bounds the embeddings of a step and those kept; `group_and_batch_mm_kwargs`, which makes the inputs of a model's encoder
of items; `sanity_check_mm_encoder_outputs`. A model with an encoder is a `SupportsMultiModal`.
"""

from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.v1.worker.utils import sanity_check_mm_encoder_outputs

__all__ = [
    "MULTIMODAL_REGISTRY",
    "MultiModalBudget",
    "MultiModalFeatureSpec",
    "MultiModalKwargsItem",
    "SupportsMultiModal",
    "group_and_batch_mm_kwargs",
    "sanity_check_mm_encoder_outputs",
]
