"""`ucm.distributed`: several workers of one engine."""

from __future__ import annotations

from pydantic import Field

from vllm_gaudi_ucm.options.section import Section


class DistributedConfig(Section):
    """Several workers of one engine."""

    check_ranks: bool = Field(
        default=False,
        description="Compare in every step what the workers are about to run (step, bucket, blocks) and what they have "
        "sampled, and end the engine at the first difference, which the error names. For finding faults: each "
        "comparison waits for the slowest worker.",
    )
