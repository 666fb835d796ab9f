"""How many threads a worker computes with, and what its log says about them."""

from __future__ import annotations

import pytest

from vllm_gaudi_ucm.device.cpu_threads import choose_threads, waiting_in_words
from vllm_gaudi_ucm.device.host_limits import Cores


@pytest.mark.parametrize(
    ("found", "cores", "workers", "expected", "words"),
    [
        (8, Cores(8, 8, None), 1, 8, "8 usable cores"),
        # physical cores alone
        (8, Cores(16, 16, None), 1, 8, "16 usable cores"),
        (32, Cores(32, 32, 1.5), 1, 2, "2 usable cores, a quota of 1.5"),
        (4, Cores(32, 4, 8.0), 1, 4, "4 usable cores, an affinity to 4 of 32"),
        (16, Cores(16, 16, None), 4, 4, "16 usable cores, 4 workers that share them"),
        (2, Cores(2, 2, None), 8, 1, "2 usable cores, 8 workers that share them"),
        (1, Cores(64, 64, None), 1, 1, "64 usable cores"),
        (2, Cores(1, 1, None), 1, 1, "1 usable core"),
    ],
)
def test_a_thread_for_each_core_of_a_worker(found: int, cores: Cores, workers: int, expected: int, words: str) -> None:
    assert choose_threads(found, cores, workers, None, None) == (expected, words)


def test_what_the_user_says_counts() -> None:
    cores = Cores(4, 4, None)
    assert choose_threads(4, cores, 2, 7, "3") == (7, "ucm.cpu.threads")
    assert choose_threads(3, cores, 2, None, "3") == (3, "OMP_NUM_THREADS=3")


def test_how_they_wait() -> None:
    assert waiting_in_words({"GOMP_SPINCOUNT": "1000"}) == "idle ones wait by GOMP_SPINCOUNT=1000"
    assert "set GOMP_SPINCOUNT=1000 before this program starts" in waiting_in_words({})
