"""Loads the model whose tokens an engine samples, with a table for embeddings of pictures if it reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.multimodal.embedding_table import EmbeddingTable
from vllm_gaudi_ucm.vllm_api.deepstack import num_levels
from vllm_gaudi_ucm.vllm_api.loading import Weights, get_model
from vllm_gaudi_ucm.vllm_api.model import as_trained, densely, tokens_chosen
from vllm_gaudi_ucm.vllm_api.multimodal import MULTIMODAL_REGISTRY, MultiModalBudget

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = plugin_logger(__name__)


def load_target_model(vllm_config: VllmConfig, weights: Weights | None, device: torch.device) -> nn.Module:
    """Returns the model. weights: instead of its checkpoint's. device: for the table of embeddings."""
    config = vllm_config.model_config
    chosen = tokens_chosen(config)
    if chosen is not None:
        logger.warning(
            "%s has each row choose %s tokens (DSA). Here every row attends to all tokens before it: longer contexts "
            "take more time, and give other logits than the model was trained for.",
            config.architecture,
            chosen,
        )
        return get_model(vllm_config=densely(vllm_config), weights=weights)
    model = get_model(vllm_config=vllm_config, weights=weights)
    as_trained(model, config.hf_text_config.model_type)
    if config.supports_multimodal_inputs:
        # not a parameter: a plain attribute, which `EmbeddingRows` and `Decoder` look for
        vars(model)["embedding_table"] = _table(vllm_config, device, 1 + num_levels(model))
    return model


def _table(vllm_config: VllmConfig, device: torch.device, levels: int) -> EmbeddingTable:
    """Returns a table with as many rows as vLLM's scheduler counts. levels: of the encoder that the decoder reads."""
    config = vllm_config.model_config
    budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
    logger.info("Up to %d embeddings of pictures are kept", budget.encoder_cache_size)
    return EmbeddingTable(budget.encoder_cache_size, levels * config.get_inputs_embeds_size(), config.dtype, device)
