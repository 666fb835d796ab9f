"""A draft model's graphs over the buckets of its target, which may have room for blocks that it never selects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.batch.batches import Request, lay_out
from tests.execution.bucketed_execution import VOCABULARY, Model, expected
from tests.graphs.shapes import COST
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution, Capture
from vllm_gaudi_ucm.execution.graph_manager import Stage
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.runners.base import EagerRunner, Replay, StaticFunction
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.speculation.draft_model import DraftModelGraphs

BLOCK_SIZE = 4
LIMITS = Limits(16, 4, 32, BLOCK_SIZE, 20, contiguous=False, max_selected_blocks=12)
DENSE, SPARSE = ForwardShape("--u", 4, 0, 8), ForwardShape("--u", 4, 0, 8, 12)


class CountedRunner(EagerRunner):
    """Notes what is captured."""

    def __init__(self, captured: list[tuple[Any, ...]], function: StaticFunction) -> None:
        super().__init__(function)
        self._captured = captured

    def capture(self, inputs: tuple[Any, ...]) -> Replay:
        self._captured.append(inputs)
        return super().capture(inputs)


class Server:
    """The draft model of a server with a sparse method, and the stages that it entered."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.captured: list[tuple[Any, ...]] = []
        self.ready = ReadyBuckets(BucketSet([DENSE, SPARSE], [2], LIMITS, COST))
        self.graphs = DraftModelGraphs(self._make, self._stage)

    def _make(self, stage: Stage) -> BucketedExecution:
        model: Any = Model()
        return BucketedExecution(
            model, self.ready, torch.device("cpu"), Capture(partial(CountedRunner, self.captured), stage, 8)
        )

    @contextmanager
    def _stage(self, label: str) -> Iterator[None]:
        self.stages.append(label)
        yield

    def warm(self) -> None:
        for shape in self.ready.buckets.forward:
            self.graphs.warm_forward(shape)
            self.ready.mark_warm(shape)
        for rows in self.ready.buckets.logits:
            self.graphs.warm_logits(rows)
            self.ready.mark_warm(rows)


def test_buckets_that_differ_in_selected_blocks_are_one_graph() -> None:
    server = Server()
    server.warm()
    assert len(server.ready.buckets.forward) == 3
    assert len([inputs for inputs in server.captured if isinstance(inputs[-1], ForwardShape)]) == 2
    assert server.stages.count("logits, draft model") == server.stages.count("greedy, draft model") == 2


def test_a_pass_runs_dense_in_a_bucket_with_selected_blocks() -> None:
    """Two decodes; and a chunk, for which there is only the maximum, which has selected blocks."""
    server = Server()
    server.warm()
    execution = server.graphs.execution
    for requests in ([Request(5, 1), Request(9, 1)], [Request(4, 6), Request(3, 1)]):
        plan = plan_batch(lay_out(requests, BLOCK_SIZE, 0).batch_input(), BLOCK_SIZE)
        shape = execution.stage(PlannedStep.of_tokens(plan, np.arange(1000, 1000 + plan.num_rows)))
        assert shape.padded.selected_blocks == 0
        execution.forward()
        logits = execution.logits(plan.logits_rows)
        assert logits[: len(plan.logits_rows)].tolist() == expected(plan)


def test_a_pad_row_of_nan_is_still_a_token() -> None:
    server = Server()
    logits = torch.full((2, VOCABULARY), torch.nan)
    logits[0] = torch.arange(VOCABULARY)
    tokens = server.graphs.likeliest(logits).tolist()
    assert tokens[0] == VOCABULARY - 1
    assert 0 <= tokens[1] < VOCABULARY
