"""The most tokens that a request may find: vLLM 0.33 bounds them, and what our block manager adds stays within."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager

from tests.block_policies.histories import make_request, make_vllm_manager
from vllm_gaudi_ucm.block_policies.partial_hits.partial_hits import PartialHits
from vllm_gaudi_ucm.block_policies.policy import BlockPolicy
from vllm_gaudi_ucm.block_policies.swap.swap_cost import SwapCost
from vllm_gaudi_ucm.block_policies.swap.swaps import HostSlots, Swaps
from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
from vllm_gaudi_ucm.scheduler.block_manager import BlockManager

BOUNDED = "max_cache_hit_length" in inspect.signature(KVCacheManager.get_computed_blocks).parameters
PROMPT = list(range(20))
BLOCK = 4


def make_manager(reach: int = 0) -> BlockManager:
    """With a request that has computed the prompt, and `reach` tokens of any request in host memory."""
    totals = MemoryTotals()
    partial = PartialHits(BLOCK, lambda request: "root", False, totals)
    policies: list[BlockPolicy] = [partial]
    if reach:
        swaps: Any = Swaps(HostSlots(1), BLOCK, 1, SwapCost(BLOCK, 1), True, totals)
        swaps.reach = lambda request: reach
        policies.append(swaps)
    manager = BlockManager.from_manager(make_vllm_manager(50, BLOCK, 40, True), policies)
    first = make_request("first", PROMPT, BLOCK)
    manager.new_step_starts()
    if not reach:
        assert manager.allocate_slots(first, len(PROMPT)) is not None
        first.num_computed_tokens = len(PROMPT)
    return manager


def found(manager: BlockManager, *bound: int) -> int:
    hits, tokens, _ = manager.get_computed_blocks(make_request("second", PROMPT, BLOCK), *bound)
    assert len(hits.blocks[0]) == -(-tokens // BLOCK) or manager._brings_tokens
    return tokens


def test_without_a_bound_all_but_the_last_token() -> None:
    assert found(make_manager()) == len(PROMPT) - 1
    assert found(make_manager(reach=15)) == 15


@pytest.mark.skipif(not BOUNDED, reason="the scheduler of this vLLM does not bound what a request may find")
@pytest.mark.parametrize("bound", [0, 3, 4, 6, 13, 19])
def test_a_bound(bound: int) -> None:
    """Parts of blocks end there, and so do blocks in host memory."""
    assert found(make_manager(), bound) == bound
    assert found(make_manager(reach=15), bound) == min(15, bound)
