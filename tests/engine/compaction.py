"""Helpers of `test_compaction.py` that other tests use, too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm import RequestOutput

from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.block_policies.compaction.free_runs import FreeRuns

RNG = random.Random(12)


BLOCK = 16


OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 48}


ROOMY, SMALL = {"num_gpu_blocks_override": 120}, {"num_gpu_blocks_override": 40}


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


class Asked(NamedTuple):
    """A request. arrival: steps before it. aborted: after so many steps of its own; None: it runs to its end."""

    prompt: list[int]
    arrival: int
    max_tokens: int
    aborted: int | None = None


COMMON = tokens(3 * BLOCK + 7)


def churn(count: int) -> list[Asked]:
    """Requests of all lengths, every third with a common start and every seventh aborted, so that ids spread."""
    asked = []
    for index in range(count):
        prompt = (COMMON if index % 3 == 0 else []) + tokens(RNG.choice([3, 20, 60, 100]))
        aborted = RNG.randrange(1, 12) if index % 7 == 3 else None
        asked.append(Asked(prompt, 2 * index, RNG.choice([4, 12, 40, 70]), aborted))
    return asked


MANY = churn(36)


class Watched:
    """Serves requests, and looks at the KV cache after every step.

    What nobody may read is NaN then: free blocks that nobody can find again, and the dummy block.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.manager = engine.core.scheduler.kv_cache_manager
        self.density: list[float] = []

    @property
    def moves(self) -> int:
        moves: int = self.engine.core.scheduler.block_policies.totals.moves
        return moves

    def serve(self, asked: Sequence[Asked]) -> list[Answer | None]:
        """None: aborted."""
        ids = [self.engine.new_id() for _ in asked]
        ended: dict[str, RequestOutput | None] = {}
        step = 0
        while len(ended) < len(asked):
            for request_id, one in zip(ids, asked, strict=True):
                if one.arrival == step:
                    self.engine.add(request_id, one.prompt, greedy_params(one.max_tokens))
                elif one.aborted is not None and one.arrival + one.aborted == step and request_id not in ended:
                    self.engine.llm.llm_engine.abort_request([request_id])
                    ended[request_id] = None
            for output in self.engine.step():
                if output.finished:
                    ended.setdefault(output.request_id, output)
            step += 1
            self._look()
        self.engine.check_idle()
        outputs = [ended[request_id] for request_id in ids]
        return [
            None if output is None or one.aborted else answer_of(output)
            for one, output in zip(asked, outputs, strict=True)
        ]

    def _look(self) -> None:
        pool = self.manager.block_pool
        queue = pool.free_block_queue
        assert isinstance(queue, FreeRuns)
        queue.check_integrity()
        for number, block in enumerate(pool.blocks):
            assert block.block_id == number
        empty = queue.lowest_empty(pool.num_gpu_blocks, pool.num_gpu_blocks)
        self.engine.poison([0, *empty])
        rows, held = self.engine.runner.parts.requests, self.manager.coordinator.single_type_managers[0].req_to_blocks
        for request in self.engine.core.scheduler.running:
            blocks = [block.block_id for block in held[request.request_id]]
            assert rows.blocks(request.request_id, len(blocks)).tolist() == blocks
        self.density.append((pool.num_gpu_blocks - queue.num_free_blocks) / (queue.highest_in_use + 1))


def assert_served(found: Sequence[Answer | None], wanted: Sequence[Answer], near_ties: int = 1) -> None:
    pairs = [(one, other) for one, other in zip(found, wanted, strict=True) if one is not None]
    assert_same([one for one, _ in pairs], [other for _, other in pairs], near_ties)
