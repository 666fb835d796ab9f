"""Summaries of blocks on their way to a store and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.memory_mode.block_scorer import DIM, KV_HEADS, ROWS, SIZE, Scored
from tests.ops.selection import KINDS
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.memory_mode.summary_records import SummaryRecords, summary_bytes
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.sparse.methods.gsa import GsaOptions
from vllm_gaudi_ucm.sparse.selection.block_scorer import SummaryQueue
from vllm_gaudi_ucm.sparse.selection.sparse_worker import summary_share

SPAN = 4


def records_of(case: Scored, queue: SummaryQueue) -> SummaryRecords:
    return SummaryRecords(case.scorer, queue, SPAN, get_device("cpu"))


@pytest.mark.parametrize(("kind", "narrow"), [*((kind, False) for kind in KINDS), (SummaryKind.BOX_MEAN, True)])
def test_blocks_score_as_before(kind: SummaryKind, narrow: bool) -> None:
    """covers: C14. Of three blocks one comes back as a block, one as a row, and nothing of the third is kept."""
    case = Scored(kind, narrow)
    records = records_of(case, SummaryQueue(12))
    options = GsaOptions(summary=kind.value, summary_dtype="fp8" if narrow else "auto")
    size = 2 * SPAN * summary_bytes(options, SIZE, KV_HEADS, DIM, 4)
    record = bytearray(size)
    expected = case.scorer.scores(2, np.array([7, 9]), np.array([-1, -1]))
    records.read([7, 2, 9], memoryview(record))
    kept = [summaries.clone() for summaries in case.summaries]
    for summaries in case.summaries:
        summaries[7] = summaries[9] = 0
    records.write(record, [-1, -1, 3], [5, 0, 0])
    assert case.scorer.scores(2, np.array([5, -1]), np.array([-1, 3])) == pytest.approx(expected)
    for summaries, before in zip(case.summaries, kept, strict=True):
        others = [block for block in range(1, 12) if block not in (5, 7, 9)]
        assert torch.equal(summaries.float()[others], before.float()[others])
    for offloaded in case.scorer.offloaded:
        assert not offloaded.float()[[row for row in range(ROWS) if row != 3]].any()


@pytest.mark.parametrize("key_bytes", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_summaries_take_a_byte_for_each_element(kind: SummaryKind, key_bytes: int) -> None:
    wide, narrow = (GsaOptions(summary=kind.value, summary_dtype=dtype) for dtype in ("auto", "fp8"))
    for options, itemsize in ((wide, 1 if kind.is_coded else key_bytes), (narrow, 1)):
        shape = kind.shape(1, 128, 8, 64)
        assert summary_bytes(options, 128, 8, 64, key_bytes) == np.prod(shape) * itemsize
        share = summary_share(options, 128, 64, 64, key_bytes)
        assert share == pytest.approx(np.prod(shape) * itemsize / (128 * 8 * 128 * key_bytes))


def test_ready() -> None:
    queue = SummaryQueue(12)
    records = records_of(Scored(SummaryKind.MEAN), queue)
    queue.brought(np.array([3, 4]))
    assert records.are_ready([3, 4])
    assert not records.are_ready([3, 5])
    queue.written(np.array([4]))
    assert not records.are_ready([3, 4])
    queue.full(np.array([4]))
    queue.brought(np.array([4]))
    assert not len(queue)
    queue.check_integrity()
