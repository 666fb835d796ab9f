"""Recorded choices of blocks, replayed with the candidates of other steps: same blocks, stored choices and counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl.cpu.native import NativeSelection, RecordedSelection, StepCandidates
from vllm_gaudi_ucm.ops.cpu.native.call_graph.call_graph import capture
from vllm_gaudi_ucm.ops.cpu.native.call_graph.memory import MemoryPool
from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native

pytestmark = pytest.mark.skipif(native() is None, reason=why_not_native())
SPANS, WIDTH, MOST, BLOCKS, LAYERS = 3, 20, 6, 100, 2
SELECT, REUSE, CHECK = 0, 1, 2


def candidates(seed: int, counts: list[int], modes: list[int], competing: int) -> StepCandidates:
    """A step of requests with two rows each."""
    numbers = torch.Generator().manual_seed(seed)
    spans = torch.arange(SPANS).repeat_interleave(competing)
    logical = [torch.randperm(WIDTH, generator=numbers)[:competing].sort()[0] for _ in range(SPANS)]
    places, blocks = spans * WIDTH + torch.cat(logical), torch.randint(0, BLOCKS, spans.shape, generator=numbers)
    table = torch.zeros(SPANS * WIDTH + 1, dtype=torch.int64).index_copy_(0, places, blocks)
    chosen = torch.arange(SPANS).repeat_interleave(torch.tensor(counts))
    ranks = torch.cat([torch.arange(count) for count in counts])
    of_spans = (torch.tensor(modes), torch.tensor(counts), torch.zeros(SPANS, dtype=torch.int64), torch.arange(SPANS))
    rows = torch.arange(SPANS) * 2, torch.full((SPANS,), 2)
    choices = chosen * MOST + ranks, chosen, torch.full_like(chosen, 16)
    return StepCandidates(blocks, spans, places, *rows, *of_spans, *choices, table, WIDTH, MOST)


class Layers:
    """What outlives a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.query = torch.randn(2 * SPANS, 4, 16)
        self.summaries = [torch.randn(BLOCKS, 1, 2, 16) for _ in range(LAYERS)]
        self.stored = [torch.full((SPANS + 1, MOST), -1, dtype=torch.int64) for _ in range(LAYERS)]
        self.checks, self.recall = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
        self.room = torch.zeros(SPANS * MOST, dtype=torch.int64)

    def choose(self, step: StepCandidates) -> Tensor:
        """The blocks of the last layer, the one whose recall is measured."""
        selection, found = NativeSelection(step, self.room), None
        for layer, (summaries, stored) in enumerate(zip(self.summaries, self.stored, strict=True)):
            recall = self.recall if layer == LAYERS - 1 else None
            found = selection.choose(self.query, summaries, stored, 0.25, SummaryKind.MEAN, self.checks, recall)
        assert found is not None
        return found


def test_replays_choose_as_calls_do() -> None:
    """More and fewer candidates and chosen blocks than recorded; all modes."""
    steps = [
        candidates(1, [4, 2, 6], [SELECT] * 3, 12),
        candidates(2, [3, 3, 5], [CHECK, REUSE, SELECT], 9),
        candidates(3, [3, 2, 5], [REUSE] * 3, 9),
        candidates(4, [6, 6, 6], [SELECT] * 3, 20),
    ]
    called, replayed = Layers(), Layers()
    called.choose(steps[0])
    captured = capture(lambda: replayed.choose(steps[0]), MemoryPool(), {})
    assert captured.graph is not None, captured.refused
    recorded = RecordedSelection(captured.graph.kept)
    for step in steps[1:]:
        expected, selection = called.choose(step).clone(), NativeSelection(step, replayed.room)
        replayed.room.fill_(-7)
        recorded.bind(selection)
        assert captured.graph.replay()
        assert torch.equal(replayed.room[: len(expected)], expected)
        for one, other in zip(called.stored, replayed.stored, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(called.checks, replayed.checks)
        assert torch.equal(called.recall, replayed.recall)


def test_a_bad_index_stops_a_replay() -> None:
    """covers: A10. The ordinary way then says which."""
    layers, step = Layers(), candidates(1, [4, 2, 6], [SELECT] * 3, 12)
    captured = capture(lambda: layers.choose(step), MemoryPool(), {})
    assert captured.graph is not None
    wrong = step._replace(slots=torch.tensor([0, 1, SPANS + 5]))
    bad = NativeSelection(wrong, layers.room)
    RecordedSelection(captured.graph.kept).bind(bad)
    assert not captured.graph.replay()
    with pytest.raises(IndexError, match="slot"):
        layers.choose(wrong)
