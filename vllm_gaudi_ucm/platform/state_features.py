"""Features that models with a state in some layers refuse, and what such a model switches off."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.platform.feature import Feature, where
from vllm_gaudi_ucm.vllm_api.platforms import keeps_states, place_states_outside_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = plugin_logger(__name__)


def _row(name: str, flag: str, why: str, found: Callable[[VllmConfig], object]) -> Feature[VllmConfig]:
    return Feature(f"{name} with layers that keep a state", flag, why, where(keeps_states, found))


def _loads_every_router(config: VllmConfig) -> str | None:
    """Returns the class of Granite 4-h with experts, if there are several stages."""
    model = config.model_config
    if model is None or config.parallel_config.pipeline_parallel_size == 1:
        return None
    experts = model.hf_text_config.to_dict().get("num_local_experts")
    return model.architecture if experts and model.architecture == "GraniteMoeHybridForCausalLM" else None


OF_STATES: tuple[Feature[VllmConfig], ...] = (
    _row(
        "a history of inputs in place of states",
        "--use-replayssm",
        "states are updated in place; leave the flag out",
        lambda c: c.cache_config.use_replayssm,
    ),
    _row(
        "stochastic rounding",
        "--enable-mamba-cache-stochastic-rounding",
        "states are rounded to the nearest; take --mamba-ssm-cache-dtype float32",
        lambda c: c.mamba_config.enable_stochastic_rounding,
    ),
    Feature(
        "pipeline stages of {found} with experts",
        "--pipeline-parallel-size",
        "its loader does not leave out the routers of other stages; take --tensor-parallel-size",
        _loads_every_router,
    ),
)


def choose_kept_states(vllm_config: VllmConfig, kept_states: int) -> None:
    """Switches prefix caching off for a model whose layers keep a state, unless states behind blocks are kept."""
    if keeps_states(vllm_config) and place_states_outside_blocks(vllm_config, caches_prefixes=kept_states > 0):
        logger.info("Prefix caching is off: some layers keep a state, and ucm.kv_cache.kept_states is 0.")
