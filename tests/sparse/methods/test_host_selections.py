"""Selections that the host makes: lock, checkpoint and unlock, as the seed's API describes them."""

from collections.abc import Callable
from typing import Any

import pytest

from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStar


def kvstar(**options: Any) -> KVStar:
    return KVStar(UcmSparseRole.WORKER, options)


def chooses(*blocks: int) -> Callable[[], list[int]]:
    return lambda: list(blocks)


def never() -> list[int]:
    raise AssertionError("selected anew under a lock")


def test_first_selection_is_locked() -> None:
    method = kvstar()
    assert method.get_selection("a", 100, chooses(1, 3, 5)) == [1, 3, 5]
    assert [method.get_selection("a", 100 + step, never) for step in range(1, 8)] == [[1, 3, 5]] * 7
    assert method.metrics.get_stats()["lock_count"] == 1


def test_layers_of_a_step_are_one_step() -> None:
    """covers: C17. 32 layers ask in every step; the checkpoint comes in the eighth step all the same."""
    method = kvstar(update_threshold=0)
    found = []
    for position in range(100, 109):
        selections = [method.get_selection("a", position, chooses(position)) for _ in range(32)]
        assert all(selection == selections[0] for selection in selections)
        found.append(selections[0])
    assert found == [[100]] * 8 + [[108]]


@pytest.mark.parametrize(
    ("threshold", "new", "kept"),
    [(0, [1, 3, 5], True), (1, [1, 3], True), (1, [1, 3, 7], False), (2, [1, 3, 7], True), (2, [1, 7, 9], False)],
)
def test_update_threshold(threshold: int, new: list[int], kept: bool) -> None:
    """covers: C4, C18"""
    method = kvstar(update_threshold=threshold, checkpoint_interval=1)
    method.get_selection("a", 10, chooses(1, 3, 5))
    assert method.get_selection("a", 11, chooses(*new)) == ([1, 3, 5] if kept else new)
    stats = method.metrics.get_stats()
    assert (stats["checkpoint_maintains"], stats["checkpoint_updates"]) == (int(kept), int(not kept))
    assert stats["checkpoint_update_rate"] == (0 if kept else 1)


def test_lock_duration() -> None:
    """covers: C4. A lock that checkpoints keep for ever ends all the same."""
    method = kvstar(lock_duration=3, checkpoint_interval=1, update_threshold=100)
    found = [method.get_selection("a", position, chooses(position)) for position in range(7)]
    assert found == [[0], [0], [0], [3], [3], [3], [6]]
    assert (method.metrics.lock_count, method.metrics.unlock_count) == (3, 2)


def test_lock_and_unlock() -> None:
    method = kvstar()
    mine = [4, 2]
    method.lock_selection("a", mine, 7)
    mine.append(9)
    assert method.get_selection("a", 8, never) == [4, 2]
    method.get_selection("a", 8, never).append(9)
    assert method.get_selection("a", 9, never) == [4, 2]
    method.unlock_selection("a")
    method.unlock_selection("a")
    method.unlock_selection("nobody")
    assert method.get_selection("a", 10, chooses(8)) == [8]
    assert (method.metrics.lock_count, method.metrics.unlock_count) == (2, 1)


def test_stats_of_nothing() -> None:
    assert set(kvstar().metrics.get_stats().values()) == {0}
