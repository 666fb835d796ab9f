"""The check reports everything that an idle engine still holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.fuzz.leaks import held_blocks, waiting_requests


def pool(free: int, queue: object = None) -> Any:
    return SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: free, free_block_queue=queue)


def test_a_leaked_block_is_reported() -> None:
    assert list(held_blocks(pool(10))) == []
    assert list(held_blocks(pool(9))) == ["1 of 11 blocks are not free"]


def test_a_free_list_that_is_not_in_order_is_reported() -> None:
    class Broken:
        def check_integrity(self) -> None:
            raise AssertionError("listed 9, known 10")

    assert list(held_blocks(pool(10, Broken()))) == ["free blocks: listed 9, known 10"]


def test_a_request_that_stays_is_reported() -> None:
    idle = SimpleNamespace(requests={}, running=[], waiting=[])
    busy = SimpleNamespace(requests={"r1": None}, running=["r1"], waiting=[])
    assert list(waiting_requests(idle)) == []
    assert list(waiting_requests(busy)) == [
        "the scheduler has requests r1",
        "the scheduler has 1 running and 0 waiting",
    ]
