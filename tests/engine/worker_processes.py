"""An engine in this process whose workers have processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm import RequestOutput

from tests.engine.serving import Engine
from vllm_gaudi_ucm.device import get_device

Look = Callable[[Any], Any]
"""A function of a module that is told a worker, in the worker's process."""


class EngineOfWorkers(Engine):
    """Counts the batches in flight (`most_in_flight`); a test looks into the workers by calls.

    Args: see Engine.
    """

    def __init__(self, model: Path, ucm: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(model, ucm, **options)
        self.most_in_flight = 0
        self._count_batches()

    def on_workers(self, look: Look) -> list[Any]:
        """What it returns, by rank."""
        found: list[Any] = self._core.model_executor.collective_rpc(look)
        return found

    def step(self) -> list[RequestOutput]:
        outputs = self.llm.llm_engine.step()
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def check_idle(self) -> None:
        """Nothing is left of any request, on any worker."""
        pool = self._core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not self._core.scheduler.has_unfinished_requests()
        for left in self.on_workers(live_requests):
            assert set(left) <= self._core.scheduler.finished_req_ids

    def _count_batches(self) -> None:
        executor, queue = self._core.model_executor, self._core.batch_queue
        execute = executor.execute_model

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.most_in_flight = max(self.most_in_flight, 1 + len(queue or ()))
            return execute(*args, **kwargs)

        executor.execute_model = counted


def live_requests(worker: Any) -> list[str]:
    """Of a worker, whose table must be in order."""
    table = worker.model_runner.parts.requests
    table.check_integrity()
    return list(table.requests)


def count_compilations(worker: Any) -> int:
    """Recipes that the worker's card has compiled so far."""
    return int(get_device(worker.device.type).compilations())


class CountedWorker:
    """Gives a worker a method that an engine in another process can call by name."""

    def count_compilations(self) -> int:
        """Returns how many recipes its card has compiled so far."""
        return count_compilations(self)
