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
    preemption_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.05,
        description="With `predicted`: preemptions for each answer that are accepted. More of the KV cache is kept "
        "free after more of them, less after fewer.",
    )
    async_scheduling: Literal["auto"] | bool = Field(
        default="auto",
        description="Schedule and plan the next step while one runs, unless vLLM is given `--no-async-scheduling`. "
        "`auto` does so on a GPU, where it hides the host's work; on a CPU both take the same cores and nothing is "
        "gained. No token changes, but of random requests without a seed.",
    )
    least_output: Annotated[int, Field(ge=0)] = Field(
        default=16, description="With `predicted`: tokens that every answer is expected to have still, at least."
    )
