"""States of block selection that are given the same requests, with and without what recognises steady steps."""

from __future__ import annotations

import numpy as np

from vllm_gaudi_ucm.batch.batch_plan import BatchInput
from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionState, StepSelection
from vllm_gaudi_ucm.sparse.selection.sparse_worker import ServerSizes, selection_limits

BLOCK_SIZE, BLOCKS, WIDTH, MOST = 4, 60, 12, 4
OPTIONS = BlockOptions(sparse_ratio=0.3, min_blocks=1, min_tokens=8, init_window_sz=1, local_window_sz=1)


def state_of(*, bounded: bool = False, counts: list[int] | None = None, steady: bool = True) -> SelectionState:
    """counts: one more entry for each step whose blocks are followed."""
    sizes = ServerSizes(WIDTH * BLOCK_SIZE, MOST, 3, BLOCK_SIZE, BLOCKS, static=bounded)
    state = SelectionState(BLOCKS, selection_limits(OPTIONS, sizes), bounded)
    if counts is not None:
        written = state.summaries.written

        def counted(blocks: np.ndarray) -> None:
            counts.append(len(blocks))
            written(blocks)

        state.summaries.written = counted  # type: ignore[method-assign]
    if not steady:
        state._steady.go_on = lambda request_ids, batch: False  # type: ignore[method-assign]
        state._choices.go_on = lambda *step: None  # type: ignore[method-assign]
    return state


class Requests:
    """Some requests with blocks of their own, which all states follow."""

    def __init__(self) -> None:
        self.computed: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.free = list(range(1, BLOCKS))

    def begin(self, name: str, computed: int) -> None:
        self.computed[name], self.tables[name] = computed, []

    def batch(self, scheduled: dict[str, int]) -> BatchInput:
        for name, new in scheduled.items():
            while len(self.tables[name]) * BLOCK_SIZE < self.computed[name] + new:
                self.tables[name].append(self.free.pop())
        width = max(len(self.tables[name]) for name in scheduled)
        tables = np.zeros((len(scheduled), width), np.int32)
        for row, name in enumerate(scheduled):
            tables[row, : len(self.tables[name])] = self.tables[name]
        computed = np.array([self.computed[name] for name in scheduled], np.int32)
        new = np.array(list(scheduled.values()), np.int32)
        return BatchInput(computed, new, computed + new, (tables,))

    def end(self, name: str) -> None:
        self.free += self.tables.pop(name)
        del self.computed[name]


def decision(context: int) -> RequestSelection:
    return RequestSelection(SelectionMode.SELECT, 1, context // BLOCK_SIZE - 1, 1)


def both(fast: SelectionState, slow: SelectionState, name: str, argument: object, *, summaries: bool = False) -> None:
    for state in (fast, slow):
        getattr(state.summaries if summaries else state, name)(argument)


def assert_same(found: StepSelection, expected: StepSelection) -> None:
    assert found.summary_blocks.tolist() == expected.summary_blocks.tolist()
    assert (found.input is None) == (expected.input is None)
    if found.input is not None and expected.input is not None:
        for one, other in zip(found.input, expected.input, strict=True):
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
