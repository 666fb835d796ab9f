"""Memory mode with two workers: blocks leave and come back on both alike, whatever one of them cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.connector import file_store, transfer
from tests.engine.memory_mode import ucm
from tests.engine.rank_faults import heal_loads, lose_blocks, settle_moves, settle_saves, spoil_copies
from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.sparse import OPTIONS, tokens
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.connector.connector import our_connector
from vllm_gaudi_ucm.protocol.offload import OffloadTotals
from vllm_gaudi_ucm.store.block_key import chain_keys

pytestmark = pytest.mark.slow  # starts engines

BLOCK = 16
PROMPTS = [tokens(count) for count in (20, 130, 200)]
AGAIN = [tokens(count) for count in (190, 250)]
# of which one token, some, and a block are computed when the rest is stored
STORED = [tokens(20 * BLOCK + 1), tokens(15 * BLOCK + 6), tokens(16 * BLOCK)]


class Compared:
    """One engine of several workers, or of one: what it answers, and what memory mode has done meanwhile."""

    def __init__(self, engine: Engine, workers: int) -> None:
        self.engine = engine
        self.last = workers - 1
        self.scheduler: Any = engine.core.scheduler
        self.seen: list[tuple[list[Answer], OffloadTotals]] = []

    def on_workers(self, look: Any) -> None:
        self.engine.core.model_executor.collective_rpc(look)

    def serve(self, prompts: Sequence[list[int]], together: bool, outputs: int = 8) -> None:
        serve = self.engine.greedy if together else self.engine.alone
        answers = serve(prompts, outputs)
        self.seen.append((answers, msgspec.structs.replace(self.scheduler.offload.totals)))

    def settle(self) -> None:
        """Everything is stored, and nothing is under way."""
        for _ in range(3):
            self.engine.step()
        self.on_workers(settle_saves)
        self.engine.check_idle()
        self.scheduler.offload.check_integrity()

    def lose(self, prompt: list[int], every: int) -> None:
        """The last rank has lost some of the blocks of a prompt that a look-up finds."""
        ours = our_connector(self.scheduler.connector)
        assert ours is not None
        keys = chain_keys(ours._setup.namespace(sparse=True), None, prompt[: (len(prompt) - 1) // BLOCK * BLOCK], BLOCK)
        self.on_workers(partial(lose_blocks, rank=self.last, keys=keys[1::every]))


def run(model: Path, folder: Path, workers: int) -> list[tuple[list[Answer], OffloadTotals]]:
    config = {**ucm(), "distributed": {"check_ranks": True}}
    stored = transfer(file_store(folder / str(workers)), prefetch={"prefetch_cache_size": 1})
    of_workers: Any = EngineOfWorkers if workers > 1 else Engine
    options = {**OPTIONS, "enable_prefix_caching": False, "tensor_parallel_size": workers}
    with of_workers(model, config, **options, kv_transfer_config=stored) as engine:
        one = Compared(engine, workers)
        one.on_workers(settle_moves)
        one.serve(PROMPTS, together=True)
        one.serve(STORED, together=False, outputs=2)
        one.settle()
        # a part of the blocks is loaded, and others come back from the connector's store
        one.serve(STORED, together=False)
        for prompt, every in zip(STORED, (1, 3, 30), strict=True):
            one.lose(prompt, every)
            one.serve([prompt], together=False)
        one.on_workers(heal_loads)
        one.on_workers(partial(spoil_copies, rank=one.last))
        one.serve(AGAIN, together=True, outputs=20)
        one.settle()
        return one.seen


def test_two_workers_do_what_one_does(tiny_llama: Path, tmp_path: Path) -> None:
    """covers: C8 C10 D9. Copies that fail or are late on one rank of two, against the same on the only rank of one."""
    expected, found = (run(tiny_llama, tmp_path, workers) for workers in (1, 2))
    for (answers, totals), (wanted, counted) in zip(found, expected, strict=True):
        assert_same(answers, wanted)
        assert totals.missed == pytest.approx(counted.missed, rel=1e-3)
        assert msgspec.structs.replace(totals, missed=0.0) == msgspec.structs.replace(counted, missed=0.0)
    spoiled, before = found[-1][1], found[-2][1]
    for event in ("saved", "unsaved", "released", "loaded", "failed"):
        assert getattr(spoiled, event) > getattr(before, event), event
    assert before.stored
