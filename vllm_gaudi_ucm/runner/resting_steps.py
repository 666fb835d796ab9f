"""Steps of a worker that has given back its KV cache: requests end, but nothing is computed."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.vllm_api.steps import DraftTokenIds, GrammarOutput, SchedulerOutput

_NO_STEP = "this worker sleeps: call wake_up before requests are computed"


class RestingSteps:
    """Stands in for a `StepRunner`. vLLM pauses its scheduler, which still reports requests that have ended.

    requests: the live requests, which are computed again afterwards.
    """

    steps_in_flight = False

    def __init__(self, requests: RequestTable) -> None:
        self.requests = requests

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Removes ended requests. Raises RuntimeError for a step with tokens."""
        if scheduler_output.total_num_scheduled_tokens:
            raise RuntimeError(_NO_STEP)
        self.requests.update(scheduler_output)
        return copy(ModelRunnerOutput.with_kv_conn_output_only(None))

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Raises RuntimeError: no step is computed."""
        raise RuntimeError(_NO_STEP)

    def execute_dummy(self) -> None:
        """Raises RuntimeError: engines of several workers do not sleep."""
        raise RuntimeError(_NO_STEP)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns no drafts."""
        return None
