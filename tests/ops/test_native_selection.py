"""A layer's choice in one call is what the operations of block selection make of it, one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl import reference
from vllm_gaudi_ucm.ops.block_selection.impl.cpu import native as operations
from vllm_gaudi_ucm.ops.block_selection.impl.cpu.native import NativeSelection, StepCandidates
from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native

pytestmark = pytest.mark.skipif(native() is None, reason=why_not_native())

SELECT, REUSE, CHECK = range(3)
KIND = SummaryKind.MEAN
NUM_BLOCKS, WIDTH, MOST, SLOTS = 60, 12, 7, 6


class Step:
    """Spans with candidates, and a pad of each kind: a span without rows, a candidate and a chosen entry of hi 0."""

    def __init__(self, rows: list[int], modes: list[int], seed: int, threshold: int = 3) -> None:
        random = np.random.default_rng(seed)
        spans = len(rows)
        numbers = [np.sort(random.permutation(WIDTH)[: random.integers(1, WIDTH + 1)]) for _ in rows]
        self.counts = [int(random.integers(1, min(len(mine), MOST) + 1)) for mine in numbers]
        owners = np.repeat(np.arange(spans), [len(mine) for mine in numbers])
        places = np.concatenate([span * WIDTH + mine for span, mine in enumerate(numbers)])
        blocks = 1 + random.permutation(NUM_BLOCKS - 1)[: len(owners)]
        table = np.zeros((spans + 1) * WIDTH + 1, np.int64)
        table[places] = blocks
        choice_spans = np.repeat(np.arange(spans), self.counts)
        ranks = np.concatenate([np.arange(count) for count in self.counts])
        num_rows = np.array([*rows, 0])
        self.candidates = StepCandidates(
            *(torch.from_numpy(array) for array in (np.append(blocks, 0), np.append(owners, spans))),
            torch.from_numpy(np.append(places, (spans + 1) * WIDTH)),
            torch.from_numpy(num_rows.cumsum() - num_rows),
            torch.from_numpy(num_rows),
            torch.tensor([*modes, SELECT]),
            torch.tensor([*self.counts, 0]),
            torch.full((spans + 1,), threshold),
            torch.tensor([*random.permutation(SLOTS - 1)[:spans].tolist(), SLOTS - 1]),
            torch.from_numpy(np.append(choice_spans * MOST + ranks, 0)),
            torch.from_numpy(np.append(choice_spans, 0)),
            torch.tensor([4] * len(choice_spans) + [0]),
            torch.from_numpy(table),
            WIDTH,
            MOST,
        )
        generator = torch.Generator().manual_seed(seed)
        self.query = torch.randn(sum(rows) + 1, 6, 16, generator=generator)
        self.summaries = torch.randn(KIND.shape(NUM_BLOCKS, 4, 2, 16), generator=generator)
        # rankings of an earlier step: of the same candidates, but of fewer than the ones asked for in some slots
        self.stored = torch.full((SLOTS, MOST), -1)
        for span, mine in enumerate(numbers):
            ranking = torch.from_numpy(random.permutation(mine)[:MOST])
            short = modes[span] == CHECK and seed % 3 == 0
            self.stored[self.candidates.slots[span], : len(ranking) - short] = ranking[: len(ranking) - short]

    def by_operations(self, stored: Tensor, checks: Tensor, recall: Tensor) -> Tensor:
        """What sparse/selection/block_selector.py does with the operations."""
        c, spans = self.candidates, len(self.candidates.num_rows)
        old = stored[c.slots]
        if bool((c.modes[c.num_rows > 0] == REUSE).all()):
            ranking = old
        else:
            scores = operations.scores(
                self.query, self.summaries, c.blocks, c.spans, c.first_rows, c.num_rows, 0.5, KIND
            )
            assert scores is not None
            fresh = reference.choose(scores, c.places, spans, WIDTH, MOST)
            ranking, kept, replaced = reference.keep_or_replace(old, fresh, c.counts, c.modes, c.thresholds, WIDTH)
            stored[c.slots] = ranking
            checks += torch.stack((kept.sum(), replaced.sum()))
            mass = torch.zeros(spans * WIDTH + 1).index_copy_(0, c.places, scores)
            numbers = ranking.view(-1)[c.choice_places].clamp_min(0)
            recall[0] += (mass[c.choice_spans * WIDTH + numbers] * (c.choice_hi > 0)).sum()
            recall[1] += mass[:-1].sum()
        return c.table[c.choice_spans * WIDTH + ranking.view(-1)[c.choice_places].clamp_min(0)]


@settings(max_examples=80, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([SELECT, REUSE, CHECK])), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    threshold=st.integers(0, 8),
)
def test_it_is_what_the_operations_make(spans: list[tuple[int, int]], seed: int, threshold: int) -> None:
    """covers: C13, C16, C18. All modes, layer after layer; pads choose nothing and store where nobody reads."""
    step = Step([rows for rows, _ in spans], [mode for _, mode in spans], seed, threshold)
    selection = NativeSelection(step.candidates)
    for layer in range(2):
        found_stored, stored = step.stored.clone(), step.stored.clone()
        found_checks, checks = torch.zeros(2, 2, dtype=torch.int64)
        found_recall, recall = torch.zeros(2, 2, dtype=torch.float64)
        step.summaries = step.summaries.roll(layer, 0)
        common = step.query, step.summaries, found_stored, 0.5, KIND, found_checks
        found = selection.choose(*common, found_recall)
        expected = step.by_operations(stored, checks, recall)
        assert found is not None
        assert torch.equal(found[:-1], expected[:-1]), "the last entry is a pad"
        assert torch.equal(found_stored[:-1], stored[:-1]), "the last slot is nobody's"
        assert torch.equal(found_checks, checks)
        torch.testing.assert_close(found_recall, recall, rtol=1e-5, atol=1e-6)


def test_without_recall_the_choice_is_the_same() -> None:
    """What is used again is then not scored."""
    step = Step([1, 3, 1], [REUSE, CHECK, SELECT], 4)
    selection, checks = NativeSelection(step.candidates), torch.zeros(2, dtype=torch.int64)
    chosen = []
    for recall in (None, torch.zeros(2, dtype=torch.float64)):
        found = selection.choose(step.query, step.summaries, step.stored.clone(), 0.5, KIND, checks, recall)
        assert found is not None
        chosen.append(found.clone())
    assert torch.equal(*chosen)


@pytest.mark.parametrize(
    ("name", "value"), [("blocks", NUM_BLOCKS), ("spans", 9), ("slots", SLOTS), ("choice_places", -1), ("places", 999)]
)
def test_ids_outside_of_their_tensors_are_refused(name: str, value: int) -> None:
    """covers: C13."""
    step = Step([1, 2], [SELECT, CHECK], 1)
    getattr(step.candidates, name)[0] = value
    checks = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(IndexError, match="is outside of 60 blocks, 3 spans, 4 rows, 12 places per span or 6 slots"):
        NativeSelection(step.candidates).choose(step.query, step.summaries, step.stored, 0.5, KIND, checks)


def test_what_does_not_fit_is_named() -> None:
    """covers: C15."""
    step = Step([1], [SELECT], 0)
    selection, checks = NativeSelection(step.candidates), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"stored rankings are \(6, 3\), expected dense \[slots, 7\]"):
        selection.choose(step.query, step.summaries, step.stored[:, :3].contiguous(), 0.5, KIND, checks)
    with pytest.raises(ValueError, match="block table has 5 places, expected 2 x 12 and a pad"):
        NativeSelection(step.candidates._replace(table=step.candidates.table[:5]))
    strided = step.summaries.transpose(1, 3).contiguous().transpose(1, 3)
    assert selection.choose(step.query, strided, step.stored, 0.5, KIND, checks) is None
