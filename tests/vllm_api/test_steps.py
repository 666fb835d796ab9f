"""What of a step's message depends on vLLM's version."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_gaudi_ucm.vllm_api.steps import drafts_to_propose

SKIPPED = "skip_drafts" in {field.name for field in dataclasses.fields(SchedulerOutput)}


@pytest.mark.parametrize(("fields", "found"), [({}, 4), ({"skip_drafts": False}, 4), ({"skip_drafts": True}, 0)])
def test_no_draft_that_no_step_would_verify(fields: dict[str, bool], found: int) -> None:
    message: Any = SimpleNamespace(num_spec_tokens_to_schedule=4, **fields)
    assert drafts_to_propose(message) == found


@pytest.mark.skipif(not SKIPPED, reason="the schedulers of this vLLM do not say which steps need no drafts")
def test_the_field_is_vllms() -> None:
    message = SchedulerOutput.make_empty()
    message.num_spec_tokens_to_schedule = 4
    assert drafts_to_propose(message) == 4
    message.skip_drafts = True
    assert drafts_to_propose(message) == 0
