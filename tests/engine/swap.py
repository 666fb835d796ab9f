"""Helpers of `test_swap.py` that other tests use, too."""

from __future__ import annotations

import random
from typing import Any

from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.block_policies.swap.swaps import Swaps
from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals

RNG = random.Random(11)


BLOCK = 16


COMMON = [RNG.randrange(3, VOCAB) for _ in range(2 * BLOCK + 5)]


def tokens(count: int) -> list[int]:
    return [RNG.randrange(3, VOCAB) for _ in range(count)]


PROMPTS = [tokens(RNG.randint(5, 90)) for _ in range(8)] + [COMMON + tokens(RNG.randint(1, 30)) for _ in range(4)]


ARRIVALS = [3 * index for index in range(len(PROMPTS))]


LENGTH = 50


# a cache of 22 blocks, where a request has up to 9 and prompts come in chunks
SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 23}


# of all requests: each look at all slots costs time, and the default has half a million of them
ROOMY = 4 << 20


def preemption(mode: str, **more: Any) -> dict[str, Any]:
    return {"preemption": {"mode": mode, "host_memory": ROOMY, **more}}


class Poisoned(Engine):
    """An engine in whose free blocks nothing is left after each step: what is not swapped in is seen at once."""

    def step(self) -> list[Any]:
        outputs = super().step()
        self.check()
        pool = self.core.scheduler.kv_cache_manager.block_pool
        free = [block.block_id for block in pool.blocks if not block.ref_cnt and not block.is_null]
        useless = [number for number in free if pool.blocks[number].block_hash is None and not self.is_held(number)]
        self.poison(useless)
        return outputs

    def is_held(self, number: int) -> bool:
        """Whether its tokens are known, so that it may be copied."""
        partial = self.core.scheduler.block_policies.named("partial hits")
        return partial is not None and partial.holds(self.core.scheduler.kv_cache_manager.block_pool.blocks[number])

    def check(self) -> None:
        if self.swaps is not None:
            self.swaps.check_integrity()

    @property
    def swaps(self) -> Swaps | None:
        policy = self.core.scheduler.block_policies.named("swap")
        return None if policy is None else policy

    @property
    def totals(self) -> MemoryTotals:
        return self.core.scheduler.block_policies.totals

    def check_all_free(self) -> None:
        """Nothing is left of any request, in host memory either."""
        for _ in range(2):
            self.step()
        self.check_idle()
        assert self.swaps is not None
        slots = self.swaps._slots
        assert slots.num_free == slots.count


def assert_swapped(engine: Poisoned, answers: list[Answer], wanted: list[Answer]) -> None:
    assert_same(answers, wanted)
    assert engine.preemptions > 2
    assert engine.totals.swapped_in > 2
    assert engine.totals.recomputed_tokens == 0
    engine.check_all_free()
