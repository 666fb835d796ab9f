"""KVStar in the scheduler's role: modes and windows over steps, and that locks end with what they belong to."""

from typing import Any

import pytest

from tests.sparse.steps import BLOCK_SIZE, Live, decode, step_of
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.methods.gsa import ESA, GSA
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStar
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS

SELECT, REUSE, CHECK = SelectionMode


def kvstar(**options: Any) -> KVStar:
    method = KVStar(UcmSparseRole.SCHEDULER, {"min_tokens": 20, **options})
    method.register_block_size(BLOCK_SIZE)
    return method


def begun(method: KVStar, *requests: Live) -> None:
    for request in requests:
        method.request_begin(request.request_id, [0] * request.num_tokens)


@pytest.mark.parametrize(
    ("interval", "duration", "modes"),
    [
        (8, 16, [SELECT, *[REUSE] * 7, CHECK, *[REUSE] * 7] * 2),
        (2, 5, [SELECT, REUSE, CHECK, REUSE, CHECK] * 3),
        (1, 4, [SELECT, CHECK, CHECK, CHECK] * 3),
        (8, 3, [SELECT, REUSE, REUSE] * 3),
        (3, 1, [SELECT] * 6),
    ],
)
def test_modes_count_steps(interval: int, duration: int, modes: list[SelectionMode]) -> None:
    """covers: C4, C17. A checkpoint after so many steps, a new selection after so many, whatever the layers."""
    method, request = kvstar(checkpoint_interval=interval, lock_duration=duration), Live("a", 40)
    begun(method, request)
    assert [decode(method, request).requests["a"].mode for _ in modes] == modes


def test_tokens_newer_than_the_selection_are_live() -> None:
    """covers: C12. The window starts where it did at the lock or the last checkpoint, and the budget is theirs."""
    method, request, base = kvstar(checkpoint_interval=8, lock_duration=24), Live("a", 40), Live("b", 40)
    plain = GSA(UcmSparseRole.SCHEDULER, {"min_tokens": 20})
    plain.register_block_size(BLOCK_SIZE)
    begun(method, request)
    plain.request_begin("b", [])
    locked = None
    for _ in range(60):
        found = decode(method, request).requests["a"]
        fresh = decode(plain, base).requests["b"]
        if found.mode != REUSE:
            locked = fresh
        assert locked is not None
        assert (found.sink_blocks, found.window_start, found.num_selected) == (
            locked.sink_blocks,
            locked.window_start,
            locked.num_selected,
        )
        assert found.window_start <= fresh.window_start


def test_threshold_travels_with_checkpoints() -> None:
    """covers: C18. The device compares what was selected, with the configured threshold."""
    method, request = kvstar(checkpoint_interval=2, update_threshold=5), Live("a", 40)
    begun(method, request)
    found = [decode(method, request).requests["a"] for _ in range(4)]
    assert [(meta.mode, meta.update_threshold) for meta in found] == [(SELECT, 0), (REUSE, 0), (CHECK, 5), (REUSE, 0)]


def test_requests_are_locked_for_themselves() -> None:
    method, first, second = kvstar(checkpoint_interval=2, lock_duration=3), Live("a", 40), Live("b", 80)
    begun(method, first, second)
    assert decode(method, first).requests["a"].mode == SELECT
    both = [decode(method, first, second).requests for _ in range(3)]
    assert [meta["a"].mode for meta in both] == [REUSE, CHECK, SELECT]
    assert [meta["b"].mode for meta in both] == [SELECT, REUSE, CHECK]


@pytest.mark.parametrize("event", ["preempted", "finished and begun", "begun again", "dense step", "unlocked"])
def test_a_lock_ends_with_what_it_belongs_to(event: str) -> None:
    """covers: C5. Preemption, abort, reuse of the id."""
    method, request = kvstar(), Live("a", 40)
    begun(method, request)
    assert [decode(method, request).requests["a"].mode for _ in range(3)] == [SELECT, REUSE, REUSE]
    requests: Any = {"a": request}
    if event == "preempted":
        method.request_preempted("a")
    elif event == "begun again":
        begun(method, request)
    elif event == "unlocked":
        method.unlock_selection("a")
    elif event == "dense step":
        request.num_tokens += 10
        assert not method.build_sparse_meta(step_of({"a": 5}, requests), requests).requests
    else:
        method.request_finished_in_scheduler("a")
        assert not decode(method, request).requests
        begun(method, request)
    assert [decode(method, request).requests["a"].mode for _ in range(2)] == [SELECT, REUSE]
    assert (method.metrics.lock_count, method.metrics.unlock_count) == (2, 1)


def test_locks_travel_to_the_worker() -> None:
    """/metrics is written there; locks are counted here."""
    method, request = kvstar(lock_duration=3), Live("a", 40)
    begun(method, request)
    assert [decode(method, request).locks for _ in range(5)] == [(1, 0), (1, 0), (1, 0), (2, 1), (2, 1)]
    method.request_finished_in_scheduler("a")
    assert decode(method, request).locks == (2, 2)


def test_nothing_stays_of_finished_requests() -> None:
    """covers: C5"""
    method, requests = kvstar(), [Live(str(index), 40, drafts=[1, 2]) for index in range(4)]
    begun(method, *requests)
    decode(method, *requests)
    for request in requests:
        method.request_finished_in_scheduler(request.request_id)
        method.drafts_verified(request.request_id, 2, 1)
    method.request_preempted("0")
    assert not method._states
    assert not method.speculative._sessions
    assert method.metrics.lock_count == method.metrics.unlock_count == 4


def test_base_method() -> None:
    """covers: C4"""
    method = kvstar(base_method="ESA", min_blocks=9)
    assert isinstance(method.base_sparse, ESA)
    assert method.selecting_method is method.base_sparse
    assert method.base_sparse.options.model_dump()["min_blocks"] == 9


def test_the_worker_is_the_base_methods() -> None:
    with SPARSE_METHODS.scope():
        UcmSparseFactory.register_sparse_method("HookLog", "tests.sparse.hook_log", "HookLog")
        method: Any = KVStar(UcmSparseRole.WORKER, {"base_method": "HookLog"})
    method.register_kv_caches({})
    method.update_states(None)
    method.execute_begin(None)
    assert method.attention_begin(0, "q", "k", "v", None, "o") == ("q", "k", "v", "o")
    assert method.attention_finished(0, "o") == "o"
    method.execute_finished()
    method.request_finished_in_worker("a")
    assert method.base_sparse.calls == [
        ("register_kv_caches",),
        ("update_states",),
        ("execute_begin",),
        ("attention_begin", 0),
        ("attention_finished", 0),
        ("execute_finished",),
        ("request_finished_in_worker", "a"),
    ]
