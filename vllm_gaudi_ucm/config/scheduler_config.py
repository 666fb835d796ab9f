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
        "`predicted` takes a length that most answers so far stay below, instead of `max_tokens`.",
    )
    output_quantile: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9,
        description="With `predicted`: the share of answers that stay below the predicted length. Higher preempts "
        "less and starts fewer.",
    )
    least_output: Annotated[int, Field(ge=1)] = Field(
        default=64, description="With `predicted`: tokens that every answer is expected to have still, at least."
    )
