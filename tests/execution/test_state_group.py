"""Plans of states: each request goes on from the state behind its own tokens, whatever is shared or rejected."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.execution.state_group import StatePlaces, StatePlanner

Prefix = tuple[int, ...]
MOST = 3  # requests at once


@dataclass
class Request:
    """tokens: known ones. computed: of them. blocks: of its context."""

    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Server:
    """A scheduler with prefix caching, and a device on which a state is the tokens that it stands for."""

    def __init__(self, rng: random.Random, block_size: int, drafts: int) -> None:
        self._rng, self._size, self._drafts = rng, block_size, drafts
        self._places = StatePlaces(4000, MOST, 1 + drafts)
        self._planner = StatePlanner(block_size, self._places)
        self._states: list[Prefix | None] = [None] * self._places.rows
        self._states[self._places.zeros] = ()
        self._cached: dict[Prefix, int] = {}
        self._next_block, self._base = 1, 10
        self.running: dict[int, Request] = {}
        self.from_blocks = self.parts = self.rejected = 0

    def step(self) -> None:
        """Requests leave or are preempted, go on by some tokens and drafts, and come."""
        # requests of a step have tokens in common that none had before
        self._base += 1
        for row in [row for row in self.running if self._rng.random() < 0.15]:
            del self.running[row]
            self._planner.forget(row)
        scheduled = {row: self._schedule(request) for row, request in self.running.items()}
        while len(self.running) < MOST and self._rng.random() < 0.7:
            # finds blocks that requests before it fill in the same step
            row = self._rng.choice([row for row in range(8) if row not in self.running])
            self._begin(row)
            scheduled[row] = self._schedule(self.running[row])
        if scheduled:
            self._compute(scheduled)

    def _begin(self, row: int) -> None:
        base = [self._base] * self._rng.randrange(4 * self._size)
        request = self.running[row] = Request([*base, *(self._rng.randrange(2) for _ in range(1 + len(base) % 3))])
        while (end := request.computed + self._size) < len(request.tokens):
            block = self._cached.get(tuple(request.tokens[:end]))
            if block is None:
                break
            request.blocks.append(block)
            request.computed = end

    def _schedule(self, request: Request) -> tuple[int, int]:
        """Returns how many tokens the step computes, and how many of them are drafts that turn out wrong."""
        left = len(request.tokens) - request.computed
        drafts = self._rng.randrange(self._drafts + 1) if left == 1 else 0
        count = min(left, self._rng.randrange(1, 3 * self._size)) + drafts
        request.tokens += [9] * drafts
        while len(request.blocks) * self._size < request.computed + count:
            request.blocks.append(self._next_block)
            self._next_block += 1
        for end in range(self._size, request.computed + count - drafts + 1, self._size):
            self._cached.setdefault(tuple(request.tokens[:end]), request.blocks[end // self._size - 1])
        return count, self._rng.randrange(drafts + 1)

    def _compute(self, scheduled: dict[int, tuple[int, int]]) -> None:
        rows, new = list(scheduled), [count for count, _ in scheduled.values()]
        width = max(len(request.blocks) for request in self.running.values())
        batch = BatchInput(
            np.array([request.computed for request in self.running.values()], np.int32),
            np.array(new, np.int32),
            np.array([len(request.tokens) for request in self.running.values()], np.int32),
            (np.array([request.blocks + [0] * (width - len(request.blocks)) for request in self.running.values()]),),
            np.array(rows),
        )
        parts = self._planner.divide(batch)
        assert np.array_equal(np.concatenate(parts), np.arange(len(rows)))
        self.parts += len(parts) > 1
        for part in parts:
            self._run(batch.take(part), [self.running[rows[index]] for index in part.tolist()])
        for row, (count, rejected) in scheduled.items():
            request = self.running[row]
            request.computed += count - rejected
            self.rejected += rejected
            if rejected:
                del request.tokens[-rejected:]
            if request.computed == len(request.tokens):
                request.tokens.append(self._rng.randrange(2))

    def _run(self, batch: BatchInput, requests: list[Request]) -> None:
        step = plan_batch(batch, self._size)
        plan = self._planner.plan(batch, step, {})
        self.from_blocks += int((plan.sources < self._places.num_blocks).sum())
        behind = []
        for place, index in enumerate(step.requests.tolist()):
            request, found = requests[index], self._states[plan.sources[place]]
            assert found == tuple(request.tokens[: request.computed])
            assert plan.first_rows[place] == step.query_start[place]
            begin, count = request.computed, int(batch.num_scheduled[index])
            behind += [tuple(request.tokens[: begin + row + 1]) for row in range(count)]
        assert len(set(plan.kept_at.tolist())) == len(plan.kept_at)
        for row, at in zip(plan.kept_rows.tolist(), plan.kept_at.tolist(), strict=True):
            self._states[at] = behind[row]


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(0, 3))
def test_each_request_goes_on_from_its_own_state(rng: random.Random, block_size: int, drafts: int) -> None:
    server = Server(rng, block_size, drafts)
    for _ in range(30):
        server.step()


def test_the_traffic_has_what_it_is_for() -> None:
    server = Server(random.Random(1), 3, 2)
    for _ in range(500):
        server.step()
    assert min(server.from_blocks, server.parts, server.rejected) > 5


def test_a_state_that_is_nowhere_is_an_error() -> None:
    planner, one = StatePlanner(4, StatePlaces(10, 1, 1)), np.ones(1, np.int32)
    batch = BatchInput(np.array([6], np.int32), one, np.array([7], np.int32), (np.array([[1, 2]]),), np.array([0]))
    with pytest.raises(ValueError, match="a state behind 6 tokens"):
        planner.plan(batch, plan_batch(batch, 4), {})
