"""What an answer will need of the KV cache, while a step runs whose tokens are not known yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_gaudi_ucm.block_policies.admission.admission import Admission
from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
from vllm_gaudi_ucm.vllm_api.steps import RequestStatus


def admission(num_drafts: int = 0) -> Admission:
    scheduler = SimpleNamespace(
        max_model_len=100,
        num_lookahead_tokens=num_drafts,
        num_spec_tokens=num_drafts,
        max_num_scheduled_tokens=12,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    groups = SimpleNamespace(whole=1, most=lambda *of_request: ())
    in_step = not num_drafts
    return Admission(cast(Any, scheduler), MemoryTotals(), cast(Any, groups), in_step=in_step, steps_ahead=1)


def request(tokens: int, outputs: int, computed: int, in_flight: int = 0, max_tokens: int = 20) -> Any:
    """tokens: those that are known, `outputs` of them of the answer."""
    return SimpleNamespace(
        num_tokens=tokens,
        num_output_tokens=outputs,
        num_computed_tokens=computed,
        num_output_placeholders=in_flight,
        max_tokens=max_tokens,
        status=RequestStatus.RUNNING,
    )


def test_a_token_in_flight_counts_as_given() -> None:
    """As in the step after, when it is known."""
    running, known = request(10, 3, computed=10, in_flight=1), request(11, 4, computed=10)
    assert admission()._footprint(running, [1], [[]], 0) == admission()._footprint(known, [1], [[]], 0)
    # a prompt has nine rows of a step beside them
    assert admission()._delays([running, running, request(11, 0, computed=0)]) == [1, 1, 3]


@pytest.mark.parametrize("in_flight", [0, 1, 4])
def test_drafts_have_room_whatever_was_right(in_flight: int) -> None:
    """A step that is scheduled ahead reaches as far as if all drafts before it were right: beyond the last token of the
    answer by those of three steps, but for the tokens that such a step needs."""
    found = admission(3)._footprint(request(10, 3, 9 + in_flight, in_flight), [1], [[]], 0)
    assert found.tokens + found.left == 10 + (20 - 3) + 3 * 3


def test_more_drafts_in_flight_than_an_answer_takes() -> None:
    found = admission(3)._footprint(request(10, 19, 14, in_flight=4), [1], [[]], 0)
    assert (found.tokens, found.left) == (11 + 9, 0)
