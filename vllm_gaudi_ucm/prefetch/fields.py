"""The prefetch options that GSA's section and the connector's `prefetch` section share. Source: seed 000 (GSA), 7."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_gaudi_ucm.options.byte_size import BYTES_NOTE, ByteSize
from vllm_gaudi_ucm.options.problems import NOTE

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
