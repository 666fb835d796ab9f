"""The prefetch options that GSA's section and the connector's `prefetch` section share. Source: seed 000 (GSA), 7."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
