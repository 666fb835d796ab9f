"""Slots taken and given back on the device, against a set of free slots in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.device_slots import give_slots, new_state, take_slots

CPU = torch.device("cpu")


def oracle(free: set[int], count: int, num_slots: int) -> list[int]:
    if not 0 < count <= len(free):
        return []
    for first in range(num_slots):
        run = range(first, first + count)
        if free.issuperset(run):
            return list(run)
    return sorted(free)[:count]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_history_of_requests(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 24))
    most = data.draw(st.integers(1, num_slots))
    state, free, held = new_state(num_slots, CPU), set(range(1, num_slots)), list[list[int]]()
    for _ in range(data.draw(st.integers(1, 14))):
        if held and data.draw(st.booleans()):
            slots = held.pop(data.draw(st.integers(0, len(held) - 1)))
            padded = slots + [0] * data.draw(st.integers(0, 3))
            state = give_slots(state, torch.tensor(padded, dtype=torch.int64))
            free.update(slots)
        else:
            count = data.draw(st.integers(0, most))
            before = state.clone()
            found, after = take_slots(state, torch.tensor(count), most)
            assert torch.equal(state, before), "the state before is left alone"
            expected = oracle(free, count, num_slots)
            assert found.tolist() == expected + [0] * (most - len(expected))
            free.difference_update(expected)
            state = after
            if expected:
                held.append(expected)
        assert state.nonzero()[:, 0].tolist() == sorted(free)


def test_it_compiles_to_one_graph_for_every_count() -> None:
    """Neither the count nor what is free changes a shape, or is read on the host."""
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    taking = torch.compile(take_slots, backend=backend, fullgraph=True, dynamic=False)
    state = new_state(16, CPU)
    for count in (3, 5, 0, 4):
        expected = take_slots(state, torch.tensor(count), 8)
        found, after = taking(state, torch.tensor(count), 8)
        assert torch.equal(found, expected[0])
        assert torch.equal(after, expected[1])
        state = after
    assert len(graphs) == 1
    torch.compiler.reset()


def test_what_does_not_fit_is_named() -> None:
    state = new_state(8, CPU)
    with pytest.raises(ValueError, match=r"take_slots: state is torch\.int64 \(8,\) on cpu, expected torch\.bool"):
        take_slots(state.long(), torch.tensor(1), 2)
    with pytest.raises(
        ValueError, match=r"take_slots: count is torch\.int64 \(1,\) on cpu, expected torch\.int64 \(\)"
    ):
        take_slots(state, torch.tensor([1]), 2)
    with pytest.raises(ValueError, match=r"most is 9, expected 1 to the number of slots, 8"):
        take_slots(state, torch.tensor(1), 9)
    with pytest.raises(ValueError, match=r"give_slots: slots are torch\.int32"):
        give_slots(state, torch.tensor([1], dtype=torch.int32))
