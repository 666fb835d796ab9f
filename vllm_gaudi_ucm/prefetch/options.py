"""Options of the prefetch engine, by the seed's names. Source: seed 000 (GSA), 7."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_gaudi_ucm.options.strict import StrictOptions
from vllm_gaudi_ucm.prefetch.fields import MaxPendingPrefetch, PrefetchAhead, PrefetchCacheSize, PrefetchWorkers


class PrefetchOptions(StrictOptions):
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
