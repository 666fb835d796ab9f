"""Features that prompts of embeddings refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.transfer_config import LMCACHE, connector_names
from vllm_gaudi_ucm.platform.feature import Feature, where
from vllm_gaudi_ucm.vllm_api.platforms import computes_drafts, reads_pictures

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _takes_embeddings(config: VllmConfig) -> bool:
    return config.model_config is not None and config.model_config.enable_prompt_embeds


def _layers_embed_tokens(config: VllmConfig) -> bool:
    return bool(config.model_config.hf_text_config.to_dict().get("hidden_size_per_layer_input"))


OF_PROMPT_EMBEDDINGS: tuple[Feature[VllmConfig], ...] = (
    Feature(
        "prompt embeddings with a model that reads pictures",
        "--enable-prompt-embeds",
        "one table holds a step's embeddings; --language-model-only serves the text model alone",
        where(_takes_embeddings, reads_pictures),
    ),
    Feature(
        "prompt embeddings with the KV connector LMCacheConnectorV1",
        "--enable-prompt-embeds",
        "LMCache finds blocks by their tokens; take UcmConnector",
        where(_takes_embeddings, lambda c: LMCACHE in connector_names(c)),
    ),
    Feature(
        "prompt embeddings with a model whose layers embed tokens",
        "--enable-prompt-embeds",
        "its layers read tokens; send tokens, without the flag",
        where(_takes_embeddings, _layers_embed_tokens),
    ),
    Feature(
        "prompt embeddings with pipeline stages",
        "--enable-prompt-embeds",
        "it has not been tried; take --tensor-parallel-size",
        where(_takes_embeddings, lambda c: c.parallel_config.pipeline_parallel_size > 1),
    ),
    Feature(
        "prompt embeddings with a draft model",
        "--enable-prompt-embeds",
        "it would read token 0 for each embedding; take the method `ngram`",
        where(_takes_embeddings, lambda c: computes_drafts(c.speculative_config)),
    ),
    Feature(
        "prompt embeddings with a model that pools",
        "--enable-prompt-embeds",
        "it has not been tried; send tokens",
        where(_takes_embeddings, lambda c: c.model_config.runner_type == "pooling"),
    ),
    Feature(
        "prompt embeddings with several engines",
        "--enable-prompt-embeds",
        "it has not been tried; take --tensor-parallel-size",
        where(_takes_embeddings, lambda c: c.parallel_config.data_parallel_size > 1),
    ),
)
