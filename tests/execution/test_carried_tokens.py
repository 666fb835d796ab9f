"""Tokens of the step before, put into the next step's input ids on the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import NewRequestData

from tests.batch.scheduling import Known, new_request, step_output
from vllm_gaudi_ucm.batch.request_table import UNKNOWN_TOKEN, RequestTable
from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
from vllm_gaudi_ucm.sampling.tokens_in_flight import DeviceTokens, SampledTokens, TokensInFlight

DEVICES = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
SLOTS = 8


@pytest.mark.parametrize("device", DEVICES, ids=str)
@settings(max_examples=100, deadline=None)
@given(
    known=st.lists(st.one_of(st.integers(0, 1 << 40), st.none()), min_size=1, max_size=40),
    slots=st.lists(st.integers(0, SLOTS - 1), min_size=40, max_size=40),
    tokens=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=SLOTS),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_each_unknown_id_is_the_token_of_its_slot(
    device: torch.device, known: list[int | None], slots: list[int], tokens: list[int], dtype: torch.dtype
) -> None:
    """Others stay, and slots beyond the last step's are never asked for."""
    carried = CarriedTokens(SLOTS, device)
    carried.tokens.fill_(-999)
    carried.put(torch.tensor(tokens, dtype=dtype, device=device))
    asked = [slot % len(tokens) for slot in slots]
    ids = [-1 - slot if token is None else token for token, slot in zip(known, asked, strict=False)]
    expected = [tokens[slot] if token is None else token for token, slot in zip(known, asked, strict=False)]
    given_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    assert carried.fill_in(given_ids).tolist() == expected
    assert given_ids.tolist() == ids


def _new(name: str, prompt: list[int]) -> NewRequestData:
    return new_request(Known(name, prompt, blocks=[1]))


def _table() -> RequestTable:
    """Three requests of two tokens each, in rows of a table of blocks of four."""
    table = RequestTable(3, 4, 4)
    table.update(step_output({}, new=[_new(name, [index, index + 10]) for index, name in enumerate("abc")]))
    return table


def _sampled(tokens: list[int]) -> DeviceTokens:
    found = torch.tensor(tokens)
    return DeviceTokens(found, (found,), "tokens", lambda host: SampledTokens(host[:, None].tolist(), None))


def test_a_token_is_known_once_it_has_crossed() -> None:
    table, carried = _table(), CarriedTokens(3, torch.device("cpu"))
    live = list(table.requests.values())
    flight = TokensInFlight(_sampled([7, 8, 9]), live, table, carried)
    assert [request.output_token_ids for request in live] == [[UNKNOWN_TOKEN]] * 3
    table.check_integrity()
    ids = table.token_ids[[request.row for request in live], 2]
    assert ids.tolist() == [-1, -2, -3]
    assert carried.fill_in(torch.from_numpy(ids)).tolist() == [7, 8, 9]
    assert flight.are_waited_for
    for _ in range(2):
        assert flight.settle()[0].tokens == [[7], [8], [9]]
    assert not flight.are_waited_for
    assert [request.output_token_ids for request in live] == [[7], [8], [9]]
    assert table.token_ids[[request.row for request in live], 2].tolist() == [7, 8, 9]


def test_a_token_of_a_request_that_has_ended_reaches_no_other() -> None:
    """Its row has another owner, or its id has, when the token comes."""
    table, carried = _table(), CarriedTokens(3, torch.device("cpu"))
    live = list(table.requests.values())
    flight = TokensInFlight(_sampled([7, 8, 9]), live, table, carried)
    table.update(step_output({}, finished="ab", new=[_new("b", [5, 6]), _new("d", [4, 3])]))
    flight.settle()
    assert table.requests["c"].output_token_ids == [9]
    for name, tokens in (("b", [5, 6]), ("d", [4, 3])):
        request = table.requests[name]
        assert request.output_token_ids == []
        assert table.token_ids[request.row].tolist() == [*tokens, 0, 0]
    table.check_integrity()


def test_the_last_token_that_fits_needs_no_place() -> None:
    table, carried = RequestTable(1, 4, 4), CarriedTokens(1, torch.device("cpu"))
    table.update(step_output({}, new=[_new("a", [1, 2, 3, 4])]))
    (request,) = table.requests.values()
    flight = TokensInFlight(_sampled([7]), [request], table, carried)
    assert table.token_ids[request.row].tolist() == [1, 2, 3, 4]
    flight.settle()
    assert request.output_token_ids == [7]
    assert table.token_ids[request.row].tolist() == [1, 2, 3, 4]
    table.check_integrity()
