"""Pooling around steps: whose rows reach the pooler, what outputs hold, and what is forgotten with a request."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from vllm import PoolingParams
from vllm.pooling_params import LateInteractionParams

from tests.batch.scheduling import Known, new_request, step_output
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.batch.request_table import RequestTable
from vllm_gaudi_ucm.execution.execution import Execution
from vllm_gaudi_ucm.observability.step_clock import StepClock
from vllm_gaudi_ucm.runner.computed_step import ComputedStep, Division
from vllm_gaudi_ucm.runner.model_pooler import ModelPooler
from vllm_gaudi_ucm.runner.pooling import PoolingSteps
from vllm_gaudi_ucm.vllm_api.pooling import PoolingMetadata
from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, NewRequestData

VLLM_CONFIG: Any = SimpleNamespace(model_config=SimpleNamespace(pooler_config=None))
BLOCK = 4


class RowsOfRequests(nn.Module):
    """A pooler that joins the chunks of each prompt, as vLLM's for all tokens does, without copying a last chunk."""

    def get_supported_tasks(self) -> set[str]:
        return {"token_embed"}

    def get_pooling_updates(self, task: str) -> Any:
        return SimpleNamespace(apply=lambda params: setattr(params, "requires_token_ids", True))

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> list[torch.Tensor | None]:
        cursor = pooling_metadata.get_pooling_cursor()
        chunks = hidden_states.split(cursor.num_scheduled_tokens_cpu.tolist())
        found: list[torch.Tensor | None] = []
        for chunk, states, finished in zip(
            chunks, pooling_metadata.pooling_states, cursor.get_finished_mask(), strict=True
        ):
            states.hidden_states_cache.append(chunk if finished else chunk.clone())
            cached = states.hidden_states_cache
            found.append((cached[0] if len(cached) == 1 else torch.cat(cached)) if finished else None)
        self.prompts = pooling_metadata.get_prompt_token_ids_cpu()
        return found


class Steps:
    """The part, a request table, and hidden states that are a row's token and position."""

    def __init__(self) -> None:
        self.pooler = RowsOfRequests()
        model = SimpleNamespace(pooler=self.pooler)
        self.hidden = torch.zeros(32, 2)
        execution = cast(Execution, SimpleNamespace(hidden_states=lambda count: self.hidden[:count]))
        pooler = ModelPooler(cast(nn.Module, model), torch.device("cpu"))
        self.part = PoolingSteps(pooler, execution, VLLM_CONFIG)
        self.table = RequestTable(4, 32, BLOCK)

    def run(self, output: Any) -> dict[str, torch.Tensor | None]:
        """Runs a step; returns the output of each of its requests."""
        self.table.update(output)
        self.part.requests_updated(output, StepClock())
        requests, batch = self.table.scheduled(output.num_scheduled_tokens)
        step = cast(ComputedStep, None)
        self.part.before_plan(step)
        division = Division(requests, batch, StepClock(), is_part=False)
        plan = plan_batch(batch, BLOCK)
        division.staged(plan, cast(Any, None))
        tokens = self.table.token_ids[plan.table_rows[plan.row_requests], plan.positions]
        self.hidden[: plan.num_rows] = torch.from_numpy(np.stack((tokens, plan.positions), 1)).float()
        self.part.after_forward(division)
        names = [request.request_id for request in requests]
        made = ModelRunnerOutput(req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)})
        self.part.before_output(step, made)
        assert made.pooler_output is not None
        return dict(zip(names, made.pooler_output, strict=True))


def new(name: str, prompt: list[int], block: int, **params: Any) -> NewRequestData:
    sent = new_request(Known(name, prompt, blocks=[block, block + 1]))
    asked = PoolingParams(task="token_embed", **params)
    return replace(sent, sampling_params=None, pooling_params=asked)


def expected(prompt: list[int]) -> list[list[float]]:
    return [[float(token), float(position)] for position, token in enumerate(prompt)]


def rows(output: torch.Tensor | None) -> list[list[float]]:
    assert output is not None
    found: list[list[float]] = output.tolist()
    return found


def cached(name: str, computed: int) -> Any:
    from vllm.v1.core.sched.output import CachedRequestData

    return replace(
        CachedRequestData.make_empty(),
        req_ids=[name],
        new_token_ids=[],
        new_block_ids=[None],
        num_computed_tokens=[computed],
        num_output_tokens=[0],
    )


def test_rows_of_single_tokens_come_first_in_a_plan_but_belong_to_their_requests() -> None:
    steps, prompts = Steps(), {"a": [5, 6, 7], "b": [8], "c": [9, 10]}
    sent = [new(name, prompt, 1 + 2 * index) for index, (name, prompt) in enumerate(prompts.items())]
    found = steps.run(step_output({name: len(prompt) for name, prompt in prompts.items()}, sent))
    assert {name: rows(output) for name, output in found.items()} == {n: expected(p) for n, p in prompts.items()}
    # for a pooler that asks for them
    assert [prompt.tolist() for prompt in steps.pooler.prompts] == [[8], [5, 6, 7], [9, 10]]


def test_an_output_outlives_the_hidden_states_of_later_steps() -> None:
    steps = Steps()
    found = steps.run(step_output({"a": 3}, [new("a", [5, 6, 7], 1)]))["a"]
    steps.run(step_output({"b": 3}, [new("b", [1, 1, 1], 3)], finished=["a"]))
    assert rows(found) == expected([5, 6, 7])


def test_a_prompt_in_chunks_has_an_output_with_its_last_chunk() -> None:
    steps, prompt = Steps(), [5, 6, 7, 8, 9]
    assert steps.run(step_output({"a": 3}, [new("a", prompt, 1)])) == {"a": None}
    found = steps.run(step_output({"a": 2}, cached=cached("a", 3)))["a"]
    assert rows(found) == expected(prompt)


@pytest.mark.parametrize("sent_anew", [False, True], ids=["V1", "V2"])
def test_chunks_from_before_a_preemption_are_forgotten(sent_anew: bool) -> None:
    steps, prompt = Steps(), [5, 6, 7, 8, 9]
    steps.run(step_output({"a": 3}, [new("a", prompt, 1)]))
    steps.run(step_output({"b": 1}, [new("b", [4], 5)], preempted=["a"]))
    if sent_anew:
        again = replace(new("a", prompt, 1), prefill_token_ids=prompt)
        found = steps.run(step_output({"a": 5}, [again], finished=["b"]))
    else:
        resumed = replace(cached("a", 0), resumed_req_ids={"a"}, new_block_ids=[([1, 2],)])
        found = steps.run(step_output({"a": 5}, cached=resumed, finished=["b"]))
    assert rows(found["a"]) == expected(prompt)


def test_documents_are_scored_by_the_query_before_them() -> None:
    """Late interaction: for each token of the query the best of the document, added up; a query is kept for as many
    documents as it says.
    """
    steps, query = Steps(), [2, 3]
    asked = LateInteractionParams(mode="cache_query", query_key="q", query_uses=1)
    steps.run(step_output({"q": 2}, [new("q", query, 1, late_interaction_params=asked)]))
    document = LateInteractionParams(mode="score_doc", query_key="q")
    sent = new("d", [4, 5, 6], 3, late_interaction_params=document)
    found = steps.run(step_output({"d": 3}, [sent], finished=["q"]))["d"]
    assert found is not None
    one, other = torch.tensor(expected(query)), torch.tensor(expected([4, 5, 6]))
    assert float(found) == float((one @ other.T).amax(1).sum())
    steps.run(step_output({"b": 1}, [new("b", [4], 5)], finished=["d"]))
    assert not steps.part._late._query_cache
