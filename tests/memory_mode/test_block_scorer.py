"""Scores of all blocks of a request, wherever they are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.memory_mode.block_scorer import Scored
from tests.ops.selection import KINDS
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind


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
