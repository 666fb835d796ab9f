"""An error in one of several workers: told by the rank that answers, the end of any other."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from vllm_gaudi_ucm.distributed.rank_failure import Peers, RankFailedError, ends_engine
from vllm_gaudi_ucm.distributed.ranks import ALONE


def execute_model(tokens: int) -> int:
    if tokens < 0:
        raise MemoryError("no room for the step")
    return tokens


def test_the_rank_that_answers_names_itself() -> None:
    call = ends_engine(execute_model, Peers(2, 4, {1: os.getpid()}), answering_rank=2)
    assert call(7) == 7
    with pytest.raises(RankFailedError, match=r"^rank 2 of 4 \(process \d+\) failed in execute_model: MemoryError: no"):
        call(-1)


def test_another_rank_ends() -> None:
    """Its error would be logged, and the rank that answers would wait for it."""
    with pytest.raises(SystemExit, match="1"):
        ends_engine(execute_model, Peers(1, 4, {}), answering_rank=0)(tokens=-1)


def test_the_error_names_a_rank_that_was_killed_before() -> None:
    """Its own is that of a collective. A process that its parent has not asked for yet counts, too."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = Peers(0, 2, {1: other.pid})
    try:
        begin = time.monotonic()
        while peers.gone() and time.monotonic() - begin < 60:
            time.sleep(0.01)
        assert peers.gone() == []
        other.kill()
        wanted = rf"^rank 1 of 2 \(process {other.pid}\) ended: .* Then rank 0 of 2 .* MemoryError"
        with pytest.raises(RankFailedError, match=wanted):
            ends_engine(execute_model, peers, answering_rank=0)(-1)
    finally:
        other.kill()
        other.communicate()
    assert peers.gone() == [1]


def test_one_worker_has_no_peers() -> None:
    assert Peers.of(ALONE) == Peers(0, 1, {})
