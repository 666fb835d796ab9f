"""Options of the prefetch engine, by the seed's names. Source: seed 000 (GSA), 7."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from vllm_gaudi_ucm.prefetch.fields import MaxPendingPrefetch, PrefetchAhead, PrefetchCacheSize, PrefetchWorkers
from vllm_gaudi_ucm.sparse.options import GsaOptions, MethodOptions

if TYPE_CHECKING:
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig


class PrefetchOptions(MethodOptions):
    """Strict, immutable; made from a mapping by `PrefetchOptions.resolve(mapping, key)`."""

    prefetch_workers: PrefetchWorkers = 4
    max_pending_prefetch: MaxPendingPrefetch = 64
    prefetch_ahead: PrefetchAhead = 2
    prefetch_cache_size: PrefetchCacheSize = 1000
    deadline: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=10.0, description="Seconds from its submission after which a prefetch is given up."
    )
    ageing: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=1.0,
        description="Seconds of waiting that lift a prefetch by one priority, so that the lowest is served, too.",
    )

    def over_gsa(self, config: UcmConfig) -> Self:
        """These options, over those in the section of GSA where that method selects; what was given here stands."""
        section = _gsa_section(config)
        if section is None:
            return self
        shared = {name for name in type(self).model_fields if name in GsaOptions.model_fields}
        return self.model_copy(update={name: getattr(section, name) for name in shared - self.model_fields_set})


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
