"""Speculative decoding under a lock."""

from typing import Any

import pytest

from tests.sparse.steps import BLOCK_SIZE, Live, decode
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStar, KVStarSpeculative

SELECT, REUSE, CHECK = SelectionMode


@pytest.mark.parametrize("role", list(UcmSparseRole))
def test_usage_example_of_the_kvstar_seed(role: UcmSparseRole) -> None:
    """Seed 002, 7.1, as written, import paths aside."""
    request_id = "cmpl-1"
    config = {
        "ucm_sparse_method": "KVStar",
        "ucm_sparse_config": {"KVStar": {"checkpoint_interval": 8, "base_method": "GSA"}},
    }
    kvstar: Any = UcmSparseFactory.create_sparse_method("KVStar", role, config)
    speculative = KVStarSpeculative(kvstar)
    speculative.begin_speculation(request_id, num_speculative=4)
    speculative.end_speculation(request_id, accepted_tokens=3)
    assert kvstar.metrics.get_stats()["lock_count"] == 1
    assert kvstar.metrics.get_stats()["unlock_count"] == 0


def method() -> KVStar:
    found = KVStar(UcmSparseRole.SCHEDULER, {"min_tokens": 20})
    found.register_block_size(BLOCK_SIZE)
    return found


@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_acceptance_keeps_the_lock(accepted: int) -> None:
    """covers: C20. Whether all, some or none of the drafts are accepted."""
    kvstar, request = method(), Live("a", 40, drafts=[1, 2, 3, 4])
    kvstar.request_begin("a", [])
    modes = []
    for _ in range(5):
        modes.append(decode(kvstar, request).requests["a"].mode)
        request.num_tokens += accepted
        kvstar.drafts_verified("a", 4, accepted)
    assert modes == [SELECT, REUSE, REUSE, REUSE, REUSE]
    stats = kvstar.metrics.get_stats()
    assert (stats["drafted_tokens"], stats["accepted_tokens"]) == (20, 5 * accepted)
    assert not kvstar.speculative._sessions


def test_drafts_see_one_selection_that_the_host_made() -> None:
    """No step is counted while drafts are open."""
    kvstar = KVStar(UcmSparseRole.WORKER, {"checkpoint_interval": 2, "update_threshold": 0})
    speculative = KVStarSpeculative(kvstar)
    assert kvstar.get_selection("a", 10, lambda: [1]) == [1]
    speculative.begin_speculation("a", 4)
    draft = [kvstar.get_selection("a", 10 + step, lambda: [2]) for step in range(1, 5)]
    assert draft == [[1]] * 4
    assert speculative.verify_consistency("a", draft[0], draft[-1])
    speculative.end_speculation("a", 2)
    assert kvstar.get_selection("a", 13, lambda: [2]) == [1]
    assert kvstar.get_selection("a", 14, lambda: [2]) == [2]


def test_selection_of_the_device_after_begin() -> None:
    """Drafts that begin before a selection exists lock what the next step selects."""
    kvstar, request = method(), Live("a", 40)
    kvstar.request_begin("a", [])
    KVStarSpeculative(kvstar).begin_speculation("a", num_speculative_tokens=2)
    assert [decode(kvstar, request).requests["a"].mode for _ in range(3)] == [SELECT, REUSE, REUSE]


def test_results_in_flight() -> None:
    """Under asynchronous scheduling a step's drafts begin before those of the last are verified."""
    kvstar, request = method(), Live("a", 40, drafts=[1, 2, 3])
    kvstar.request_begin("a", [])
    decode(kvstar, request)
    request.drafts = [1]
    decode(kvstar, request)
    kvstar.drafts_verified("a", 3, 3)
    kvstar.drafts_verified("a", 1, 0)
    assert (kvstar.metrics.drafted_tokens, kvstar.metrics.accepted_tokens) == (4, 3)


@pytest.mark.parametrize("event", ["request_preempted", "request_finished_in_scheduler"])
def test_speculation_ends_with_its_request(event: str) -> None:
    kvstar, request = method(), Live("a", 40, drafts=[1, 2, 3])
    kvstar.request_begin("a", [])
    own = KVStarSpeculative(kvstar)
    decode(kvstar, request)
    own.begin_speculation("a", 3)
    getattr(kvstar, event)("a")
    kvstar.drafts_verified("a", 3, 3)
    own.end_speculation("a", 3)
    assert kvstar.metrics.accepted_tokens == 0


def test_verify_consistency_compares_sets() -> None:
    speculative = KVStarSpeculative(method())
    assert speculative.verify_consistency("a", [1, 2, 3], [3, 2, 1])
    assert not speculative.verify_consistency("a", [1, 2], [1, 2, 3])


def test_wrong_calls() -> None:
    speculative = KVStarSpeculative(method())
    with pytest.raises(TypeError, match="expected exactly one of them"):
        speculative.begin_speculation("a")
    with pytest.raises(TypeError, match="expected exactly one of them"):
        speculative.begin_speculation("a", 3, num_speculative=3)
    with pytest.raises(ValueError, match="found -1 tokens"):
        speculative.begin_speculation("a", -1)
    speculative.begin_speculation("a", 3)
    with pytest.raises(ValueError, match="found 4 accepted tokens, expected 0 to 3"):
        speculative.end_speculation("a", 4)
    speculative.end_speculation("nobody", 9)
