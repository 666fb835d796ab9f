"""The request table follows the scheduler through any sequence of steps, and keeps nothing of requests that ended."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData

from tests.batch.scheduling import Known, RandomScheduler, new_request, step_output
from tests.batch.token_steps import slots_of
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.batch.request_table import RequestTable

BLOCK_SIZE = 4


def check_step(table: RequestTable, scheduler: RandomScheduler, num_scheduled: dict[str, int]) -> None:
    """What the planner and the model are given equals what the scheduler knows."""
    requests, batch = table.scheduled(num_scheduled)
    assert [request.request_id for request in requests] == list(num_scheduled)
    for index, request_id in enumerate(num_scheduled):
        known = scheduler.running[request_id]
        assert batch.num_computed[index] == known.computed
        assert batch.num_scheduled[index] == num_scheduled[request_id]
        assert batch.num_tokens[index] == len(known.tokens)
        reach = -(-(known.computed + num_scheduled[request_id]) // BLOCK_SIZE)
        assert batch.block_tables[index, :reach].tolist() == known.blocks[:reach]
        assert requests[index].output_token_ids == known.outputs
        assert requests[index].prompt_token_ids == known.prompt
    plan = plan_batch(batch, BLOCK_SIZE)
    rows = [list(num_scheduled)[index] for index in plan.requests[plan.row_requests].tolist()]
    inputs = table.planned(plan).inputs
    assert inputs["positions"].tolist() == plan.positions.tolist()
    assert inputs["token_ids"].tolist() == [
        scheduler.running[request_id].tokens[position]
        for request_id, position in zip(rows, plan.positions.tolist(), strict=True)
    ]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_the_table_follows_any_schedule(rng: random.Random, max_num_seqs: int) -> None:
    """covers: A6 A7 D7"""
    table = RequestTable(max_num_seqs, 24, BLOCK_SIZE)
    scheduler = RandomScheduler(rng, BLOCK_SIZE, 24)
    for _ in range(25):
        output = scheduler.step()
        table.update(output)
        table.check_integrity()
        check_step(table, scheduler, output.num_scheduled_tokens)
        for request_id, count in output.num_scheduled_tokens.items():
            known = scheduler.running[request_id]
            token = rng.randrange(1, 1000) if known.computed + count == len(known.tokens) else None
            scheduler.after(request_id, count, token)
            if token is not None:
                table.append_token(table.requests[request_id], token)
        table.check_integrity()
    live = scheduler.live
    assert set(table.requests) == set(live)
    table.update(step_output({}, finished=live))
    table.check_integrity()
    for array in (table.token_ids, table.block_tables, table.num_tokens, table.num_blocks, table.num_computed):
        assert not array.any()


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.sampled_from([1, 4, 16]))
def test_token_tables_follow_any_schedule(rng: random.Random, max_num_seqs: int, tile: int) -> None:
    """covers: A6 A7 D7"""
    table = RequestTable(max_num_seqs, 24, tile, by_token=True)
    scheduler = RandomScheduler(rng, 1, 24)
    for _ in range(25):
        output = scheduler.step()
        table.update(output)
        table.check_integrity()
        requests, batch = table.scheduled(output.num_scheduled_tokens)
        room = table.room(np.array([request.row for request in requests], np.int64))
        for index, (request_id, count) in enumerate(output.num_scheduled_tokens.items()):
            known = scheduler.running[request_id]
            assert known.computed + count <= room[index] == len(known.blocks)
            assert slots_of(batch.block_tables[index], len(known.blocks), tile) == known.blocks
            token = rng.randrange(1, 1000) if known.computed + count == len(known.tokens) else None
            scheduler.after(request_id, count, token)
            if token is not None:
                table.append_token(table.requests[request_id], token)
    table.update(step_output({}, finished=scheduler.live))
    table.check_integrity()
    assert not table.room(np.arange(len(table.num_tokens))).any()


def table_with(*requests: Known, max_num_seqs: int = 4) -> RequestTable:
    table = RequestTable(max_num_seqs, 32, BLOCK_SIZE)
    scheduled = {request.request_id: len(request.tokens) - request.computed for request in requests}
    table.update(step_output(scheduled, [new_request(request) for request in requests]))
    return table


def test_a_request_that_ended_before_any_step_is_no_error() -> None:
    """Cancelled before it had a block. covers: A7"""
    table = table_with(Known("a", [1, 2], blocks=[5]))
    table.update(step_output({}, finished=["never seen", "a"]))
    table.update(step_output({}, finished=["a"]))
    table.check_integrity()
    assert not table.requests


def test_an_id_is_reused_in_the_step_in_which_it_ends() -> None:
    """covers: D7"""
    table = table_with(Known("a", [1, 2, 3], blocks=[5]))
    old = table.requests["a"]
    table.append_token(old, 4)
    old.seed(7)
    table.update(step_output({"a": 2}, [new_request(Known("a", [7, 8], blocks=[6]))], finished=["a"]))
    table.check_integrity()
    request = table.requests["a"]
    assert request is not old
    assert request.noise_seed is None
    assert request.output_token_ids == []
    assert table.token_ids[request.row].tolist() == [7, 8] + [0] * 30
    assert table.block_tables[request.row].tolist() == [6] + [0] * 7


def test_a_row_has_nothing_of_its_last_owner() -> None:
    """covers: D7"""
    table = table_with(Known("long", list(range(1, 25)), blocks=[1, 2, 3, 4, 5, 6]), max_num_seqs=1)
    table.update(step_output({"short": 1}, [new_request(Known("short", [9], blocks=[7]))], finished=["long"]))
    assert table.token_ids[0].tolist() == [9] + [0] * 31
    assert table.block_tables[0].tolist() == [7] + [0] * 7
    _, batch = table.scheduled({"short": 1})
    assert batch.block_tables.tolist() == [[7]]


def test_the_table_grows_where_preempted_requests_keep_their_rows() -> None:
    first = [Known(f"first-{i}", [i + 1], blocks=[i + 1]) for i in range(2)]
    table = table_with(*first, max_num_seqs=2)
    more = [Known(f"more-{i}", [i + 50], blocks=[i + 10]) for i in range(3)]
    preempted = [request.request_id for request in first]
    table.update(step_output({r.request_id: 1 for r in more}, map(new_request, more), preempted=preempted))
    table.check_integrity()
    for request in [*first, *more]:
        row = table.requests[request.request_id].row
        assert table.token_ids[row, 0] == request.prompt[0]
        assert table.block_tables[row, 0] == request.blocks[0]


@pytest.mark.parametrize("as_new", [True, False])
def test_a_resumed_request_keeps_its_outputs_seed_and_scores(as_new: bool) -> None:
    """It computes prompt and outputs again, with other blocks; processors still hold its list. covers: A7"""
    known = Known("a", [1, 2, 3, 4, 5], blocks=[5, 6])
    table = table_with(known)
    request = table.requests["a"]
    outputs = request.output_token_ids
    for token in (8, 9):
        table.append_token(request, token)
        known.outputs.append(token)
    request.seed(7)
    request.prompt_scored = True
    known.blocks, known.computed = [11, 12], 4
    if as_new:
        table.update(step_output({"a": 3}, [new_request(known, prefill_token_ids=known.tokens)]))
    else:
        cached = CachedRequestData(["a"], {"a"}, [], {"a": known.tokens}, [([11, 12],)], [4], [2])
        table.update(step_output({"a": 3}, cached=cached))
    table.check_integrity()
    assert table.requests["a"] is request
    assert request.output_token_ids is outputs
    assert outputs == [8, 9]
    assert request.noise_seed == 7
    assert request.prompt_scored
    (same,), batch = table.scheduled({"a": 3})
    assert same is request
    assert batch.block_tables.tolist() == [[11, 12]]
    assert batch.num_computed.tolist() == [4]
    assert table.token_ids[same.row, 4:7].tolist() == [5, 8, 9]


@pytest.mark.parametrize("as_new", [True, False])
def test_scores_of_a_prompt_that_went_with_a_dropped_output_are_wanted_again(as_new: bool) -> None:
    """vLLM takes them with the first token, and has thrown it away."""
    known = Known("a", [1, 2, 3, 4, 5], blocks=[5, 6], params=SamplingParams(prompt_logprobs=1))
    table = table_with(known)
    request = table.requests["a"]
    request.take_scores()
    table.append_token(request, 8)
    assert not request.wants_prompt_logprobs
    known.blocks, known.computed = [11, 12], 0
    if as_new:
        table.update(step_output({"a": 5}, [new_request(known, prefill_token_ids=known.tokens)]))
    else:
        cached = CachedRequestData(["a"], {"a"}, [], {"a": known.tokens}, [([11, 12],)], [0], [0])
        table.update(step_output({"a": 5}, cached=cached))
    assert request.wants_prompt_logprobs


@pytest.mark.parametrize("carries_tokens", [True, False])
def test_the_next_input_of_a_session_is_a_new_request(carries_tokens: bool) -> None:
    """vLLM has two contracts. In one of them every new request carries all its tokens, as a resumed one does."""

    def sent(known: Known) -> RequestTable:
        tokens = known.tokens if carries_tokens else None
        table.update(step_output({"a": len(known.tokens) - known.computed}, [new_request(known, tokens)]))
        table.check_integrity()
        return table

    table = RequestTable(2, 32, 4)
    first = sent(Known("a", [5, 6, 7], blocks=[1, 2], params=SamplingParams(max_tokens=3))).requests["a"]
    for token in (11, 12, 13):
        table.append_token(first, token)
    first.seed(7)
    # the last token of an answer is not computed, and not kept
    params = SamplingParams(allowed_token_ids=[1], prompt_logprobs=1)
    known = Known("a", [5, 6, 7, 11, 12, 30, 31], blocks=[1, 2, 3], computed=5, params=params)
    second = sent(known).requests["a"]
    assert second is not first
    assert second.prompt_token_ids == known.prompt
    assert second.output_token_ids == []
    assert second.sampling_params is params
    assert second.noise_seed is None
    assert second.wants_prompt_logprobs
    assert table.token_ids[second.row, :8].tolist() == [5, 6, 7, 11, 12, 30, 31, 0]
    _, batch = table.scheduled({"a": 2})
    assert (batch.num_computed.tolist(), batch.num_tokens.tolist()) == ([5], [7])
    if carries_tokens:
        # preempted within its second input
        table.append_token(second, 9)
        assert sent(replace(known, outputs=[9], computed=4)).requests["a"] is second
        assert second.output_token_ids == [9]


def test_tokens_that_the_scheduler_has_thrown_away_are_none() -> None:
    """covers: C8. The step is computed again, and its last row yields a token again."""
    known = Known("a", [1, 2, 3, 4, 5], blocks=[5, 6])
    table = table_with(known)
    request = table.requests["a"]
    outputs = request.output_token_ids
    for token in (8, 9):
        table.append_token(request, token)
    table.update(step_output({"a": 4}, cached=CachedRequestData(["a"], set(), [], {}, [None], [2], [1])))
    table.check_integrity()
    assert request.output_token_ids is outputs
    assert outputs == [8]
    (_,), batch = table.scheduled({"a": 4})
    assert (batch.num_computed.tolist(), batch.num_tokens.tolist()) == ([2], [6])
    assert table.token_ids[request.row, 2:6].tolist() == [3, 4, 5, 8]


def test_tokens_that_another_stage_has_sampled_come_with_the_step() -> None:
    """A decode, one that was not in the step before, and a prompt chunk, whose tokens are known."""
    known = {name: Known(name, [1, 2, 3, 4, 5], blocks=[block]) for block, name in enumerate("abc")}
    table = table_with(*known.values())
    cached = CachedRequestData(
        req_ids=["a", "b", "c"],
        resumed_req_ids={"b"},
        new_token_ids=[[8], [4, 5], [3, 4]],
        all_token_ids={"b": [1, 2, 3, 4, 5, 6, 7]},
        new_block_ids=[None, ([7],), None],
        num_computed_tokens=[5, 3, 2],
        num_output_tokens=[1, 2, 0],
    )
    table.update(step_output({"a": 1, "b": 2, "c": 2}, cached=cached))
    table.check_integrity()
    assert [table.requests[name].output_token_ids for name in "abc"] == [[8], [6, 7], []]
    _, batch = table.scheduled({"a": 1, "b": 2, "c": 2})
    assert batch.num_tokens.tolist() == [6, 7, 5]
    # the stage that has sampled them knows them already
    table.update(step_output({"a": 1, "b": 2, "c": 2}, cached=cached))
    assert [table.requests[name].output_token_ids for name in "abc"] == [[8], [6, 7], []]


def test_a_token_that_the_scheduler_does_not_send_is_an_error() -> None:
    table = table_with(Known("a", [1, 2, 3], blocks=[5]))
    cached = CachedRequestData(["a"], set(), [[8]], {}, [None], [3], [2])
    with pytest.raises(ValueError, match="request a: the scheduler sent 1 new tokens, expected 2"):
        table.update(step_output({"a": 1}, cached=cached))


def test_the_last_token_of_the_longest_request_needs_no_place() -> None:
    known = Known("a", list(range(1, 32)), blocks=list(range(1, 9)))
    table = table_with(known)
    for token in (70, 71):
        table.append_token(table.requests["a"], token)
    table.check_integrity()
    assert table.token_ids[table.requests["a"].row].tolist() == [*range(1, 32), 70]


def test_a_lost_row_is_found() -> None:
    table = table_with(Known("a", [1], blocks=[1]))
    table.requests["a"].row += 1
    with pytest.raises(AssertionError, match="rows"):
        table.check_integrity()


def test_a_lost_token_is_found() -> None:
    table = table_with(Known("a", [1], blocks=[1]))
    table.requests["a"].output_token_ids.append(3)
    with pytest.raises(AssertionError, match="request a"):
        table.check_integrity()
