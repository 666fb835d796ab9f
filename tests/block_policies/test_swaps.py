"""The scheduler's side of swapping against a dictionary: contents of blocks and slots are the tokens in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_gaudi_ucm.block_policies.swap.swap_cost import SwapCost
from vllm_gaudi_ucm.block_policies.swap.swaps import HostSlots, Swaps, _shared
from vllm_gaudi_ucm.protocol.memory_orders import LinkSpeed, MemoryTotals

BLOCK, BLOCK_BYTES, SLOTS, POOL = 4, 1000, 7, 12


def request(name: str, tokens: int, computed: int, **more: Any) -> Any:
    fields = {"skip_reading_prefix_cache": False, "resumable": False, **more}
    return SimpleNamespace(request_id=name, num_tokens=tokens, num_computed_tokens=computed, **fields)


def block(number: int, ref_cnt: int = 1, is_null: bool = False) -> Any:
    return SimpleNamespace(block_id=number, ref_cnt=ref_cnt, is_null=is_null)


def swaps(slots: int = SLOTS, always: bool = True) -> tuple[Swaps, MemoryTotals, SwapCost]:
    totals, cost = MemoryTotals(), SwapCost(BLOCK, BLOCK_BYTES)
    return Swaps(HostSlots(slots), BLOCK, BLOCK_BYTES, cost, always, totals), totals, cost


class Swapping(RuleBasedStateMachine):
    """Requests run, are preempted and resume; each step's orders are carried out on memory that is a dictionary.

    What a block or slot holds is (request, logical block, tokens of it).
    """

    def __init__(self) -> None:
        super().__init__()
        self.swaps, self.totals, _ = swaps()
        self.running: dict[str, tuple[Any, list[int]]] = {}
        self.waiting: dict[str, tuple[Any, int, bool]] = {}
        self.free = list(range(1, POOL + 1))
        self.device: dict[int, object] = {}
        self.host: dict[int, object] = {}
        self.names = 0
        self.lost = 0

    def _allot(self, one: Any, computed: int) -> list[int]:
        count = -(-computed // BLOCK)
        blocks, self.free = self.free[:count], self.free[count:]
        one.num_computed_tokens = computed
        self.running[one.request_id] = (one, blocks)
        return blocks

    def _write(self, one: Any, blocks: list[int]) -> None:
        for number, place in enumerate(blocks):
            self.device[place] = one.request_id, number, min(BLOCK, one.num_computed_tokens - number * BLOCK)

    def _carry_out(self) -> None:
        outs, ins = self.swaps.take_orders()
        assert len({slot for _, slot in outs}) == len(outs)
        for place, slot in outs:
            self.host[slot] = self.device[place]
        for slot, place in ins:
            self.device[place] = self.host[slot]

    @precondition(lambda self: self.free)
    @rule(tokens=st.integers(1, 3 * BLOCK))
    def begin(self, tokens: int) -> None:
        if len(self.free) >= -(-tokens // BLOCK):
            self.names += 1
            one = request(f"r{self.names}", tokens + 1, 0)
            self._write(one, self._allot(one, tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """One or more in a step; their blocks are another's and written over in the same step."""
        for name in data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, max_size=3, unique=True)):
            one, blocks = self.running.pop(name)
            refusals = self.totals.swap_refusals
            self.swaps.preempted(one, [[block(place) for place in blocks]])
            self.waiting[name] = one, one.num_computed_tokens, self.totals.swap_refusals == refusals
            self.free = blocks + self.free
            one.num_computed_tokens = 0
        self._carry_out()
        for place in self.free:
            self.device[place] = "garbage"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), hits=st.integers(0, 2))
    def resume(self, data: st.DataObject, hits: int) -> None:
        """hits: blocks that a prefix cache has."""
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        one, had, is_held = self.waiting[name]
        found = min(hits, (one.num_tokens - 1) // BLOCK) * BLOCK
        reach = self.swaps.reach(one)
        assert reach == (had if is_held else 0)
        tokens = max(found, reach)
        if len(self.free) < -(-tokens // BLOCK):
            return
        del self.waiting[name]
        blocks = self._allot(one, tokens)
        for number, place in enumerate(blocks[: found // BLOCK]):
            self.device[place] = name, number, BLOCK
        self.swaps.resumed(one, [[block(place) for place in blocks]], found, tokens)
        self._carry_out()
        self.lost += max(0, had - tokens)
        for number, place in enumerate(blocks):
            assert self.device[place] == (name, number, min(BLOCK, tokens - number * BLOCK))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[name]
        self.swaps.drop(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.free += self.running.pop(name)[1]
        self.swaps.drop(name)

    @precondition(lambda self: self.waiting)
    @rule()
    def reset(self) -> None:
        self.swaps.reset()
        self.waiting = {name: (one, 0, False) for name, (one, _, _) in self.waiting.items()}

    @invariant()
    def every_slot_is_free_or_held(self) -> None:
        self.swaps.check_integrity()
        held = sum(-(-had // BLOCK) for _, had, is_held in self.waiting.values() if is_held)
        assert self.swaps._slots.num_free == SLOTS - held

    @invariant()
    def what_is_lost_is_counted(self) -> None:
        assert self.totals.recomputed_tokens == self.lost


TestSwapping = Swapping.TestCase
TestSwapping.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_request_that_is_dropped_in_its_own_step_is_not_copied() -> None:
    """A reset of the prefix cache preempts what runs."""
    found, _, _ = swaps()
    found.preempted(request("a", 9, 8), [[block(1), block(2)]])
    found.reset()
    assert found.take_orders() == ([], [])
    found.check_integrity()


@pytest.mark.parametrize("field", ["skip_reading_prefix_cache", "resumable"])
def test_not_swapped(field: str) -> None:
    found, totals, _ = swaps()
    one = request("a", 9, 8, **{field: True})
    found.preempted(one, [[block(1), block(2)]])
    assert found.take_orders() == ([], [])
    assert found.reach(one) == 0
    found.resumed(one, [[block(1)]], 0, 0)
    assert (totals.swap_refusals, totals.recomputed_tokens) == (0, 8)


def test_a_context_with_gaps_is_refused() -> None:
    found, totals, _ = swaps()
    found.preempted(request("a", 9, 8), [[block(0, is_null=True), block(2)]])
    assert found.take_orders() == ([], [])
    assert totals.swap_refusals == 1


def windowed(window: int) -> tuple[Swaps, MemoryTotals]:
    """A group with whole contexts, and one with a window."""
    totals, cost = MemoryTotals(), SwapCost(BLOCK, BLOCK_BYTES)
    skipped = (lambda tokens: 0, lambda tokens: max(0, tokens - window + 1))
    return Swaps(HostSlots(SLOTS), BLOCK, BLOCK_BYTES, cost, True, totals, skipped), totals


def test_a_window_group_swaps_what_the_next_token_sees() -> None:
    """Of 13 tokens, with a window of 6, those from the ninth on: its last two blocks, an earlier one is not copied."""
    found, totals = windowed(6)
    null = block(0, is_null=True)
    one = request("a", 14, 13)
    found.preempted(one, [[block(n) for n in (1, 2, 3, 4)], [null, block(5), block(6), block(7)]])
    outs, _ = found.take_orders()
    assert [place for place, _ in outs] == [1, 2, 3, 4, 6, 7]
    assert found.reach(one) == 13
    # the prefix cache has the first two blocks of the one, of the other the null block stands for them
    found.resumed(one, [[block(n) for n in (1, 2, 8, 9)], [null, null, block(10), block(11)]], 8, 13)
    _, ins = found.take_orders()
    slot_of = dict(outs)
    assert ins == [(slot_of[3], 8), (slot_of[4], 9), (slot_of[6], 10), (slot_of[7], 11)]
    assert (totals.swapped_out, totals.swapped_in, totals.recomputed_tokens) == (6, 4, 0)
    found.check_integrity()


def test_a_token_that_is_computed_again_sees_more_of_its_window() -> None:
    """Its last token is computed: the window before it begins one token earlier, in a block that must be there."""
    null = block(0, is_null=True)
    for second, swapped in ((null, False), (block(6), True)):
        found, totals = windowed(6)
        one = request("a", 13, 13)
        found.preempted(one, [[block(n) for n in (1, 2, 3, 4)], [null, second, block(7), block(8)]])
        assert found.reach(one) == (12 if swapped else 0)
        assert totals.swap_refusals == (0 if swapped else 1)


def test_blocks_that_others_hold_in_every_group_are_found_again() -> None:
    """The window's first blocks are nobody's; two of the copies are of blocks that the prefix cache will have."""
    tables = [[block(1, 2), block(2, 2), block(3)], [block(0, is_null=True), block(4, 2), block(5)]]
    held = {
        (0, 0): tables[0][0],
        (0, 1): tables[0][1],
        (0, 2): tables[0][2],
        (1, 1): tables[1][1],
        (1, 2): tables[1][2],
    }
    assert _shared(tables, held) == (2, 3)


def test_the_last_token_is_computed() -> None:
    found, _, _ = swaps()
    one = request("a", 8, 8)
    found.preempted(one, [[block(1), block(2)]])
    assert found.reach(one) == 7


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cost_of(prefill: float, link: float) -> SwapCost:
    clock = Clock()
    cost = SwapCost(BLOCK, BLOCK_BYTES, clock)
    cost.measured(LinkSpeed(link, link))
    cost.step_begins(100, 100)
    clock.now += 100 / prefill
    cost.step_ends()
    return cost


def test_auto_compares_seconds() -> None:
    """Eight blocks there and back at 1,000 bytes each: 1.6 s over a link of 10 kB/s; 32 tokens again at 20 per s."""
    assert not cost_of(20.5, 10_000).prefers_swap(32, 8, 0, 0)
    assert cost_of(19.5, 10_000).prefers_swap(32, 8, 0, 0)
    # four blocks that others hold are found again: 16 tokens against eight blocks out and four back, 1.2 s
    assert not cost_of(13.5, 10_000).prefers_swap(32, 8, 4, 4)
    assert cost_of(13.2, 10_000).prefers_swap(32, 8, 4, 4)


def test_a_rate_follows_the_latest_steps_with_prompts() -> None:
    clock = Clock()
    cost = SwapCost(BLOCK, BLOCK_BYTES, clock)
    assert cost.rates.prefill == 0
    for tokens, prompt, seconds in ((100, 100, 1.0), (100, 40, 50.0), (0, 0, 9.0)):
        cost.step_begins(tokens, prompt)
        clock.now += seconds
        cost.step_ends()
    assert cost.rates.prefill == 100
    for _ in range(60):
        cost.step_begins(300, 200)
        clock.now += 1.0
        cost.step_ends()
    assert cost.rates.prefill == pytest.approx(300, rel=0.01)
    cost.step_ends()  # of a step that was never timed


def test_steps_in_flight_end_in_their_order() -> None:
    """Two stages: a step begins before the one before it has ended, and takes the time through both."""
    clock = Clock()
    cost = SwapCost(BLOCK, BLOCK_BYTES, clock)
    for tokens, prompt in ((100, 100), (6, 0)):
        cost.step_begins(tokens, prompt)
        clock.now += 1.0
    for tokens, prompt in ((100, 90), (6, 0)) * 20:
        cost.step_ends()
        cost.step_begins(tokens, prompt)
        clock.now += 1.0
    assert cost.rates.prefill == pytest.approx(50)


def test_the_slowest_worker_counts() -> None:
    """In each direction."""
    others = iter([3_000_000_000, 1_000_000_000])
    assert LinkSpeed(5e9, 5e8).slowest(lambda own: min(own, next(others))) == LinkSpeed(3e9, 5e8)


def test_auto_swaps_until_it_knows() -> None:
    found, _, cost = swaps(always=False)
    found.preempted(request("a", 9, 8), [[block(1), block(2)]])
    assert len(found.take_orders()[0]) == 2
    assert not cost.rates.are_known


def test_a_queued_step_takes_its_own_time() -> None:
    """With asynchronous scheduling a step is sent while the one before it runs, and begins at that one's end."""
    clock = Clock()
    cost = SwapCost(BLOCK, BLOCK_BYTES, clock, queues=True)
    for _ in range(2):
        cost.step_begins(100, 100)
        clock.now += 1.0
    for _ in range(2):
        clock.now += 4.0
        cost.step_ends()
    assert cost.rates.prefill == pytest.approx((100 + 90) / (4 + 0.9 * 6))
