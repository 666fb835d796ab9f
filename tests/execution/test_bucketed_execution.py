"""Static execution over a model that can be computed by hand: which graph runs, and what its rows hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batch.batches import Request, Step, lay_out, steps
from tests.execution.bucket_tensors import server_limits, step_shape
from tests.execution.bucketed_execution import VOCABULARY, Model, expected
from tests.graphs.shapes import COST
from tests.graphs.warm_up.look_up import look_up
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution, Capture
from vllm_gaudi_ucm.graphs.lookup import BucketSet, NotWarmError
from vllm_gaudi_ucm.graphs.runners.base import EagerRunner
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets


class Server:
    """An execution with a few buckets, all warm unless said otherwise, and the stages that it entered."""

    def __init__(
        self, limits: Limits, forward: list[ForwardShape], logits: list[int], warm: bool = True, causal_slice: int = 8
    ) -> None:
        self.stages: list[str] = []
        self.model = Model()
        decoder: Any = self.model
        self.buckets = BucketSet(forward, logits, limits, COST)
        self.ready = ReadyBuckets(self.buckets)
        self.execution = BucketedExecution(
            decoder, self.ready, torch.device("cpu"), Capture(EagerRunner, self._stage, causal_slice)
        )
        if warm:
            self.warm([*self.buckets.forward, *self.buckets.logits])

    def warm(self, keys: list[ForwardShape | int]) -> None:
        for key in keys:
            if isinstance(key, int):
                self.execution.warm_logits(key)
            else:
                self.execution.warm_forward(key)
            self.ready.mark_warm(key)

    def run(self, plan: UnifiedPlan) -> torch.Tensor:
        """The logits of the plan's rows, after tokens 1000 and up."""
        self.execution.stage(PlannedStep.of_tokens(plan, np.arange(1000, 1000 + plan.num_rows)))
        self.execution.forward()
        return self.execution.logits(plan.logits_rows)

    @contextmanager
    def _stage(self, label: str) -> Iterator[None]:
        self.stages.append(label)
        yield


def planned(step: Step) -> UnifiedPlan:
    return plan_batch(step.batch_input(), step.block_size)


@st.composite
def servers(draw: st.DrawFn) -> tuple[Step, Server]:
    step = draw(steps(max_requests=6).filter(lambda step: len(step.requests) > 0))
    slack = st.integers(0, 9)
    limits = server_limits(step, draw(st.booleans()), draw(slack), draw(slack), draw(slack))
    most = limits.maximum

    def shape() -> ForwardShape:
        q, s, u = (draw(st.integers(low, high)) for low, high in zip((1, 0, 0), most[1:4], strict=True))
        return ForwardShape.from_sizes(draw(st.booleans()), q, s, u)

    rows = draw(st.lists(st.integers(1, most.logits), max_size=2))
    return step, Server(limits, [shape() for _ in range(draw(st.integers(0, 3)))], rows)


@settings(max_examples=40)
@given(servers())
def test_a_step_runs_in_a_bucket_that_dominates_it_and_gives_its_rows(found: tuple[Step, Server]) -> None:
    """Twice, with a step of every bucket's pads in between. covers: A9 B1 B2"""
    step, server = found
    plan = planned(step)
    wanted = expected(plan)
    for _ in range(2):
        logits = server.run(plan)
        shape = server.execution.stage(PlannedStep.of_tokens(plan, np.zeros(plan.num_rows, np.int64)))
        assert shape.true == step_shape(plan, server.buckets.limits.contiguous)
        assert dominates(shape.padded, shape.true)
        assert shape.padded == look_up(server.ready, shape.true)
        assert logits.tolist()[: len(wanted)] == wanted
        assert len(logits) == shape.padded.logits
        server.warm([*server.buckets.forward, *server.buckets.logits])


DECODES = lay_out([Request(4, 1), Request(9, 1), Request(2, 1)], 4, 0)
LIMITS = server_limits(DECODES, contiguous=False, rows=20, requests=5, blocks=10)
TIGHT = ForwardShape("--u", 3, 0, 8)


def test_the_graph_is_chosen_by_forward_shape_and_the_logits_by_their_rows() -> None:
    server = Server(LIMITS, [TIGHT], [3])
    plan = planned(DECODES)
    server.run(plan)
    assert server.execution.stage(PlannedStep.of_tokens(plan, np.zeros(3, np.int64))).padded == TIGHT.step(3)
    assert len(server.execution.logits(np.array([2]))) == 3
    assert len(server.execution.logits(np.array([0, 1, 2, 0]))) == LIMITS.max_num_seqs


def test_the_parts_that_attention_gets_are_those_of_the_bucket_not_of_the_step() -> None:
    """covers: B2 B4"""
    server = Server(LIMITS, [], [])
    server.run(planned(DECODES))
    assert server.model.metadata is not None
    parts = server.model.metadata.parts.parts
    assert parts.causal is not None
    assert parts.shared is not None
    assert parts.unique is not None
    sizes = (len(parts.causal.groups), len(parts.shared.blocks), len(parts.unique.rows))
    assert sizes == LIMITS.maximum[1:4]


def test_a_bucket_is_computed_over_pads_without_a_graph() -> None:
    """So that what it launches is found before anything is captured."""
    largest = LIMITS.maximum.forward
    server = Server(LIMITS, [TIGHT], [3], warm=False)
    server.execution.compute_pads(largest)
    assert server.model.metadata is not None
    assert server.model.metadata.slots.shape == (largest.query_len,)
    assert not server.model.metadata.slots.any(), "pads are written to the dummy block"
    assert not server.stages, "no graph, no recipe"
    with pytest.raises(NotWarmError):
        server.run(planned(DECODES))


def test_every_kind_of_device_work_is_a_stage_of_its_own() -> None:
    server = Server(LIMITS, [], [])
    server.stages.clear()
    server.run(planned(DECODES))
    assert server.stages == ["forward", "logits"]


def test_a_step_that_yields_no_token_has_no_logits_graph() -> None:
    """covers: A4"""
    server = Server(LIMITS, [], [])
    server.stages.clear()
    chunk = lay_out([Request(0, 6, behind=5)], 4, 0)
    assert server.run(planned(chunk)).shape == (0, VOCABULARY)
    assert server.stages == ["forward"]


def test_logits_of_any_rows_may_be_asked_again_and_again() -> None:
    """Prompt logprobs score rows in pieces before the step's own rows are sampled."""
    server = Server(LIMITS, [TIGHT], [1])
    plan = planned(DECODES)
    own = server.run(plan)[:3].tolist()
    pieces = [server.execution.logits(np.array([row]))[0].tolist() for row in (2, 0, 1)]
    assert pieces == [own[row] for row in (2, 0, 1)]


def test_only_what_is_warm_is_used() -> None:
    """covers: B1"""
    server = Server(LIMITS, [TIGHT], [3], warm=False)
    plan = planned(DECODES)
    with pytest.raises(NotWarmError):
        server.run(plan)
    maximum = LIMITS.maximum
    server.warm([maximum.forward, maximum.logits])
    assert server.run(plan)[:3].tolist() == expected(plan)
    assert server.execution.stage(PlannedStep.of_tokens(plan, np.zeros(3, np.int64))).padded == maximum
    server.warm([TIGHT, 3])
    assert server.execution.stage(PlannedStep.of_tokens(plan, np.zeros(3, np.int64))).padded == TIGHT.step(3)


def test_a_step_counts_once_for_each_bucket_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(LIMITS, [TIGHT], [3], warm=False)
    server.warm([LIMITS.maximum.forward, LIMITS.maximum.logits])
    counted: list[ForwardShape | int] = []
    monkeypatch.setattr(server.ready._order, "count", counted.append)
    server.run(planned(DECODES))
    assert counted == [TIGHT, 3]


def test_a_bucket_that_counts_as_warm_without_a_graph_is_an_error() -> None:
    """Never a silent compilation on a request's path. covers: B1 B4"""
    server = Server(LIMITS, [TIGHT], [], warm=False)
    server.warm([LIMITS.maximum.forward, LIMITS.maximum.logits])
    server.ready.mark_warm(TIGHT)
    with pytest.raises(KeyError, match="--u"):
        server.run(planned(DECODES))


def test_a_step_beyond_the_limits_names_the_limit() -> None:
    server = Server(LIMITS, [], [])
    large = lay_out([Request(0, LIMITS.max_num_batched_tokens + 1)], 4, 0)
    with pytest.raises(LimitsError, match=r"query_len 24 > 23"):
        server.run(planned(large))


def test_warm_up_writes_to_the_dummy_block_only() -> None:
    server = Server(LIMITS, [TIGHT], [3], warm=False)
    for shape in server.buckets.forward:
        server.execution.warm_forward(shape)
        assert server.model.metadata is not None
        assert server.model.metadata.slots.tolist() == [0] * shape.query_len
