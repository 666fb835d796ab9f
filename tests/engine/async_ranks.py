"""Helpers of `test_async_ranks.py` that other tests use, too."""

from __future__ import annotations

from typing import Any

from vllm import RequestOutput

from tests.engine.serving import Engine

CHECKED: dict[str, Any] = {"distributed": {"check_ranks": True}}


def watch(worker: Any) -> None:
    """In a worker: counts steps, and those that are planned with tokens that the host does not have."""
    table = worker.model_runner.parts.requests
    planned, table.seen = table.planned, [0, 0]

    def counted(*args: Any) -> Any:
        found = planned(*args)
        table.seen[0] += 1
        table.seen[1] += bool((found.inputs["token_ids"] < 0).any())
        return found

    table.planned = counted


def check(worker: Any) -> tuple[list[int], int, int]:
    """In a worker: what `watch` has counted, live requests, and steps that were not let go of."""
    parts = worker.model_runner.parts
    parts.requests.check_integrity()
    return parts.requests.seen, len(parts.requests.requests), len(parts.ahead or ())


class ApartEngine(Engine):
    """Its workers are processes."""

    def step(self) -> list[RequestOutput]:
        return [output for output in self.llm.llm_engine.step() if isinstance(output, RequestOutput)]

    def check_idle(self) -> None:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not self.core.scheduler.has_unfinished_requests()
        # the workers learn that the last request has ended
        self.step()
        for _, live, unread in self.llm.collective_rpc(check):
            assert (live, unread) == (0, 0)
