"""Decisions in the worker, of steps that were sent before tokens were known, are those of a scheduler that waited."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.sparse.steps import BLOCK_SIZE
from vllm_gaudi_ucm.batch.batch_plan import BatchInput
from vllm_gaudi_ucm.protocol.attachments import attach_choice_cost, attach_sparse_ids
from vllm_gaudi_ucm.protocol.sparse_meta import SparseMeta
from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.choice_cost import ChoiceCost
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.late_decisions import LateDecisions
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS, method_class
from vllm_gaudi_ucm.vllm_api.steps import CachedRequestData, SchedulerOutput

NUM_DRAFTS = 3
OPTIONS = {"min_tokens": 12, "min_blocks": 1, "local_window_sz": 1, "sparse_ratio": 0.3}
METHODS: dict[str, dict[str, Any]] = {
    "GSA": {**OPTIONS, "reuse_steps": 3},
    "KVStar": {**OPTIONS, "checkpoint_interval": 3, "lock_duration": 7},
}
# saves what four blocks cost
CHOICE_COST = ChoiceCost(1, 1, 4.0, 0.0, 1.0, 0.0, 16.0)


def method_of(name: str) -> Any:
    method = UcmSparseFactory.create_sparse_method(name, UcmSparseRole.SCHEDULER, METHODS[name])
    method.register_block_size(BLOCK_SIZE)
    return method


def new(name: str, num_computed: int = 0) -> Any:
    """Its parameters are not what decides."""
    asked = SamplingParams(extra_args={"ucm_sparse": False})
    return SimpleNamespace(
        req_id=name, prompt_token_ids=[1] * 10, num_computed_tokens=num_computed, sampling_params=asked
    )


class Both:
    """One method that is told what a waiting scheduler knows, and one in the worker that gets what one ahead sends.

    tokens: of each request; all but the last are computed. sparse: those that may be. drafts: that its next step
    verifies.
    """

    def __init__(self, name: str, cost: ChoiceCost | None = None) -> None:
        self.waiting, self.ahead = method_of(name), method_of(name)
        self.late = LateDecisions(self.ahead)
        self.cost = cost
        if cost is not None:
            self.waiting.selecting_method.register_choice_cost(cost)
        self.tokens: dict[str, int] = {}
        self.sparse: set[str] = set()
        self.begun: list[Any] = []

    def begin(self, name: str, tokens: int, sparse: bool = True) -> None:
        self.sparse.discard(name)
        if sparse:
            self.waiting.request_begin(name, [])
            self.sparse.add(name)
        self.tokens[name] = tokens
        self.begun.append(new(name))

    def go_on(self, name: str, tokens: int, sparse: bool) -> None:
        """The next input of a session, with so many tokens."""
        if sparse and name in self.sparse:
            self.waiting.request_preempted(name)
        elif sparse:
            self.waiting.request_begin(name, [])
            self.sparse.add(name)
        else:
            self.waiting.request_finished_in_scheduler(name)
            self.sparse.discard(name)
        # the last token of the answer is dropped
        self.begun.append(new(name, self.tokens[name] - 1))
        self.tokens[name] += tokens - 1

    def resume(self, name: str) -> None:
        """A request that was preempted comes as a new one."""
        self.begun.append(new(name))

    def step(
        self, drafts: Mapping[str, int], accepted: Mapping[str, int], finished: Any = (), preempted: Any = ()
    ) -> SparseMeta:
        """Decodes, or verifies, every request; a new one computes its prompt."""
        for name in preempted:
            self.waiting.request_preempted(name)
        for name in finished:
            if name not in {one.req_id for one in self.begun}:
                self.waiting.request_finished_in_scheduler(name)
        fresh = {one.req_id: one.num_computed_tokens for one in self.begun}
        old = [name for name in self.tokens if name not in fresh]
        counts = {one: self.tokens[one] - computed for one, computed in fresh.items()} | {
            one: 1 + drafts[one] for one in old
        }
        given = {one: [7] * drafts[one] for one in old if drafts[one]}
        cached = replace(CachedRequestData.make_empty(), req_ids=old)
        exact = replace(
            SchedulerOutput.make_empty(),
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens=given,
            scheduled_new_reqs=self.begun,
            scheduled_cached_reqs=replace(cached, num_computed_tokens=[self.tokens[name] - 1 for name in old]),
        )
        # all drafts of the step before count as right, and there are as many of the next
        ahead = [self.tokens[name] - 1 + NUM_DRAFTS for name in old]
        sent = replace(
            exact,
            num_scheduled_tokens={name: count if name in fresh else 1 + NUM_DRAFTS for name, count in counts.items()},
            scheduled_spec_decode_tokens={name: [-1] * NUM_DRAFTS for name in old},
            scheduled_cached_reqs=replace(cached, num_computed_tokens=ahead),
            finished_req_ids=set(finished),
            preempted_req_ids=set(preempted),
        )
        attach_choice_cost(sent, self.cost)
        attach_sparse_ids(sent, self.sparse & fresh.keys())
        live: Any = {name: SimpleNamespace(request_id=name, num_tokens=count) for name, count in self.tokens.items()}
        expected = self.waiting.build_sparse_meta(exact, live)
        self.late.update(sent)
        step_drafts = StepDrafts(given, counts)
        order = list(counts)
        computed = [fresh.get(name, self.tokens[name] - 1) for name in order]
        sizes = (np.array(some, np.int32) for some in (computed, list(counts.values()), map_tokens(self, order)))
        batch = BatchInput(*sizes, (np.zeros((len(order), 1), np.int32),))
        found = self.late.decide(sent, step_drafts, [live[name] for name in order], batch)
        assert found == expected
        right = {name: min(accepted.get(name, 0), drafts.get(name, 0)) for name in order}
        output = SimpleNamespace(
            req_id_to_index={name: index for index, name in enumerate(order)},
            sampled_token_ids=[[1] * (1 + right[name]) for name in order],
        )
        self.late.verified(step_drafts, output)  # type: ignore[arg-type]
        for name in given:
            self.waiting.drafts_verified(name, drafts[name], right[name])
        for name in order:
            self.tokens[name] += 1 + right[name]
        self.begun = []
        return expected


def map_tokens(both: Both, order: list[str]) -> list[int]:
    return [both.tokens[name] for name in order]


@pytest.mark.parametrize("cost", [None, CHOICE_COST], ids=["always", "where it pays"])
@pytest.mark.parametrize("name", METHODS)
def test_any_life(name: str, cost: ChoiceCost | None) -> None:
    """Requests that begin, grow past their first choice, lose their blocks, end, come again under the same id, and have
    another input, which may say otherwise."""
    rng = random.Random(6)
    both, sparse, dense, modes = Both(name, cost), 0, 0, set()
    for _ in range(300):
        finished = [one for one in both.tokens if rng.random() < 0.03]
        for one in finished:
            del both.tokens[one]
        if len(both.tokens) < 3:
            free = next(one for one in "abc" if one not in both.tokens)
            if free in finished:
                both.waiting.request_finished_in_scheduler(free)
            both.begin(free, rng.randrange(2, 40), rng.random() < 0.7)
        old = [one for one in both.tokens if one not in {new.req_id for new in both.begun}]
        preempted = [one for one in old if rng.random() < 0.03]
        for one in old:
            if one in preempted and rng.random() < 0.5:
                both.resume(one)
            elif one not in preempted and rng.random() < 0.03:
                both.go_on(one, rng.randrange(1, 20), rng.random() < 0.7)
        old = [one for one in old if one not in {new.req_id for new in both.begun}]
        drafts = {one: rng.randrange(NUM_DRAFTS + 1) for one in old}
        meta = both.step(drafts, {one: rng.randrange(NUM_DRAFTS + 1) for one in old}, finished, preempted)
        sparse += len(meta.requests)
        dense = meta.dense_steps
        modes |= {one.mode for one in meta.requests.values()}
    assert sparse > 100
    assert len(modes) > 1
    assert (dense > 10) == (cost is not None)
    if name == "KVStar":
        assert both.ahead.metrics.get_stats() == both.waiting.metrics.get_stats()
        assert 0 < both.ahead.metrics.accepted_tokens < both.ahead.metrics.drafted_tokens


def test_the_scheduler_says_who_may_be_sparse() -> None:
    """covers: D2 F2. For each input of a session."""
    both = Both("GSA")
    both.begin("a", 40, sparse=False)
    found = [bool(both.step({"a": 1}, {}).requests) for _ in range(3)]
    for sparse in (True, True, False):
        both.go_on("a", 5, sparse)
        found += [bool(both.step({"a": 1}, {}).requests) for _ in range(3)]
    assert found == [False] * 3 + [False, True, True] * 2 + [False] * 3


class Own(BlockSparse):
    """Reads more than counts, maybe."""

    def build_sparse_meta(self, scheduler_output: Any, requests: Any) -> SparseMeta:
        return SparseMeta()


class Says(Own):
    @classmethod
    def decides_by_counts(cls, options: Any) -> bool:
        return True


def test_which_methods_decide_by_counts() -> None:
    with SPARSE_METHODS.scope():
        for name in ("Own", "Says"):
            UcmSparseFactory.register_sparse_method(name, __name__, name)
        UcmSparseFactory.register_sparse_method("Newest", "tests.sparse.third_party", "Newest")

        def decides(name: str, **options: Any) -> bool:
            kind = method_class(name)
            return kind.decides_by_counts(kind.Options.resolve(options, name))

        assert all(decides(name) for name in ("GSA", "ESA", "KVStar", "Newest", "Says"))
        assert not decides("Own")
        assert decides("KVStar", base_method="Newest")
        assert not decides("KVStar", base_method="Own")
    assert not UcmSparseBase.decides_by_counts(UcmSparseBase.Options())
