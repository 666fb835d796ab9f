"""The section `ucm.scheduler`, which decides which waiting requests begin."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.section import Section


class SchedulerConfig(Section):
    """Options that decide which waiting requests begin."""

    admission: Literal["greedy", "exact"] = Field(
        default="greedy",
        description="`greedy` starts a request when its prompt fits, as vLLM does, and preempts when the KV cache "
        "overflows. `exact` starts it when the cache holds all that runs to its `max_tokens`: nothing is preempted.",
    )
    async_scheduling: Literal["auto"] | bool = Field(
        default="auto",
        description="Schedule and plan the next step while one runs, unless vLLM is given `--no-async-scheduling`. "
        "`auto` does so on a GPU, where it hides the host's work; on a CPU both take the same cores and nothing is "
        "gained. No token changes, but of random requests without a seed.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, values: Any) -> Any:
        """Raises `UcmConfigError` for the rule `predicted` and its options, and says what to use instead."""
        if not isinstance(values, Mapping):
            return values
        found = []
        if values.get("admission") == "predicted":
            wanted = (
                "'exact', which preempts nothing, or 'greedy' with ucm.preemption.mode 'swap', which computes nothing "
                "twice: 'predicted' was removed, because it answered no more requests than 'greedy'"
            )
            found.append(Problem("ucm.scheduler.admission", "'predicted'", wanted))
        for name in ("preemption_rate", "least_output"):
            if name in values:
                wanted = "no such key: it was an option of ucm.scheduler.admission 'predicted', which was removed"
                found.append(Problem(f"ucm.scheduler.{name}", str(values[name]), wanted))
        if found:
            raise UcmConfigError(found)
        return values
