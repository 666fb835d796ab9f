"""A decode step whose chosen blocks change a little every time: new ones by prefetch, against all of them resident.

The step reads a working set of KV blocks and as many bytes of weights. Of the blocks that are new in a step a part was
predicted, and is loaded while the step before computes; the rest is loaded when the step begins, and waited for. One
core is left to copies on every side, as a card has engines for them.
"""

from __future__ import annotations

import operator
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.store_bandwidth import copy_block
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome
from vllm_gaudi_ucm.prefetch.priority import PrefetchPriority
from vllm_gaudi_ucm.store.factory import open_store
from vllm_gaudi_ucm.store.options import resolve_store_options

BLOCK_BYTES = 256 << 10
RESIDENT = 256
NEW = 12  # 5 % of the working set
STORED = 1024
PREDICTED = (0, 50, 80, 100)
DEADLINE = 1.0
REST = 0.001


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass
class Step:
    """One contender's device memory. predicted: per cent of new blocks; None: nothing is ever new."""

    engine: PrefetchEngine
    predicted: int | None
    number: int = 0
    waited: float = 0.0

    def __post_init__(self) -> None:
        self.blocks = torch.rand(RESIDENT, BLOCK_BYTES // 4)
        self.memory = [memoryview(row).cast("B") for row in self.blocks.numpy()]
        self.weights = torch.rand(RESIDENT * 16, BLOCK_BYTES // 64)
        self.query = torch.rand(BLOCK_BYTES // 4)
        self.row = torch.rand(BLOCK_BYTES // 64)

    def run(self) -> float:
        """Seconds of a step, loads that it waits for included."""
        start = time.perf_counter()
        if self.predicted is not None:
            known = NEW * self.predicted // 100
            self._fetch("urgent", self.number, range(known, NEW), PrefetchPriority.URGENT)
            for name in ("urgent", f"step {self.number}"):
                outcome = self.engine.wait_for_completion(name, DEADLINE)
                assert outcome in (PrefetchOutcome.READY, PrefetchOutcome.UNKNOWN), outcome
            self.engine.forget(f"step {self.number}")
            self.waited += time.perf_counter() - start
            self._fetch(f"step {self.number + 1}", self.number + 1, range(known), PrefetchPriority.HIGH)
        scores = self.blocks @ self.query
        assert torch.isfinite(scores @ torch.ones(RESIDENT))
        self.weights @ self.row
        self.number += 1
        return time.perf_counter() - start

    def _fetch(self, name: str, step: int, which: range, priority: PrefetchPriority) -> None:
        """Blocks of a step go where those of some steps before were."""
        if not which:
            return
        keys = [key((step * NEW + index) % STORED) for index in which]
        places = [(step * NEW + index) % RESIDENT for index in which]

        def deliver(index: int, block: memoryview) -> None:
            copy_block(self.memory[places[index]], block)

        self.engine.submit_prefetch(name, keys, priority, deliver)


def measure_steps(steps: int, progress: Callable[[float], None]) -> list[dict[str, Any]]:
    """Rows: median milliseconds of a step, and the median ratio to the step with everything resident of its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    store = open_store(resolve_store_options({"kind": "memory", "capacity": STORED * BLOCK_BYTES}), BLOCK_BYTES)
    engines = []
    try:
        values = torch.rand(BLOCK_BYTES // 4)
        assert all(store.save(key(number), memoryview(values.numpy()).cast("B")) for number in range(STORED))
        contenders = {}
        for predicted in (None, *PREDICTED):
            engines.append(PrefetchEngine(store, BLOCK_BYTES, PrefetchOptions(prefetch_cache_size=64)))
            engines[-1].start()
            contenders[predicted] = Step(engines[-1], predicted)
        times: dict[int | None, list[float]] = {predicted: [] for predicted in contenders}
        for turn in range(steps + 3):
            # nobody always comes after the same one
            for predicted in random.sample(list(contenders), len(contenders)):
                # On a busy machine a thread that has waited runs at once, one that has not is interrupted: all have.
                time.sleep(REST)
                spent = contenders[predicted].run()
                if turn >= 3:
                    times[predicted].append(spent)
            progress((turn + 1) / (steps + 3))
        return [
            {
                "predicted": "all resident" if predicted is None else f"{predicted} %",
                "new blocks": 0 if predicted is None else NEW,
                "ms": statistics.median(spent) * 1e3,
                # of the same turn: other work on the machine slows both
                "against resident": statistics.median(map(operator.truediv, spent, times[None])),
                "of it waiting, ms": contenders[predicted].waited / (steps + 3) * 1e3,
            }
            for predicted, spent in times.items()
        ]
    finally:
        for engine in engines:
            engine.stop()
        store.close()
        torch.set_num_threads(threads)
