"""Scores of all blocks of a request, wherever they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.selection import KINDS
from vllm_gaudi_ucm.ops.block_selection.api import block_scores, new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.sparse.selection.block_scorer import BlockScorer, ScoredLayer, keep_queries
from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors

BLOCKS, SIZE, HEADS, KV_HEADS, DIM, SLOTS, ROWS, WIDTH = 12, 8, 4, 2, 16, 3, 5, 10


class Scored:
    """A scorer over two layers, and the keys from which its summaries come."""

    def __init__(self, kind: SummaryKind, narrow: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kind = kind
        self.keys = [torch.randn(BLOCKS, SIZE, KV_HEADS, DIM, generator=generator) for _ in range(2)]
        self.summaries = [new_summaries(keys, kind, narrow=narrow) for keys in self.keys]
        for keys, summaries in zip(self.keys, self.summaries, strict=True):
            write_summaries(keys, torch.arange(BLOCKS), summaries, kind)
        layers = [ScoredLayer(index, summaries, 0.25) for index, summaries in zip((1, 4), self.summaries, strict=True)]
        self.scorer = BlockScorer(layers, kind, SLOTS, ROWS, WIDTH, (HEADS, DIM), torch.float32)
        self.queries = [2 * torch.randn(6, HEADS, DIM, generator=generator) for _ in range(2)]
        none = torch.zeros(0, dtype=torch.int64)
        rows, slots = torch.tensor([0, 3]), torch.tensor([2, 0])
        tensors = SelectionTensors(none, none, rows, *[none] * 4, slots, *[none] * 6, 1, WIDTH, 3)
        for layer_idx, query in zip((1, 4), self.queries, strict=True):
            keep_queries(self.scorer.queries_of(layer_idx), query, tensors)

    def expected(self, row: int, blocks: list[int]) -> np.ndarray:
        """Of these blocks for one row, averaged over the layers."""
        one = torch.tensor([0]), torch.tensor([1])
        found = [
            block_scores(
                query[row : row + 1],
                summaries,
                torch.tensor(blocks),
                torch.zeros(len(blocks), dtype=torch.int64),
                *one,
                1,
                0.25,
                self.kind,
            )
            for query, summaries in zip(self.queries, self.summaries, strict=True)
        ]
        return torch.stack(found).mean(0).numpy()


@pytest.mark.parametrize(("kind", "narrow"), [*((kind, False) for kind in KINDS), (SummaryKind.BOX_MEAN, True)])
def test_wherever_a_block_is_its_score_is_the_same(kind: SummaryKind, narrow: bool) -> None:
    """covers: C14. Physical blocks may be used by others meanwhile; those without a summary take no part."""
    case = Scored(kind, narrow)
    blocks = [7, 2, 9, 4, 11, 1]
    expected = case.expected(3, blocks)
    everywhere = case.scorer.scores(0, np.array(blocks), np.full(6, -1))
    np.testing.assert_allclose(everywhere, expected, rtol=1e-5)
    for block, row in ((2, 4), (4, 0)):
        case.scorer.keep_summary(block, row)
        for summaries in case.summaries:
            summaries[block] = 0
    partly = case.scorer.scores(0, np.array([7, -1, 9, -1, 11, 1]), np.array([-1, 4, -1, 0, -1, -1]))
    np.testing.assert_allclose(partly, expected, rtol=1e-5)
    assert partly.sum() == pytest.approx(1, abs=1e-5)
    for block, row in ((10, 4), (2, 0)):  # wherever they come back to
        case.scorer.restore_summary(row, block)
    back = case.scorer.scores(0, np.array([7, 10, 9, 2, 11, 1]), np.full(6, -1))
    np.testing.assert_allclose(back, expected, rtol=1e-5)


def test_a_block_without_a_summary_has_no_score() -> None:
    case = Scored(SummaryKind.MEAN)
    found = case.scorer.scores(2, np.array([7, -1, 9]), np.array([-1, -1, -1]))
    assert found[1] == -1
    np.testing.assert_allclose(found[[0, 2]], case.expected(0, [7, 9]), rtol=1e-5)
