"""A decode step whose chosen blocks change a little every time: new ones by prefetch, compared with all of them on the
device.

The step reads a working set of KV blocks and as many bytes of weights. Some of the new blocks of a step are predicted,
and loaded while the previous step computes; the rest is loaded when the step begins. A step either waits for all of
them, or continues with those that have arrived, as in memory mode: late blocks are attended in the next step. One core
is reserved for copies on every side, because a card has engines for them.
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
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority
from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options

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
    """One contender's device memory. predicted: per cent of new blocks; None: nothing is ever new.

    waited: seconds. late: blocks that were not there when their step began to compute.
    """

    engine: PrefetchEngine
    predicted: int | None
    waits: bool
    number: int = 0
    waited: float = 0.0
    late: int = 0

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
            urgent, predicted = f"urgent {self.number}", f"step {self.number}"
            self._fetch(urgent, self.number, range(known, NEW), PrefetchPriority.URGENT)
            for name, count in ((urgent, NEW - known), (predicted, known)):
                if self.waits:
                    outcome = self.engine.wait_for_completion(name, DEADLINE)
                    assert outcome in (PrefetchOutcome.READY, PrefetchOutcome.UNKNOWN), outcome
                elif count and self.engine.outcome(name) is not PrefetchOutcome.READY:
                    self.late += count
            for name in (f"urgent {self.number - 1}", f"step {self.number - 1}"):
                self.engine.forget(name)
            self.waited += time.perf_counter() - start
            self._fetch(f"step {self.number + 1}", self.number + 1, range(known), PrefetchPriority.HIGH)
        scores = self.blocks @ self.query
        assert torch.isfinite(scores @ torch.ones(RESIDENT))
        self.weights @ self.row
        self.number += 1
        return time.perf_counter() - start

    def _fetch(self, name: str, step: int, which: range, priority: PrefetchPriority) -> None:
        """Fetches blocks of a step into the places of blocks of earlier steps."""
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
        contenders = []
        for predicted, waits in [(None, True), *((part, waits) for waits in (True, False) for part in PREDICTED)]:
            engines.append(PrefetchEngine(store, BLOCK_BYTES, PrefetchOptions(prefetch_cache_size=64)))
            engines[-1].start()
            contenders.append(Step(engines[-1], predicted, waits))
        times: list[list[float]] = [[] for _ in contenders]
        for turn in range(steps + 3):
            # no contender always follows the same one
            for place in random.sample(range(len(contenders)), len(contenders)):
                # On a busy machine a thread that has waited runs at once, one that has not is interrupted: all have.
                time.sleep(REST)
                spent = contenders[place].run()
                if turn >= 3:
                    times[place].append(spent)
            progress((turn + 1) / (steps + 3))
        return [_row(step, spent, times[0]) for step, spent in zip(contenders, times, strict=True)]
    finally:
        for engine in engines:
            engine.stop()
        store.close()
        torch.set_num_threads(threads)


def _row(step: Step, spent: list[float], resident: list[float]) -> dict[str, Any]:
    is_resident = step.predicted is None
    return {
        "predicted": "all resident" if is_resident else f"{step.predicted} %",
        "late blocks": "" if is_resident else "waited for" if step.waits else "left out",
        "ms": statistics.median(spent) * 1e3,
        # of the same turn: other work on the machine slows both
        "against resident": statistics.median(map(operator.truediv, spent, resident)),
        "before computing, ms": step.waited / step.number * 1e3,
        "late, of the chosen": step.late / step.number / RESIDENT,
    }
