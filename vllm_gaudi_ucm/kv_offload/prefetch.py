"""How memory mode's engine loads: GSA's options, as far as they have something to do there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.prefetch.options import PrefetchOptions

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig


def prefetch_options(config: UcmConfig) -> PrefetchOptions:
    """Those of GSA where that method selects, else the defaults; never more host memory than what is on its way."""
    options = PrefetchOptions().over_gsa(config)
    useful = 2 * config.memory_mode.moves_per_step + blocks_ahead(config)
    return options.model_copy(update={"prefetch_cache_size": min(options.prefetch_cache_size, useful)})


def blocks_ahead(config: UcmConfig) -> int:
    """Blocks that wait for their turn to come back, and may be brought to host memory meanwhile.

    `prefetch_ahead` counts steps' worth of them. Copies in host memory are near enough.
    """
    if config.memory_mode.is_in_host_memory:
        return 0
    return PrefetchOptions().over_gsa(config).prefetch_ahead * config.memory_mode.moves_per_step
