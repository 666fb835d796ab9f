"""Options of a prefetch engine as the whole configuration gives them: those in GSA's section count, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.sparse.options import GsaOptions

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig


def connector_prefetch(options: PrefetchOptions, config: UcmConfig) -> PrefetchOptions:
    """The connector's options, over those in the section of GSA where that method selects; what was given stands."""
    section = _gsa_section(config)
    if section is None:
        return options
    shared = {name for name in PrefetchOptions.model_fields if name in GsaOptions.model_fields}
    return options.model_copy(update={name: getattr(section, name) for name in shared - options.model_fields_set})


def memory_mode_prefetch(config: UcmConfig) -> PrefetchOptions:
    """Those of GSA where that method selects, else the defaults; never more host memory than what is on its way."""
    options = connector_prefetch(PrefetchOptions(), config)
    useful = 2 * config.memory_mode.moves_per_step + blocks_ahead(config)
    return options.model_copy(update={"prefetch_cache_size": min(options.prefetch_cache_size, useful)})


def blocks_ahead(config: UcmConfig) -> int:
    """Blocks that wait for their turn to come back, and may be brought to host memory meanwhile.

    `prefetch_ahead` counts steps' worth of them. Copies in host memory are near enough.
    """
    if config.memory_mode.is_in_host_memory:
        return 0
    return connector_prefetch(PrefetchOptions(), config).prefetch_ahead * config.memory_mode.moves_per_step


def idle_options(config: UcmConfig) -> list[str]:
    """Prefetch options in GSA's section that are not the defaults, and do nothing without our connector.

    Memory mode uses them: with copies in host memory their threads only, else all.
    """
    section, memory_mode = _gsa_section(config), config.memory_mode
    if section is None or (memory_mode.enabled and not memory_mode.is_in_host_memory):
        return []
    used = {"prefetch_workers"} if memory_mode.enabled else set()
    shared = [name for name in GsaOptions.model_fields if name in PrefetchOptions.model_fields and name not in used]
    return [name for name in shared if getattr(section, name) != GsaOptions.model_fields[name].default]


def _gsa_section(config: UcmConfig) -> GsaOptions | None:
    """The options of GSA, also where it is KVStar's base method; None where it does not select."""
    if config.ucm_sparse_method is None:
        return None
    options = config.ucm_sparse_config.options(config.ucm_sparse_method)
    base = getattr(options, "base_options", None)
    selecting = options if base is None else base()
    return selecting if isinstance(selecting, GsaOptions) else None
