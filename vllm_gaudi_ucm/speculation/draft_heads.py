"""Draft heads: layers that propose drafts from the hidden states of the model (EAGLE, EAGLE-3, MTP)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from vllm_gaudi_ucm.batch.hidden_places import num_places
from vllm_gaudi_ucm.execution.passed_states import HeadStates, PassedStates
from vllm_gaudi_ucm.vllm_api.draft_heads import formats_by_checkpoint, pass_layers, share_weights
from vllm_gaudi_ucm.vllm_api.loading import get_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def load_draft_head(vllm_config: VllmConfig, model: nn.Module, prefix: str, device: torch.device) -> nn.Module:
    """Loads the head of `speculative_config`, and joins it to the model by a table of hidden states.

    vLLM builds a head with the configuration of the model. A head without embeddings or an output layer of its own
    shares them with the model.

    Args:
        model: the model whose tokens it proposes.
        prefix: prefix of the names of its layers.
    """
    config = vllm_config.speculative_config
    assert config is not None, "a draft head without speculative decoding"
    head_config = config.draft_model_config
    head: Any = get_model(
        vllm_config=formats_by_checkpoint(vllm_config, prefix),
        prefix=prefix,
        load_config=config.draft_load_config,
        model_config=head_config,
    )
    share_weights(head, cast(Any, model))
    scheduler = vllm_config.scheduler_config
    places = num_places(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, config.num_speculative_tokens)
    shape = (places, head_config.get_hidden_size())
    values = torch.zeros(shape, dtype=cast(torch.dtype, head_config.dtype), device=device)
    HeadStates(values).give_to(head)
    combine = pass_layers(head, cast(Any, model)) if config.method == "eagle3" else nn.Identity()
    PassedStates(values, combine).give_to(model)
    return cast(nn.Module, head)
