"""Requests whose blocks did not come from a store, in our scheduler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.request import RequestStatus

from tests.scheduler.schedulers import make_scheduler, request, run_step, vllm_config
from vllm_gaudi_ucm.scheduler.parts import WaitingRequests
from vllm_gaudi_ucm.scheduler.scheduler import UcmScheduler


def test_a_request_that_begins_anew_keeps_no_room_from_others(tmp_path: Path) -> None:
    """One whose load has brought a part goes on with it, and its room stays reserved."""
    scheduler = make_scheduler(vllm_config(tmp_path, {}), UcmScheduler)
    connector: Any = SimpleNamespace(scheduler=SimpleNamespace(plan_prefetch=lambda waiting: None))
    scheduler.parts = (WaitingRequests(scheduler, connector),)
    requests = {name: request(name, 90, start=at) for at, name in enumerate(("lost", "shorter", "loading"))}
    for one in requests.values():
        scheduler.requests[one.request_id] = one
        one.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        scheduler._inflight_prefills.add(one)
    requests["shorter"].num_computed_tokens = 4
    scheduler.failed_recving_kv_req_ids |= {"lost", "shorter", "aborted meanwhile"}
    reserved = scheduler._inflight_prefill_reserved_blocks()
    run_step(scheduler)
    assert scheduler._inflight_prefills == {requests["shorter"], requests["loading"]}
    assert scheduler._inflight_prefill_reserved_blocks() < reserved
