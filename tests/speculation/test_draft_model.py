"""A draft model sees the tokens of its requests, whatever was accepted, preempted or found in the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from vllm import SamplingParams

from tests.batch.scheduling import Known, new_request, step_output
from tests.speculation.draft_scheduler import DraftScheduler
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.request_table import RequestTable
from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
from vllm_gaudi_ucm.speculation.draft_model import DraftModelProposer
from vllm_gaudi_ucm.speculation.proposer import SampledStep, wanted_drafts

BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
VOCAB = 97
NUM_DRAFTS = 3


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return int(np.dot(np.arange(3, len(tokens) + 3), tokens)) % VOCAB


class FakeDraftModel:
    """An Execution whose K/V are the tokens themselves: it knows a context only by what was written to its blocks."""

    max_logits = 64

    def __init__(self, table: RequestTable, rng: random.Random | None = None) -> None:
        self.kv: dict[int, int] = {}
        self.forwards = 0
        self._table = table
        self._rng = rng
        self._plan: UnifiedPlan

    def divide(self, batch: BatchInput) -> list[NDArray[np.int64]]:
        """In parts at random, in order, as static shapes do."""
        count = len(batch.num_scheduled)
        at = self._rng.randint(0, count) if self._rng is not None else 0
        return [part for part in np.split(np.arange(count), [at]) if len(part)]

    def stage(self, step: PlannedStep) -> None:
        self._plan = step.plan
        self.kv.update(zip(step.plan.slots.tolist(), step.inputs["token_ids"].tolist(), strict=True))

    def forward(self) -> None:
        self.forwards += 1

    def logits(self, rows: NDArray[np.int64]) -> torch.Tensor:
        said = [next_token(self._context(int(row))) for row in rows]
        logits = torch.nn.functional.one_hot(torch.tensor(said), VOCAB).float()
        # a bucket has more rows, of garbage
        return torch.cat([logits, torch.full((2, VOCAB), torch.nan)])

    def context(self, row: int, count: int) -> list[int | None]:
        """What the blocks of a table's row hold of its first tokens."""
        blocks = self._table.block_tables[row]
        return [self.kv.get(int(blocks[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE) for p in range(count)]

    def _context(self, row: int) -> list[int]:
        block, position = divmod(int(self._plan.slots[row]), BLOCK_SIZE)[0], int(self._plan.positions[row])
        (owner,) = (
            request.row
            for request in self._table.requests.values()
            if block in self._table.block_tables[request.row, : self._table.num_blocks[request.row]]
        )
        found = self.context(owner, position + 1)
        assert None not in found, "a token was never computed"
        return cast(list[int], found)


class World:
    """Table, scheduler and proposer; every step accepts drafts at random."""

    def __init__(self, rng: random.Random, draft_model_len: int) -> None:
        self.rng = rng
        self.table = RequestTable(3, MAX_MODEL_LEN, BLOCK_SIZE)
        self.scheduler = DraftScheduler(rng, BLOCK_SIZE, MAX_MODEL_LEN)
        self.model = FakeDraftModel(self.table, rng)
        self.draft_model_len = draft_model_len
        self._proposer = DraftModelProposer(
            cast(Any, self.model), self.table, (KvGroup(0, BLOCK_SIZE),), draft_model_len
        )

    def step(self) -> None:
        output = self.scheduler.step()
        self.table.update(output)
        drafts = StepDrafts.from_scheduler_output(output)
        self._fill_cached(drafts)
        self.table.write_drafts(drafts.tokens)
        requests, batch = self.table.scheduled(drafts.num_scheduled)
        self._check_tokens(drafts)
        yields = batch.num_computed + batch.num_scheduled >= batch.num_tokens
        for request, sampled in zip(requests, yields.tolist(), strict=True):
            if sampled:
                proposed = drafts.tokens.get(request.request_id, [])
                tokens = [*proposed[: self.rng.randint(0, len(proposed))], self.rng.randrange(VOCAB)]
                for token in tokens:
                    self.table.append_token(request, token)
                self.scheduler.accept(request.request_id, tokens)
            else:
                self.scheduler.after(request.request_id, drafts.num_scheduled[request.request_id], None)
        self.table.check_integrity()
        if not requests:
            return
        wanted = wanted_drafts(requests, yields, self.table, NUM_DRAFTS)
        found = self._proposer.propose(SampledStep(requests, batch, yields, wanted))
        self.table.check_integrity()
        for request, most, proposed in zip(requests, wanted.tolist(), found, strict=True):
            self._check_drafts(request.request_id, most, proposed)
            self.scheduler.proposals[request.request_id] = proposed

    def _fill_cached(self, drafts: StepDrafts) -> None:
        """What a request finds in the cache, the draft model computed for somebody else."""
        for name in drafts.num_scheduled:
            row, known = self.table.requests[name].row, self.scheduler.running[name]
            for position in range(known.computed):
                block = int(self.table.block_tables[row, position // BLOCK_SIZE])
                slot = block * BLOCK_SIZE + position % BLOCK_SIZE
                if known.computed <= self.draft_model_len:
                    self.model.kv.setdefault(slot, known.tokens[position])

    def _check_tokens(self, drafts: StepDrafts) -> None:
        for name, count in drafts.num_scheduled.items():
            known = self.scheduler.running[name]
            tokens = [*known.tokens, *drafts.tokens.get(name, [])]
            row = self.table.requests[name].row
            end = known.computed + count
            assert self.table.token_ids[row, known.computed : end].tolist() == tokens[known.computed : end]
            assert self.table.num_tokens[row] == len(known.tokens)

    def _check_drafts(self, name: str, most: int, drafts: list[int]) -> None:
        """Greedy ones, as many as wanted unless its length or blocks end; its cache holds what the target's does."""
        tokens = self.scheduler.running[name].tokens
        row = self.table.requests[name].row
        room = min(int(self.table.num_blocks[row]) * BLOCK_SIZE, self.draft_model_len)
        assert len(drafts) == max(0, min(most, room - len(tokens) + 1))
        context = list(tokens)
        for token in drafts:
            assert token == next_token(context)
            context.append(token)
        computed = self.scheduler.running[name].computed
        if computed <= self.draft_model_len:
            assert self.model.context(row, computed) == tokens[:computed]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([MAX_MODEL_LEN, 13]))
def test_drafts_are_what_the_model_says_after_the_tokens(rng: random.Random, draft_model_len: int) -> None:
    """Chunks, prefix hits, preemption and any pattern of acceptance; the table stays intact. covers: A3 A6 A7"""
    world = World(rng, draft_model_len)
    for _ in range(25):
        world.step()


def test_a_step_without_drafts_to_propose_is_computed_all_the_same() -> None:
    """A chunk, and a request whose next token is its last."""
    table = RequestTable(3, MAX_MODEL_LEN, BLOCK_SIZE)
    chunk = Known("chunk", [1, 2, 3, 4, 5], blocks=[3, 4])
    last = Known("last", [6, 7], blocks=[5], params=SamplingParams(max_tokens=2))
    table.update(step_output({"chunk": 3, "last": 2}, [new_request(chunk), new_request(last)]))
    requests, batch = table.scheduled({"chunk": 3, "last": 2})
    table.append_token(table.requests["last"], 8)
    yields = np.array([False, True])
    wanted = wanted_drafts(requests, yields, table, NUM_DRAFTS)
    assert wanted.tolist() == [0, 0]
    model = FakeDraftModel(table)
    proposer = DraftModelProposer(cast(Any, model), table, (KvGroup(0, BLOCK_SIZE),), MAX_MODEL_LEN)
    assert proposer.propose(SampledStep(requests, batch, yields, wanted)) == [[], []]
    assert model.forwards == 1
    assert model.context(table.requests["chunk"].row, 4) == [1, 2, 3, None]
    assert model.context(table.requests["last"].row, 3) == [6, 7, 8]
