"""Gives a draft head states of layers, embeddings and the output layer of the model that it drafts for."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def formats_by_checkpoint(vllm_config: VllmConfig, added: str) -> VllmConfig:
    """Returns the configuration for a head whose layers have names with a prefix that its checkpoint does not have.

    added: the prefix.

    Reason: a configuration of quantised weights names layers as the checkpoint does, and gets the names of modules.
    vLLM's own runner gives a head no prefix.
    Remove when: a head's layers are known apart from the model's without a prefix.
    """
    if vllm_config.quant_config is None:
        return vllm_config
    own, formats = copy.copy(vllm_config), copy.copy(vllm_config.quant_config)
    method_of = formats.get_quant_method

    def get_quant_method(layer: nn.Module, prefix: str) -> Any:
        return method_of(layer, prefix.removeprefix(f"{added}."))

    vars(formats)["get_quant_method"] = get_quant_method
    own.quant_config = formats
    return own


def pass_layers(head: Any, model: Any) -> Any:
    """Makes the model pass on the states of some of its layers; returns the function that combines them.

    Reason: vLLM's own runner alone tells a model which states an EAGLE-3 head reads.
    Remove when: vLLM does so when it loads a head.

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


def share_weights(head: Any, model: Any) -> None:
    """Gives the head the model's embeddings and output layer if its checkpoint has none (see `process_eagle_weight`).

    A head for multi-token prediction (MTP) is part of the model's checkpoint, and always shares both.

    Reason: vLLM's proposers share weights while they load a head, and cannot be made without its runner.
    Remove when: vLLM has a function for it.
    """
    if not getattr(head, "has_own_embed_tokens", False):
        head.model.embed_tokens = model.model.embed_tokens
    if getattr(head, "has_own_lm_head", False):
        return
    head.lm_head = model.lm_head
    layers = head.model.layers
    each: Iterable[Any] = layers.values() if isinstance(layers, nn.ModuleDict) else layers
    for layer in each:
        if hasattr(layer, "shared_head"):
            layer.shared_head.head = model.lm_head
