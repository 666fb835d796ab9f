"""Agreements between the workers of an engine, in real processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.processes import on_ranks
from vllm_gaudi_ucm.distributed.rank_failure import Peers
from vllm_gaudi_ucm.distributed.ranks import ALONE, Ranks, RanksDisagreeError


def _agree(rank: int, size: int, group: dist.ProcessGroup) -> tuple[int, bool, bool, str]:
    ranks = Ranks(rank, size, 0, group)
    assert ranks.texts("x" * ranks.rank) == ["", "x", "xx"]
    assert Peers.from_ranks(ranks).processes.keys() == {0, 1, 2} - {ranks.rank}
    least = ranks.least(7 - ranks.rank)
    assert ranks.least_of([ranks.rank, -ranks.rank, 4]) == [0, -2, 4]
    none, one = ranks.all_of(True), ranks.all_of(ranks.rank != 1)
    ranks.check_same("bucket", "c-u 128")
    try:
        ranks.check_same("bucket of step 3", "c-u 128" if ranks.rank < 2 else "--u 1 of rank 2")
    except RanksDisagreeError as error:
        return least, none, one, str(error)
    return least, none, one, "no error"


@pytest.mark.slow  # starts processes
def test_agreements(tmp_path: Path) -> None:
    difference = "bucket of step 3: rank 0 has c-u 128, rank 2 has --u 1 of rank 2"
    assert on_ranks(_agree, 3, tmp_path) == [(5, True, False, difference)] * 3


def test_one_rank_agrees_with_itself() -> None:
    ranks = ALONE
    assert ranks.least(3) == 3
    assert ranks.least_of([2, 1]) == [2, 1]
    assert ranks.all_of(True)
    assert not ranks.all_of(False)
    assert ranks.reports
    ranks.check_same("bucket", "any")


def test_one_rank_reports() -> None:
    """The first of the last pipeline stage, whose output vLLM's executor reads."""
    assert [Ranks(rank, 4, output_rank=2).reports for rank in range(4)] == [False, False, True, False]
