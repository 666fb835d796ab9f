"""Options of the prefetch engine, by the seed's names. Source: seed 000 (GSA), 7."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from vllm_gaudi_ucm.options.errors import NOTE, Problem, UcmConfigError
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.options.values import BYTES_NOTE, ByteSize

PrefetchWorkers = Annotated[
    int, Field(ge=1, le=64, description="Threads of the prefetch engine, each with a few blocks at a time.")
]
MaxPendingPrefetch = Annotated[
    int,
    Field(
        ge=1,
        le=65536,
        description="Most requests whose prefetch is not complete; beyond it the lowest priority is given up, "
        "counted, and loaded when its request runs.",
    ),
]
PrefetchAhead = Annotated[
    int,
    Field(ge=0, le=64, description="Batches ahead of the running one that are prefetched for; 0 prefetches nothing."),
]
PrefetchCacheSize = Annotated[
    int, Field(ge=1, description="Blocks in host memory, of all layers, that prefetches may fill; the oldest go first.")
]
PrefetchCacheBytes = Annotated[
    ByteSize,
    Field(
        description="Bytes of host memory, page-locked where the device copies faster from such, that these blocks may "
        "take: the smaller of the two bounds holds.",
        json_schema_extra={NOTE: BYTES_NOTE},
    ),
]
DEFAULT_CACHE_BYTES = 4 << 30
"""That of a memory store. A thousand blocks of 16 MiB would be 16 GiB of memory that nothing else can use."""


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
