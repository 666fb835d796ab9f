"""The doctor's rows on several devices: real processes, which add up or say why not."""

from __future__ import annotations

import pytest

from vllm_gaudi_ucm.cli.doctor import collectives
from vllm_gaudi_ucm.cli.doctor.collectives import collective_checks, shared_memory

pytestmark = pytest.mark.slow  # starts processes


def test_workers_add_up() -> None:
    shared, workers, small, large = collective_checks("cpu", 2)
    assert shared.name == "/dev/shm"
    assert (workers.status, workers.found) == ("ok", "2 on cpu add up tensors")
    assert small.name == "sum of 64 KiB"
    assert large.name == "sum of 8192 KiB"
    assert float(large.found.split()[0].replace(",", "")) > 0


def test_what_keeps_them_from_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here, or not as many."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, row = collective_checks("cuda", 2)
    assert row.status == "fail"
    assert "worker 0: it ended with code 1: ValueError: worker 1 of this machine needs a GPU" in row.found
    assert row.advice


def test_a_worker_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers one is started alone: it waits for the other."""
    monkeypatch.setattr(collectives, "LIMIT_SECONDS", 6)
    real = collectives._start
    monkeypatch.setattr(collectives, "_start", lambda device, rank, workers, store: real(device, 0, 3, store))
    _, row = collective_checks("cpu", 1 + 1)
    assert row.status == "fail"
    assert "within 6 s" in row.found


def test_nothing_to_check_with_one_worker() -> None:
    assert list(collective_checks("cpu", 1)) == []
    assert list(collective_checks(None, 4)) == []
    (row,) = collective_checks("cpu", 0)
    assert row.status == "fail"


def test_too_little_shared_memory_is_found_before_an_engine_finds_it() -> None:
    """A container has 64 MiB unless it is given more."""
    row = shared_memory(64 << 20)
    assert (row.status, row.found) == ("fail", "64 MiB free")
    assert "--shm-size" in row.advice
    assert shared_memory(1 << 30).status == "ok"
