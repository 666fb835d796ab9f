"""Random histories of slots in strips: one owner each, few ranges of a context, and room for who is alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from vllm.v1.request import Request

from tests.block_policies.histories import LONGEST, Histories, make_request, make_vllm_manager
from vllm_gaudi_ucm.batch.token_table import TokenTable
from vllm_gaudi_ucm.block_policies.token_slots.free_strips import FreeStrips
from vllm_gaudi_ucm.block_policies.token_slots.token_slots import StripSizes, TokenSlots
from vllm_gaudi_ucm.scheduler.block_manager import BlockManager

TILE, STRIP = 8, 4
# two ranges more than strips, where a server has sixteen
MOST_RANGES = LONGEST // STRIP + 2
PREFIX = [0, 1, 2, 0, 1, 1, 2, 2, 0, 1, 2, 1]


def make_manager(num_slots: int, caching: bool, most_ranges: int = MOST_RANGES) -> BlockManager:
    manager = make_vllm_manager(num_slots + 1, 1, LONGEST, caching)
    sizes = StripSizes(TILE, STRIP, LONGEST, most_ranges)
    return BlockManager.from_manager(manager, [TokenSlots(sizes)])


def queue_of(manager: BlockManager) -> FreeStrips:
    queue = manager.block_pool.free_block_queue
    assert isinstance(queue, FreeStrips)
    return queue


def begin(manager: BlockManager, request: Request) -> int | None:
    """Its tokens in the prefix cache, or None where it has to wait."""
    manager.new_step_starts()
    hits, found, _ = manager.get_computed_blocks(request)
    if manager.allocate_slots(request, request.num_tokens - found, found, hits) is None:
        return None
    request.num_computed_tokens = request.num_tokens
    return found


def converse(manager: BlockManager, turns: list[int], most: int) -> None:
    """Each turn is one token, and leaves an answer behind that the next one does not go on from."""
    for length in range(1, len(turns) + 1):
        request = make_request(f"turn{length}", turns[:length], 1)
        assert begin(manager, request) is not None
        request.append_output_token_ids(50 + length)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        assert num_ranges(manager, request) <= most
        manager.free(request)


def slots_of(manager: BlockManager, request: Request) -> list[int]:
    return manager.get_block_ids(request.request_id)[0]


def num_ranges(manager: BlockManager, request: Request) -> int:
    """As a worker counts them."""
    table = TokenTable(1, TILE)
    table.append(0, slots_of(manager, request))
    table.flush()
    return int(table.num_runs[0])


@settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
class Slots(Histories):
    """covers: A20, A21. The last strip is shorter than the others, where there is one."""

    @initialize(caching=st.booleans(), num_slots=st.integers(LONGEST, 3 * LONGEST))
    def make(self, caching: bool, num_slots: int) -> None:
        self.manager = make_manager(num_slots, caching)
        self.num_slots = num_slots
        # (all tokens up to it) of each slot: what keys and values are a function of
        self.cache: list[tuple[int, ...] | None] = [None] * (num_slots + 1)
        self.live: dict[str, Request] = {}
        self.count = 0

    def _write(self, request: Request, first: int) -> None:
        for position, slot in list(enumerate(slots_of(self.manager, request)))[first : request.num_tokens]:
            assert self.manager.block_pool.blocks[slot].ref_cnt == 1, "a slot is written while others refer to it"
            self.cache[slot] = tuple(request.all_token_ids[: position + 1])

    def _admit(self, request: Request) -> bool:
        found = begin(self.manager, request)
        if found is not None:
            self.live[request.request_id] = request
            self._write(request, found)
        return found is not None

    def _new(self, tokens: list[int]) -> Request:
        self.count += 1
        return make_request(f"r{self.count}", tokens, 1)

    @rule(common=st.integers(0, 12), own=st.lists(st.integers(0, 2), min_size=1, max_size=14))
    def admit(self, common: int, own: list[int]) -> None:
        self._admit(self._new(PREFIX[:common] + own))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        """Several requests in turn, as they decode in a batch."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, unique=True))
        for token in tokens:
            for request in [self.live[name] for name in names if name in self.live]:
                if request.num_tokens < LONGEST:
                    self._append(request, [token])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), drafts=st.integers(1, 3), accepted=st.integers(0, 3))
    def verify(self, data: st.DataObject, drafts: int, accepted: int) -> None:
        """Slots of rejected drafts stay behind."""
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if request.num_tokens < LONGEST - 4:
            self._append(request, [1] * (1 + min(accepted, drafts)), drafts)

    def _append(self, request: Request, tokens: list[int], lookahead: int = 0) -> None:
        before = request.num_tokens
        for token in tokens:
            request.append_output_token_ids(token)
        request.num_computed_tokens = before
        if self.manager.allocate_slots(request, len(tokens), num_lookahead_tokens=lookahead) is None:
            self._end(request)
            return
        request.num_computed_tokens = request.num_tokens
        self._write(request, before)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST))
    def alone(self, tokens: list[int]) -> None:
        """Whatever the prefix cache holds and wherever, the second attempt succeeds."""
        for request in list(self.live.values()):
            self._end(request)
        request = self._new(tokens)
        assert self._admit(request) or self._admit(request)
        refusals = 0
        while request.num_tokens < LONGEST:
            self._append(request, [2])
            if request.request_id not in self.live:
                # it has preempted itself: what it has computed is in the cache
                refusals += 1
                request.num_computed_tokens = 0
                assert self._admit(request) or self._admit(request)
        assert refusals <= 1

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == (not self.live)

    @invariant()
    def nothing_is_lost(self) -> None:
        queue_of(self.manager).check_integrity()
        held = {slot for request in self.live.values() for slot in slots_of(self.manager, request)}
        assert len(held) + self.manager.block_pool.get_num_free_blocks() == self.num_slots

    @invariant()
    def every_context_is_what_its_request_has_computed(self) -> None:
        for request in self.live.values():
            tokens = request.all_token_ids
            found = [self.cache[slot] for slot in slots_of(self.manager, request)[: len(tokens)]]
            assert found == [tuple(tokens[: end + 1]) for end in range(len(tokens))]

    @invariant()
    def no_context_has_more_ranges_than_a_bucket_holds(self) -> None:
        assert all(num_ranges(self.manager, request) <= MOST_RANGES for request in self.live.values())


TestSlots = Slots.TestCase


def test_requests_that_decode_together_stay_together() -> None:
    """vLLM's own queue gives each the slot behind the other's."""
    manager = make_manager(96, caching=True)
    requests = [make_request(f"r{index}", [index] * 9, 1) for index in range(3)]
    for request in requests:
        assert begin(manager, request) == 0
    for _ in range(15):
        for request in requests:
            request.append_output_token_ids(7)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
    # 24 tokens are three blocks of eight
    assert all(num_ranges(manager, request) <= 4 for request in requests)


def test_the_rest_of_a_strip_is_free_for_vllm_and_for_nobody_else() -> None:
    manager = make_manager(LONGEST, caching=False)
    request = make_request("r", [1, 2, 3, 4, 5], 1)
    assert begin(manager, request) == 0
    assert manager.block_pool.get_num_free_blocks() == LONGEST - 5
    other = make_request("o", [3] * (LONGEST - 2 * STRIP + 1), 1)
    assert begin(manager, other) is None
    shorter = make_request("s", [3] * (LONGEST - 2 * STRIP), 1)
    assert begin(manager, shorter) == 0
    for _ in range(3):
        request.append_output_token_ids(7)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    request.append_output_token_ids(7)
    assert manager.allocate_slots(request, 1) is None
    manager.free(shorter)
    assert manager.allocate_slots(request, 1) is not None


@pytest.mark.parametrize("most", [MOST_RANGES, MOST_RANGES + 6])
def test_a_scattered_prefix_is_shared_as_far_as_there_are_ranges(most: int) -> None:
    manager = make_manager(3 * LONGEST, True, most)
    turns = list(range(20))
    converse(manager, turns, most)
    found = manager.get_computed_blocks(make_request("more", [*turns, 7], 1))[1]
    assert 0 < found < 20
    sizes = StripSizes(TILE, STRIP, LONGEST, most)
    # ranges of the hits, and a strip for each four tokens from there on
    slots = [manager.block_pool.blocks[slot] for slot in range(1, 40, STRIP)]
    longest = sizes.longest_hit(slots)
    assert longest + -(-(LONGEST - longest) // STRIP) + 1 <= most
    assert 0 < longest < len(slots)
    assert sizes.longest_hit([]) == 0
    assert sizes.longest_hit([manager.block_pool.blocks[slot] for slot in range(1, 1 + LONGEST)]) == LONGEST


def test_strips_that_are_ready_are_those_unused_longest() -> None:
    """A prefix that was used last stays, while older ones make room."""
    manager = make_manager(4 * LONGEST, True)
    for name in range(4):
        request = make_request(f"r{name}", [name] * 32, 1)
        assert begin(manager, request) == 0
        manager.free(request)
    assert begin(manager, make_request("more", [9] * 32, 1)) == 0
    hits = [manager.get_computed_blocks(make_request(f"again{name}", [name] * 33, 1))[1] for name in range(4)]
    assert hits[0] < 32
    assert hits[1:] == [32, 32, 32]


def test_who_is_alone_computes_a_scattered_prefix_again() -> None:
    """Nine turns of one token lie in nine of ten strips: 40 tokens fit the cache, but not beside these. covers: A6."""
    manager = make_manager(LONGEST, caching=True, most_ranges=100)
    turns = list(range(9))
    converse(manager, turns, 9)
    whole = make_request("whole", [*turns, *range(100, 100 + LONGEST - 9)], 1)
    assert manager.get_computed_blocks(whole)[1] == 9
    assert begin(manager, whole) is None
    queue_of(manager).check_integrity()
    assert begin(manager, whole) == 0
    assert manager.block_pool.get_num_free_blocks() == 0
    manager.free(whole)
    # what it has computed is found again, now that it lies together
    assert manager.get_computed_blocks(make_request("again", list(whole.all_token_ids), 1))[1] == LONGEST - 1
    # beside others it keeps what it finds, and waits
    assert begin(manager, make_request("other", [7] * 30, 1)) == 0
    late = make_request("late", [*turns[:4], *range(200, 220)], 1)
    found = manager.get_computed_blocks(late)[1]
    assert begin(manager, late) is None
    assert manager.get_computed_blocks(late)[1] == found
