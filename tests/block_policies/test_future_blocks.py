"""The most blocks that requests will use: against a simulation, token by token."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.block_policies.admission.future_blocks import UNKNOWN, Footprint, peak_blocks

BLOCK = 4


@st.composite
def footprints(draw: st.DrawFn) -> list[Footprint]:
    """Some share the blocks of a common prefix; some hold all blocks of their context, some none yet."""
    prefix = list(range(100, 100 + draw(st.integers(0, 4))))
    made = []
    for number in range(draw(st.integers(0, 7))):
        shared = prefix[: draw(st.integers(0, len(prefix)))]
        tokens = len(shared) * BLOCK + draw(st.integers(1, 20))
        own = range(
            1000 * (number + 1), 1000 * (number + 1) + draw(st.integers(0, (tokens - 1) // BLOCK - len(shared) + 1))
        )
        made.append(Footprint([*shared, *own], tokens, draw(st.integers(0, 25))))
    return made


def simulated(found: list[Footprint], delays: list[int] | None = None) -> int:
    """Distinct blocks at the time of the most; delays: of these requests, else none."""
    blocks = [set(one.blocks) for one in found]
    done = [0] * len(found)
    alive = [True] * len(found)
    most, new = 0, 10**6
    for step in range(200):
        for place, one in enumerate(found):
            if not alive[place]:
                continue
            started = step > (0 if delays is None else delays[place])
            done[place] += started and done[place] < one.left
            while len(blocks[place]) * BLOCK < one.tokens + done[place]:
                blocks[place].add(new)
                new += 1
        most = max(most, len(set().union(*(own for own, lives in zip(blocks, alive, strict=True) if lives), set())))
        for place, one in enumerate(found):
            ends = done[place] == one.left and step >= (0 if delays is None else delays[place])
            alive[place] = alive[place] and not ends
    assert not any(alive)
    return most


@given(footprints())
def test_the_peak_is_that_of_a_simulation(found: list[Footprint]) -> None:
    assert peak_blocks(found, BLOCK) == simulated(found)


@given(found=footprints(), seed=st.integers(0, 1000))
def test_nobody_needs_more_whoever_is_late(found: list[Footprint], seed: int) -> None:
    """Delays are bounds: requests begin at any time until then."""
    rng = random.Random(seed)
    most = [rng.randrange(12) for _ in found]
    late = [rng.randint(0, delay) for delay in most]
    bounded = [one._replace(delay=delay) for one, delay in zip(found, most, strict=True)]
    assert simulated(found, late) <= peak_blocks(bounded, BLOCK)
    assert peak_blocks(bounded, BLOCK) <= peak_blocks(found, BLOCK, in_step=False)


def test_where_nobody_knows_when_it_begins_it_stays() -> None:
    loading = Footprint([1, 2], 8, 4, UNKNOWN)
    assert peak_blocks([loading, Footprint([3], 4, 400)], BLOCK) == 3 + 101
    assert peak_blocks([], BLOCK) == 0


@st.composite
def in_groups(draw: st.DrawFn) -> list[Footprint]:
    """Two groups that keep whole contexts, and two with windows of other sizes."""
    windows = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=2)))
    whole = draw(st.integers(0, 2))
    made = []
    for number, one in enumerate(draw(footprints())):
        held = range(
            5000 * (number + 1), 5000 * (number + 1) + whole * draw(st.integers(0, (one.tokens - 1) // BLOCK + 1))
        )
        made.append(one._replace(blocks=held, whole=whole, windows=windows))
    return made


def in_groups_at(one: Footprint, generated: int) -> int:
    blocks = -(-(one.tokens + generated) // BLOCK)
    return max(blocks * one.whole, len(one.blocks)) + sum(min(blocks, most) for most in one.windows)


@given(in_groups())
def test_windows_hold_no_more_than_their_own(found: list[Footprint]) -> None:
    """Nothing is shared, all generate at once: at each time those whose end has not passed."""
    ends = range(1 + max((one.left for one in found), default=0))
    expected = max((sum(in_groups_at(one, end) for one in found if one.left >= end) for end in ends), default=0)
    assert peak_blocks(found, BLOCK) == expected
    longest = sum(in_groups_at(one, one.left) for one in found)
    assert peak_blocks(found, BLOCK, in_step=False) == longest
