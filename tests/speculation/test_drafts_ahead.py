"""Drafts that the host does not know yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.speculation.fake_step import scheduled_drafts
from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
from vllm_gaudi_ucm.sampling.sampling import Grammar
from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead
from vllm_gaudi_ucm.vllm_api.steps import DraftTokenIds


@pytest.fixture
def carried() -> CarriedTokens:
    return CarriedTokens(6, torch.device("cpu"))


@pytest.fixture
def reads() -> list[str]:
    return []


@pytest.fixture
def ahead(carried: CarriedTokens, reads: list[str]) -> DraftsAhead:
    """Two passes: requests a and b get a draft each, then a another one."""
    ahead = DraftsAhead(carried, HostWork(reads.append))
    ahead.begin()
    (first, other), (second,) = ahead.put(torch.tensor([70, 80])), ahead.put(torch.tensor([71]))
    ahead.end()
    ahead.proposed(DraftTokenIds(["a", "b", "c"], [[first, second], [other], []]))
    return ahead


PLACEHOLDERS = scheduled_drafts({"a": [-1] * 3, "b": [-1] * 3, "c": [-1] * 3}, {"a": 4, "b": 4, "c": 4, "d": 1})


def test_drafts_take_the_places_of_the_schedulers(ahead: DraftsAhead, carried: CarriedTokens, reads: list[str]) -> None:
    drafts = ahead.of_step(PLACEHOLDERS)
    assert drafts.num_scheduled == {"a": 3, "b": 2, "c": 1, "d": 1}
    assert {name: len(tokens) for name, tokens in drafts.tokens.items()} == {"a": 2, "b": 1}
    # the forward finds them on the device
    ids = torch.tensor([5, *drafts.tokens["a"], 6, *drafts.tokens["b"]])
    assert carried.fill_in(ids).tolist() == [5, 70, 71, 6, 80]
    # places are taken anew once they were read: the copy stays
    carried.put(torch.tensor([1, 2, 3]))
    assert ahead.verified(drafts, None).tokens == {"a": [70, 71], "b": [80]}
    assert reads == []


def test_fewer_are_scheduled_than_were_proposed(ahead: DraftsAhead) -> None:
    drafts = ahead.of_step(scheduled_drafts({"a": [-1]}, {"a": 2, "b": 1}))
    assert ahead.read(drafts.tokens, early=True) == {"a": [70]}


def test_a_request_that_was_not_in_the_last_step_has_none(ahead: DraftsAhead) -> None:
    ahead.begin()
    ahead.end()
    ahead.proposed(DraftTokenIds(["b"], [[9]]))
    assert ahead.of_step(PLACEHOLDERS) == StepDrafts({"b": [9]}, {"a": 1, "b": 2, "c": 1, "d": 1})


@pytest.mark.parametrize(("told", "compared"), [([-1, -1, -1], []), ([70, -1, -1], [70]), ([70, 71, -1], [70, 71])])
def test_a_grammar_takes_the_drafts_that_it_was_told(
    ahead: DraftsAhead, reads: list[str], told: list[int], compared: list[int]
) -> None:
    """The rows behind these are without a bitmask."""
    drafts = ahead.of_step(PLACEHOLDERS)
    assert ahead.read(drafts.tokens, early=True)["a"] == [70, 71]
    assert reads == ["drafts of a model"]
    scheduled = scheduled_drafts({"a": told, "b": [-1] * 3}, {})
    grammar = Grammar(scheduled, cast(Any, SimpleNamespace(structured_output_request_ids=["a", "d"])))
    assert ahead.verified(drafts, grammar).tokens == {"a": compared, "b": [80]}
