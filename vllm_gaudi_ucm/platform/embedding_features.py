"""Features that prompts of embeddings refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.platform.feature import Feature
from vllm_gaudi_ucm.vllm_api.platforms import reads_pictures

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _if(found: Callable[[VllmConfig], object]) -> Callable[[VllmConfig], object]:
    return lambda config: config.model_config is not None and config.model_config.enable_prompt_embeds and found(config)


OF_PROMPT_EMBEDDINGS: tuple[Feature[VllmConfig], ...] = (
    Feature(
        "prompt embeddings with a model that reads pictures",
        "--enable-prompt-embeds",
        "one table holds a step's embeddings; --language-model-only serves the text model alone",
        _if(reads_pictures),
    ),
    Feature(
        "prompt embeddings with pipeline stages",
        "--enable-prompt-embeds",
        "it has not been tried; take --tensor-parallel-size",
        _if(lambda c: c.parallel_config.pipeline_parallel_size > 1),
    ),
    Feature(
        "prompt embeddings with a draft model",
        "--enable-prompt-embeds",
        "it would read token 0 for each embedding; take the method `ngram`",
        _if(lambda c: c.speculative_config is not None and c.speculative_config.method == "draft_model"),
    ),
    Feature(
        "prompt embeddings with a model that pools",
        "--enable-prompt-embeds",
        "it has not been tried; send tokens",
        _if(lambda c: c.model_config.runner_type == "pooling"),
    ),
    Feature(
        "prompt embeddings with several engines",
        "--enable-prompt-embeds",
        "it has not been tried; take --tensor-parallel-size",
        _if(lambda c: c.parallel_config.data_parallel_size > 1),
    ),
)
