"""Helpers of `test_memory_mode_transfer.py` that other tests use, too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.connector.fault_store import FaultStore
from tests.engine.connector import file_store
from tests.engine.memory_mode import check_finite, copies_of
from tests.engine.offloaded_blocks import WatchedEngine
from tests.engine.serving import Engine, greedy_params
from tests.engine.sparse import COMMON, tokens

PROMPTS = [tokens(20), tokens(200), tokens(260), COMMON + tokens(60), COMMON + tokens(61)]


OUTPUTS = 24


class Served:
    """An engine of both, watched; what lies in the connector's store is finite."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.watched = WatchedEngine(engine, tolerance=1e-4)
        assert engine.runner.transfer is not None
        connector: Any = engine.runner.transfer.connector
        self.worker = connector.worker_side
        self.scheduler = engine.core.scheduler.connector.scheduler_side

    def serve(self, prompts: Sequence[Sequence[int]] = PROMPTS, outputs: int = OUTPUTS) -> list[int]:
        """Tokens of each prompt that were not computed."""
        found = self.watched.generate(prompts, outputs)
        check_finite(found)
        return [output.num_cached_tokens or 0 for output in found]

    def forget(self) -> None:
        """The device's own prefix cache does not know anything any more; everything is stored."""
        self.settle()
        assert self.engine.core.scheduler.reset_prefix_cache()

    def abort_a_load(self, store: FaultStore, name: str) -> None:
        """A request ends while the store hangs, unless its load is late before."""
        store.goes_on.clear()
        self.engine.add(name, PROMPTS[2], greedy_params(1))
        end = time.monotonic() + 60
        while not len(self.worker.loads) and self.engine.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < end
            self.watched.step()
        self.engine.llm.llm_engine.abort_request([name])
        self.watched.step()
        store.goes_on.set()
        self.settle()

    def settle(self) -> None:
        """Nothing is left of any request, on either side, or on its way to a store."""
        end = time.monotonic() + 60
        # who ended while it loaded holds its blocks until nothing writes to them
        while len(self.worker.loads) and time.monotonic() < end:
            self.watched.step()
        for _ in range(3):
            self.watched.step()
        assert self.worker.saver.flush(60.0)
        self.engine.check_idle()
        self.worker.saver.check_integrity()
        self.worker.engine.check_integrity()
        assert len(self.worker.loads) == 0
        assert self.scheduler.num_requests == 0
        copies_of(self.engine).check_idle()


def store_options(kind: str, folder: Path) -> dict[str, Any]:
    return file_store(folder) if kind == "file" else {"kind": "memory", "capacity": "64MiB"}
