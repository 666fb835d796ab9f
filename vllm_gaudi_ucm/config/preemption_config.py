"""`ucm.preemption`: what becomes of the KV of requests that are preempted."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vllm_gaudi_ucm.options.errors import NOTE
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.options.values import BYTES_NOTE, ByteSize


class PreemptionConfig(Section):
    """What becomes of the KV of requests that are preempted."""

    mode: Literal["recompute", "swap", "auto"] = Field(
        default="recompute",
        description="`recompute` computes a preempted request again when it resumes, as vLLM does. `swap` copies its "
        "blocks to host memory, and back when it resumes. `auto` takes for each request what is faster, by the "
        "measured speeds of the copies and of prompts.",
    )
    host_memory: ByteSize = Field(
        default=4 << 30,
        description="With `swap` and `auto`: most bytes of host memory for blocks, of all workers together, taken as "
        "needed; page-locked where the device copies faster from such. When it is full, requests are computed again.",
        json_schema_extra={NOTE: BYTES_NOTE},
    )

    @property
    def swaps(self) -> bool:
        """Whether blocks may go to host memory."""
        return self.mode != "recompute"
