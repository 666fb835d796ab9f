"""Requests that choose from the same blocks again are not looked at again, and nothing is missed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.sparse.selection.steady_states import BLOCK_SIZE, MOST, WIDTH, Requests, assert_same, both, state_of
from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionState

DRAFTS = 2


class Locks:
    """Decides as KVStar does: a window is chosen, reused for some steps, and checked."""

    def __init__(self, rng: random.Random, steps: int = 5) -> None:
        self._rng = rng
        self._steps = steps
        self._windows: dict[str, tuple[RequestSelection, int]] = {}

    def decide(self, name: str, certain: int) -> RequestSelection:
        """certain: tokens of the request that the step is sure of."""
        window, age = self._windows.get(name, (None, 0))
        if window is not None and age % self._steps:
            self._windows[name] = window, age + 1
            return RequestSelection(SelectionMode.REUSE, *bounds(window))
        mode = SelectionMode.SELECT if window is None or self._rng.random() < 0.5 else SelectionMode.CHECK
        full = certain // BLOCK_SIZE
        found = RequestSelection(mode, 1, full - 1, self._rng.randint(1, 2), 2 * (mode == SelectionMode.CHECK))
        self._windows[name] = found, age + 1
        return found


def bounds(decision: RequestSelection) -> tuple[int, int, int]:
    return decision.sink_blocks, decision.window_start, decision.num_selected


def verify(
    states: tuple[SelectionState, ...], requests: Requests, decisions: dict[str, RequestSelection], drafts: int = DRAFTS
) -> None:
    """Gives a step of all requests to all states, and checks that they agree."""
    scheduled = dict.fromkeys(requests.computed, 1 + drafts)
    batch, count = requests.batch(scheduled), np.full(len(scheduled), drafts)
    first, *others = states
    first.begin_step()
    found = first.step(list(scheduled), batch, count, decisions)
    for other in others:
        other.begin_step()
        assert_same(found, other.step(list(scheduled), batch, count, decisions))
        assert (first.summaries.ready == other.summaries.ready).all()
        assert (first.slots.num_stored == other.slots.num_stored).all()
        assert (first.slots.candidates == other.slots.candidates).all()
        assert first.chosen == other.chosen
        assert first.totals == other.totals
    first.summaries.check_integrity()
    first.slots.check_integrity()


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_any_verifications_give_what_a_look_at_every_block_gives(seed: int, bounded: bool) -> None:
    """Drafts are accepted in any number, locks are made and checked, requests come and go, blocks are loaded."""
    rng = random.Random(seed)
    counts: list[int] = []
    fast, slow = state_of(bounded=bounded, counts=counts), state_of(bounded=bounded, steady=False)
    requests, locks, number, steps = Requests(), Locks(rng), 0, 300
    for _ in range(steps):
        event = rng.random()
        over = [one for one, computed in requests.computed.items() if computed > (WIDTH - 2) * BLOCK_SIZE]
        if event < 0.02 and requests.computed:
            over.append(rng.choice(list(requests.computed)))
        for name in dict.fromkeys(over):
            requests.end(name)
            both(fast, slow, "forget", [name])
        while not requests.computed or (event > 0.95 and len(requests.computed) < MOST):
            name, number, event = f"r{number}", number + 1, 0.0
            requests.begin(name, rng.randrange(2, 5) * BLOCK_SIZE + rng.randrange(BLOCK_SIZE))
            both(fast, slow, "forget", [name])
        if 0.02 < event < 0.05:
            blocks = np.array(requests.tables[next(iter(requests.computed))][:1], np.int64)
            both(fast, slow, "written" if rng.random() < 0.5 else "brought", blocks, summaries=True)
        decisions = {name: locks.decide(name, computed + 1) for name, computed in requests.computed.items()}
        if rng.random() < 0.05:
            decisions.pop(rng.choice(list(decisions)))
        verify((fast, slow), requests, decisions)
        for name in requests.computed:
            requests.computed[name] += 1 + rng.randint(0, DRAFTS)


def test_a_lock_is_looked_at_once() -> None:
    """Blocks are looked at when one begins; a block that becomes full gets a summary."""
    looks: list[int] = []
    state, requests = state_of(counts=looks), Requests()
    requests.begin("a", 4 * BLOCK_SIZE)
    for step in range(16):
        mode = SelectionMode.REUSE if step else SelectionMode.SELECT
        verify((state,), requests, {"a": RequestSelection(mode, 1, 3, 1)}, drafts=1)
        requests.computed["a"] += 1
    # the first step, and then a new block every four tokens
    assert looks == [1] * 5
    assert state.summaries.ready[requests.tables["a"][:7]].all()


@pytest.mark.parametrize("change", ["forgotten", "loaded", "bounds", "mode", "dense", "rewound", "block"])
def test_a_change_is_seen(change: str) -> None:
    """A state that looks at every block gives the same result."""
    looks: list[int] = []
    fast, slow = state_of(counts=looks), state_of(steady=False)
    requests = Requests()
    requests.begin("a", 5 * BLOCK_SIZE)
    requests.begin("b", 6 * BLOCK_SIZE)
    decisions = dict.fromkeys("ab", RequestSelection(SelectionMode.SELECT, 1, 4, 2))
    verify((fast, slow), requests, decisions, drafts=0)
    reused = dict.fromkeys("ab", RequestSelection(SelectionMode.REUSE, 1, 4, 2))
    requests.computed = {name: computed + 1 for name, computed in requests.computed.items()}
    before = len(looks)
    verify((fast, slow), requests, reused, drafts=0)
    assert len(looks) == before, "steady"
    requests.computed = {name: computed + 1 for name, computed in requests.computed.items()}
    if change == "forgotten":
        both(fast, slow, "forget", ["a"])
    elif change == "loaded":
        both(fast, slow, "written", np.array(requests.tables["a"][2:3]), summaries=True)
    elif change == "bounds":
        reused["b"] = RequestSelection(SelectionMode.REUSE, 1, 4, 1)
    elif change == "mode":
        reused["b"] = RequestSelection(SelectionMode.CHECK, 1, 4, 2, 1)
    elif change == "dense":
        del reused["a"]
    elif change == "rewound":
        requests.computed["a"] -= BLOCK_SIZE
    else:
        requests.tables["a"][2] = requests.free.pop()
    before = len(looks)
    verify((fast, slow), requests, reused, drafts=0)
    assert len(looks) > before
