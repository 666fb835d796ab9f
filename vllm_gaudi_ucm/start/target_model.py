"""Loads the model whose tokens an engine samples, with the encoder of its pictures if it reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from vllm_gaudi_ucm.attention.spans import StepSpans
from vllm_gaudi_ucm.batch.picture_spans import SPANS
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.multimodal.embedding_table import EmbeddingTable
from vllm_gaudi_ucm.multimodal.item_encoder import ItemEncoder
from vllm_gaudi_ucm.vllm_api.loading import Weights, get_model
from vllm_gaudi_ucm.vllm_api.model import as_trained, sees_both_ways_in_windows, tokens_to_choose
from vllm_gaudi_ucm.vllm_api.platforms import reads_pictures

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.device import Device

logger = plugin_logger(__name__)


def load_target_model(vllm_config: VllmConfig, weights: Weights | None, device: Device, *, static: bool) -> nn.Module:
    """Returns the model.

    Args:
        weights: instead of its checkpoint's.
        device: encodes pictures.
        static: steps run at static shapes, so pictures are encoded one by one.
    """
    config = vllm_config.model_config
    chosen = tokens_to_choose(vllm_config)
    if chosen:
        logger.info("%s: each row attends to the %s tokens that it chooses (DSA).", config.architecture, chosen)
    model = get_model(vllm_config=vllm_config, weights=weights)
    as_trained(model, config.hf_text_config.model_type)
    if reads_pictures(vllm_config):
        encoder = ItemEncoder(model, vllm_config, device, one_by_one=static)
        if config.is_mm_prefix_lm:
            # not a module
            vars(model)[SPANS] = StepSpans(
                encoder.longest, captured=static, in_windows=sees_both_ways_in_windows(model)
            )
    elif config.enable_prompt_embeds:
        # of the tokens of one step
        rows, dtype = vllm_config.scheduler_config.max_num_batched_tokens, cast(torch.dtype, config.dtype)
        EmbeddingTable(rows, config.get_inputs_embeds_size(), dtype, device.torch_device()).give_to(model)
    return model
