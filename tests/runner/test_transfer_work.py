"""What a connector moved is noted once, in the step after it."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.observability.records import step
from vllm_gaudi_ucm.observability.room_metrics import TransferTotals
from vllm_gaudi_ucm.runner.kv_transfer import TransferWork


def test_totals_become_the_work_of_a_step() -> None:
    work = TransferWork()
    with work.clock():
        time.sleep(0.002)
    assert work.last_seconds >= 0.002
    with work.clock():
        time.sleep(0.001)
    first = replace(step(0), **work.take(TransferTotals(5, 1, 3, 0)).figures())
    assert (first.loaded_blocks, first.saved_blocks) == (5, 3)
    assert first.transfer_ms >= 3.0
    second = replace(step(0), **work.take(TransferTotals(7, 1, 3, 0)).figures())
    assert (second.loaded_blocks, second.saved_blocks, second.transfer_ms) == (2, 0, 0.0)
