"""Options of the prefetch engine, by the seed's names. Source: seed 000 (GSA), 7."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.prefetch.fields import (
    DEFAULT_CACHE_BYTES,
    MaxPendingPrefetch,
    PrefetchAhead,
    PrefetchCacheBytes,
    PrefetchCacheSize,
    PrefetchWorkers,
)


class PrefetchOptions(Section):
    """Strict, immutable; made from a mapping by `PrefetchOptions.resolve(mapping, key)`."""

    prefetch_workers: PrefetchWorkers = 4
    max_pending_prefetch: MaxPendingPrefetch = 64
    prefetch_ahead: PrefetchAhead = 2
    prefetch_cache_size: PrefetchCacheSize = 1000
    prefetch_cache_bytes: PrefetchCacheBytes = DEFAULT_CACHE_BYTES
    deadline: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=10.0, description="Seconds from its submission after which a prefetch is given up."
    )
    ageing: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=1.0,
        description="Seconds of waiting that lift a prefetch by one priority, so that the lowest is served, too.",
    )

    def for_blocks_of(self, block_bytes: int) -> Self:
        """With `prefetch_cache_size` so small that blocks of this size keep to `prefetch_cache_bytes`, too.

        Raises UcmConfigError where not even one fits.
        """
        most = self.prefetch_cache_bytes // block_bytes
        if most < 1:
            expected = f"room for one block of {block_bytes} bytes"
            raise UcmConfigError([Problem("prefetch_cache_bytes", f"{self.prefetch_cache_bytes} bytes", expected)])
        return self.model_copy(update={"prefetch_cache_size": min(self.prefetch_cache_size, most)})
