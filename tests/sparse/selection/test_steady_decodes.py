"""Decodes within their blocks: nothing is looked at, and nothing is missed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.sparse.selection.steady_states import (
    BLOCK_SIZE,
    BLOCKS,
    MOST,
    WIDTH,
    Requests,
    assert_same,
    both,
    decision,
    state_of,
)
from vllm_gaudi_ucm.sparse.selection.selection_state import StepSelection


def test_most_steps_look_at_no_block() -> None:
    """One in which a block begins, and one in which it becomes full, of four; for two requests that are not at the same
    place one more pair."""
    counts: list[int] = []
    state, requests = state_of(counts=counts), Requests()
    for name, computed in (("a", 8), ("b", 16)):
        requests.begin(name, computed)
    summarised = []
    for step in range(16):
        found = state.step(["a", "b"], requests.batch({"a": 1, "b": 1}), np.zeros(2, np.int64), {})
        summarised.append(len(found.summary_blocks))
        assert len(counts) == 1 + (step + 1) // 4 + step // 4
        for name in requests.computed:
            requests.computed[name] += 1
    # the contexts, and then a block of each in every fourth step
    assert summarised == [6, 0, 0, 2] + 3 * [0, 0, 0, 2]


@pytest.mark.parametrize("event", ["forgotten", "written", "brought", "moved", "drafts", "chunk", "skipped", "sparse"])
def test_what_happens_in_between_is_seen(event: str) -> None:
    counts: list[int] = []
    state, requests = state_of(counts=counts), Requests()
    requests.begin("a", 8)

    def step(new: int = 1, drafts: int = 0) -> StepSelection:
        found = state.step(["a"], requests.batch({"a": new}), np.array([drafts]), {})
        requests.computed["a"] += new - drafts
        return found

    step()
    before = len(counts)
    block = np.array([requests.tables["a"][0]])
    if event == "forgotten":
        state.forget(["a"])
    elif event == "written":
        # a connector has filled it anew: it has no summary any more
        state.summaries.written(block)
    elif event == "brought":
        state.summaries.brought(block)
    elif event == "moved":
        target = np.array([requests.free.pop()])
        state.summaries.moved(block, target)
        requests.tables["a"][0] = int(target[0])
    elif event == "drafts":
        # two of three rows may be wrong, one was right
        step(3, 2)
    elif event == "chunk":
        step(2)
    elif event == "skipped":
        requests.computed["a"] += 1
    else:
        state.step(["a"], requests.batch({"a": 1}), np.zeros(1, np.int64), {"a": decision(10)})
    at = len(counts)
    found = step()
    assert len(counts) > at
    due = {"written": block.tolist(), "chunk": requests.tables["a"][2:3]}
    assert found.summary_blocks.tolist() == due.get(event, [])
    assert at >= before


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_any_traffic_gives_what_a_look_at_every_block_gives(seed: int, bounded: bool) -> None:
    """Chunks, decodes, drafts, aborts, loads and moves, dense and sparse: the same summaries and choices."""
    rng = random.Random(seed)
    counts: list[int] = []
    fast, slow = state_of(bounded=bounded, counts=counts), state_of(bounded=bounded, steady=False)
    requests, number, steps = Requests(), 0, 400
    for _ in range(steps):
        event = rng.random()
        if len(requests.computed) < MOST and (not requests.computed or event < 0.05):
            name, number = f"r{number}", number + 1
            requests.begin(name, 0)
            both(fast, slow, "forget", [name])
        elif event < 0.08:
            name = rng.choice(list(requests.computed))
            requests.end(name)
            both(fast, slow, "forget", [name])
        elif event < 0.1:
            blocks = np.array(rng.sample(range(1, BLOCKS), 2))
            both(fast, slow, "written", blocks, summaries=True)
            both(fast, slow, "brought", blocks[:1], summaries=True)
        for name in [one for one, computed in requests.computed.items() if computed > (WIDTH - 2) * BLOCK_SIZE]:
            requests.end(name)
            both(fast, slow, "forget", [name])
        if not requests.computed:
            continue
        kinds = {name: rng.random() for name in requests.computed}
        scheduled = {n: 5 if not requests.computed[n] else 3 if kind < 0.03 else 1 for n, kind in kinds.items()}
        drafts = [rng.randrange(scheduled[n]) if requests.computed[n] else 0 for n in scheduled]
        batch = requests.batch(scheduled)
        decisions = {}
        if rng.random() < 0.2:
            ends = {n: requests.computed[n] + scheduled[n] - d for n, d in zip(scheduled, drafts, strict=True)}
            decisions = {n: decision(end) for n, end in ends.items() if end >= 3 * BLOCK_SIZE}
        found = [one.step(list(scheduled), batch, np.array(drafts), decisions) for one in (fast, slow)]
        assert_same(*found)
        assert (fast.summaries.ready == slow.summaries.ready).all()
        fast.summaries.check_integrity()
        for (name, new), draft in zip(scheduled.items(), drafts, strict=True):
            requests.computed[name] += new - rng.randint(0, draft)
    assert len(counts) < 0.9 * steps, "the case tells nothing"
