"""Options of the prefetch engine, by the seed's names. Source: seed 000 (GSA), 7."""

from typing import Annotated, Self

from pydantic import Field

from vllm_gaudi_ucm.options.errors import NOTE, Problem, UcmConfigError
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.options.values import BYTES_NOTE, ByteSize


class EngineOptions(Section):
    """Options of the prefetch engine that GSA's section shares."""

    prefetch_workers: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4, description="Threads of the prefetch engine, each with a few blocks at a time."
    )
    max_pending_prefetch: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=64,
        description="Most requests whose prefetch is not complete; beyond it the lowest priority is given up, "
        "counted, and loaded when its request runs.",
    )
    prefetch_ahead: Annotated[int, Field(ge=0, le=64)] = Field(
        default=2, description="Batches ahead of the running one that are prefetched for; 0 prefetches nothing."
    )
    prefetch_cache_size: Annotated[int, Field(ge=1)] = Field(
        default=1000,
        description="Blocks in host memory, of all layers, that prefetches may fill; the oldest go first.",
    )
    # The default of a memory store. A thousand blocks of 16 MiB would be 16 GiB of memory that is not available to
    # other uses.
    prefetch_cache_bytes: ByteSize = Field(
        default=4 << 30,
        description="Bytes of host memory, page-locked where the device copies faster from such, that these blocks may "
        "take: the smaller of the two bounds holds.",
        json_schema_extra={NOTE: BYTES_NOTE},
    )


class PrefetchOptions(EngineOptions):
    """All options of a prefetch engine."""

    deadline: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=10.0, description="Seconds from its submission after which a prefetch is given up."
    )
    ageing: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=1.0,
        description="Seconds of waiting that lift a prefetch by one priority, so that the lowest is served, too.",
    )

    def for_blocks_of(self, block_bytes: int) -> Self:
        """Returns options with `prefetch_cache_size` reduced until blocks of this size stay within
        `prefetch_cache_bytes`, too.

        Raises UcmConfigError if not even one fits.
        """
        most = self.prefetch_cache_bytes // block_bytes
        if most < 1:
            expected = f"room for one block of {block_bytes} bytes"
            raise UcmConfigError([Problem("prefetch_cache_bytes", f"{self.prefetch_cache_bytes} bytes", expected)])
        return self.model_copy(update={"prefetch_cache_size": min(self.prefetch_cache_size, most)})
