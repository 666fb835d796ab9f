"""`ucm.scheduler`: which waiting requests begin."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm_gaudi_ucm.options.section import Section


class SchedulerConfig(Section):
    """Which waiting requests begin."""

    admission: Literal["greedy", "exact", "predicted"] = Field(
        default="greedy",
        description="`greedy` starts a request when its prompt fits, as vLLM does, and preempts when the KV cache "
        "overflows. `exact` starts it when the cache holds all that runs to its `max_tokens`: nothing is preempted. "
        "`predicted` expects answers to be as long as those before them, instead of `max_tokens`.",
    )
    confidence: Annotated[float, Field(ge=0.5, le=0.999)] = Field(
        default=0.9,
        description="With `predicted`: how probably the cache holds all that runs, at any one time. Higher preempts "
        "less and starts fewer.",
    )
    least_output: Annotated[int, Field(ge=0)] = Field(
        default=16, description="With `predicted`: tokens that every answer is expected to have still, at least."
    )
