"""Draft heads: layers that propose drafts from the hidden states of the model (EAGLE, EAGLE-3, MTP)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from vllm_gaudi_ucm.batch.hidden_places import num_places
from vllm_gaudi_ucm.execution.passed_states import HeadStates, PassedStates
from vllm_gaudi_ucm.vllm_api.loading import get_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def load_draft_head(vllm_config: VllmConfig, model: nn.Module, prefix: str, device: torch.device) -> nn.Module:
    """Loads the head of `speculative_config`, and joins it to the model by a table of hidden states.

    vLLM builds a head with the configuration of the model. A head without embeddings or an output layer of its own
    shares those of the model.

    Args:
        model: the model whose tokens it proposes.
        prefix: prefix of the names of its layers.
    """
    config = vllm_config.speculative_config
    assert config is not None, "a draft head without speculative decoding"
    head_config = config.draft_model_config
    head: Any = get_model(
        vllm_config=vllm_config, prefix=prefix, load_config=config.draft_load_config, model_config=head_config
    )
    _share_weights(head, cast(Any, model))
    scheduler = vllm_config.scheduler_config
    places = num_places(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, config.num_speculative_tokens)
    shape = (places, head_config.get_hidden_size())
    values = torch.zeros(shape, dtype=cast(torch.dtype, head_config.dtype), device=device)
    HeadStates(values).give_to(head)
    combine = _pass_layers(head, cast(Any, model)) if config.method == "eagle3" else nn.Identity()
    PassedStates(values, combine).give_to(model)
    return cast(nn.Module, head)


def _pass_layers(head: Any, model: Any) -> Any:
    """Makes the model pass on the states of some of its layers; returns the function that combines them.

    Raises:
        ValueError: the model cannot.
    """
    config = head.config
    if not head.model.use_aux_hidden_state:
        return nn.Identity()
    if not hasattr(model, "set_aux_hidden_state_layers"):
        raise ValueError(
            f"--speculative-config: an EAGLE-3 head reads hidden states of several layers, and {type(model).__name__} "
            "passes on only the last; take a head for another method, or `ngram`"
        )
    # as vLLM's runner looks for them
    in_section = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    named = getattr(config, "eagle_aux_hidden_state_layer_ids", None) or in_section
    layers = named or model.get_eagle3_default_aux_hidden_state_layers()
    model.set_aux_hidden_state_layers(tuple(layers))
    return head.combine_hidden_states


def _share_weights(head: Any, model: Any) -> None:
    """Gives the head the model's embeddings and output layer if its checkpoint has none (see `process_eagle_weight`).

    A head for multi-token prediction (MTP) is part of the model's checkpoint, and always shares both.
    """
    if not getattr(head, "has_own_embed_tokens", False):
        head.model.embed_tokens = model.model.embed_tokens
    if getattr(head, "has_own_lm_head", False):
        return
    head.lm_head = model.lm_head
    layers = head.model.layers
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        if hasattr(layer, "shared_head"):
            layer.shared_head.head = model.lm_head
