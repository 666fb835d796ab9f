"""Random histories of the pool against a dict of contents: requests grow, share, copy, end, and their blocks move."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from vllm.v1.request import Request

from tests.block_policies.histories import LONGEST, Histories, make_request, make_vllm_manager
from vllm_gaudi_ucm.block_policies.compaction.compaction import Compaction
from vllm_gaudi_ucm.block_policies.compaction.free_runs import FreeRuns
from vllm_gaudi_ucm.block_policies.partial_hits.partial_hits import PartialHits
from vllm_gaudi_ucm.block_policies.policy import BlockPolicy
from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
from vllm_gaudi_ucm.scheduler.block_manager import BlockManager

BLOCK = 4
NUM_BLOCKS = 24


def make_manager(num_blocks: int, caching: bool, partial: bool) -> BlockManager:
    """vLLM's manager, with compaction."""
    manager = make_vllm_manager(num_blocks, BLOCK, LONGEST + BLOCK, caching)
    totals = MemoryTotals()
    policies: list[BlockPolicy] = [Compaction(totals)]
    if partial:
        policies.insert(0, PartialHits(BLOCK, lambda request: None, False, totals))
    return BlockManager.from_manager(manager, policies)


@settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
class Pool(Histories):
    """covers: A20, A21."""

    @initialize(caching=st.booleans(), partial=st.booleans())
    def begin(self, caching: bool, partial: bool) -> None:
        self.manager = make_manager(NUM_BLOCKS, caching, caching and partial)
        self.caching = caching
        self.pool = self.manager.block_pool
        queue = self.pool.free_block_queue
        assert isinstance(queue, FreeRuns)
        self.queue = queue
        # (all tokens up to it) of each slot: what keys and values are a function of
        self.cache: list[list[tuple[int, ...] | None]] = [[None] * BLOCK for _ in range(NUM_BLOCKS)]
        self.live: dict[str, Request] = {}
        self.pinned: set[int] = set()
        self.count = 0

    def _blocks(self, request: Request) -> list[int]:
        return self.manager.get_block_ids(request.request_id)[0]

    def _run(self, request: Request, count: int, hit_tokens: int = 0) -> None:
        """Copies, then writes as a worker does: no block that others refer to, nor one that is in the prefix cache."""
        copies, retained = self.manager.take_kv_cache_block_copies()
        for source, target in copies:
            self.cache[target] = list(self.cache[source])
        self.pool.free_blocks(retained)
        blocks, known = self._blocks(request), request.num_computed_tokens + hit_tokens
        tokens = request.all_token_ids
        for position in range(known, known + count):
            block = blocks[position // BLOCK]
            assert self.pool.blocks[block].ref_cnt == 1, "a block is written while others refer to it"
            self.cache[block][position % BLOCK] = tuple(tokens[: position + 1])
        request.num_computed_tokens = known + count

    @rule(common=st.integers(0, 12), own=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def allocate(self, common: int, own: list[int]) -> None:
        """The common start makes requests share blocks, and parts of blocks where that is on."""
        self.count += 1
        request = make_request(f"r{self.count}", [0, 1, 2, 0, 1, 1, 2, 2, 0, 1, 2, 1][:common] + own, BLOCK)
        self._admit(request)

    def _admit(self, request: Request) -> None:
        self.manager.new_step_starts()
        hits, found, _ = self.manager.get_computed_blocks(request)
        rest = request.num_tokens - found
        if self.manager.allocate_slots(request, rest, found, hits) is None:
            return
        self.live[request.request_id] = request
        self._run(request, rest, found)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        for token in tokens:
            if request.num_tokens >= LONGEST:
                return
            request.append_output_token_ids(token)
            self.manager.new_step_starts()
            if self.manager.allocate_slots(request, 1) is None:
                return self._end(request)
            self._run(request, 1)

    def _end(self, request: Request) -> None:
        super()._end(request)
        self.pinned = {block for block in self.pinned if self.pool.blocks[block].ref_cnt}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.pinned = {data.draw(st.sampled_from(self._blocks(request)))}

    @rule(is_quiet=st.booleans())
    def move(self, is_quiet: bool) -> None:
        policy = self.manager._policies[-1]
        assert isinstance(policy, Compaction)
        counts = sorted(block.ref_cnt for block in self.pool.blocks)
        objects = {number: self.pool.blocks[number] for number in self.pinned}
        highest = self.queue.highest_in_use
        for moves in policy.step(is_quiet, self.pinned):
            sources, targets = {move[0] for move in moves}, {move[1] for move in moves}
            assert not sources & targets
            assert len(targets) == len(moves)
            for source, target in moves:
                self.cache[target] = list(self.cache[source])
                self.cache[source] = [None] * BLOCK
        assert counts == sorted(block.ref_cnt for block in self.pool.blocks)
        assert all(self.pool.blocks[number] is block for number, block in objects.items())
        assert self.queue.highest_in_use <= highest

    @precondition(lambda self: not self.live)
    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache()

    @invariant()
    def books_agree(self) -> None:
        self.queue.check_integrity()
        in_use = {block for request in self.live.values() for block in self._blocks(request)}
        assert self.queue.num_free_blocks + len(in_use) + 1 == NUM_BLOCKS
        for number, block in enumerate(self.pool.blocks):
            assert block.block_id == number
            holders = sum(number in self._blocks(request) for request in self.live.values())
            assert block.is_null or block.ref_cnt == holders

    @invariant()
    def contents_are_right(self) -> None:
        """Of every live request, and of all that the prefix cache would find."""
        for request in self.live.values():
            blocks = self._blocks(request)
            for position in range(request.num_computed_tokens):
                held = self.cache[blocks[position // BLOCK]][position % BLOCK]
                assert held == tuple(request.all_token_ids[: position + 1])
        for key, found in self.pool.cached_block_hash_to_block._cache.items():
            alike = found if isinstance(found, dict) else {found.block_id: found}
            for number, block in alike.items():
                assert block.block_id == number
                assert block.block_hash == key
                assert self.cache[number][-1] is not None, "what is in the prefix cache was overwritten"


TestPool = Pool.TestCase
