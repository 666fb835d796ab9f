"""Features that models that pool refuse: they yield no tokens, and encoders have no KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.config.exclusions import MEMORY_MODE, POLICIES, SPARSE, Option
from vllm_gaudi_ucm.connector.transfer_config import has_connector
from vllm_gaudi_ucm.platform.feature import Feature, where
from vllm_gaudi_ucm.vllm_api.platforms import attends_both_ways, is_pooling

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _divides_whole_prompts(config: VllmConfig) -> bool:
    return config.scheduler_config.enable_chunked_prefill and not config.model_config.is_chunked_prefill_supported


def _skips_needed_rows(config: VllmConfig) -> bool:
    return config.cache_config.enable_prefix_caching and not config.model_config.is_prefix_caching_supported


OF_POOLING: tuple[Feature[VllmConfig], ...] = (
    Feature(
        "drafts for a model that pools",
        "--speculative-config",
        "there are no tokens to verify",
        where(is_pooling, lambda c: c.speculative_config is not None),
    ),
    Feature(
        "custom logits processors with a model that pools",
        "--logits-processors",
        "nothing is sampled from logits; leave the flag out",
        where(is_pooling, lambda c: c.model_config.logits_processors),
    ),
    Feature(
        "a KV connector with a model that pools",
        "--kv-transfer-config or --kv-offloading-size",
        "prompts are pooled from hidden states, which stores do not keep; prefix caching works where vLLM allows it",
        where(is_pooling, has_connector),
    ),
    Feature(
        "prompts in chunks for an encoder, or for a pooler that needs whole prompts",
        "--enable-chunked-prefill",
        "the rows of a prompt are needed at once; leave the flag out",
        where(is_pooling, _divides_whole_prompts),
    ),
    Feature(
        "prefix caching with an encoder, or with a pooler that needs whole prompts",
        "--enable-prefix-caching",
        "hidden states of a known prefix are not kept; leave the flag out",
        where(is_pooling, _skips_needed_rows),
    ),
    Feature(
        "stages of an encoder",
        "--pipeline-parallel-size",
        "vLLM's encoders are no stages; take --tensor-parallel-size",
        where(attends_both_ways, lambda c: c.parallel_config.pipeline_parallel_size > 1),
    ),
)
"""Features of vLLM, see `features`."""


def _option(option: Option, why: str, is_model: Callable[[VllmConfig], bool], model: str) -> Feature[VllmConfig]:
    return Feature(f"{option.words} with {model}", option.key, why, is_model)


_ENCODER = "an encoder, which has no KV cache"

OPTIONS_OF_POOLING: tuple[tuple[Option, Feature[VllmConfig]], ...] = (
    (SPARSE, _option(SPARSE, "prompts are computed densely, and nothing is decoded", is_pooling, "a model that pools")),
    (MEMORY_MODE, _option(MEMORY_MODE, "only decodes read offloaded blocks", is_pooling, "a model that pools")),
    *((policy, _option(policy, "it decides about blocks", attends_both_ways, _ENCODER)) for policy in POLICIES),
)
"""Our options, and the row that an engine asks for if the option is on."""
