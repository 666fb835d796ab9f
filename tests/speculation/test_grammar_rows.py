"""Every position takes its own row of a grammar's bitmask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from vllm.v1.core.sched.output import GrammarOutput

from tests.batch.scheduling import step_output
from vllm_gaudi_ucm.sampling.sampling import Grammar
from vllm_gaudi_ucm.sampling.stages.token_mask import bitmask_of
from vllm_gaudi_ucm.speculation.verification import grammar_at

# rows of a: 0 to 2, of b: 3, of c: 4 to 6 (padded drafts have rows, too)
DRAFTS = {"a": [5, 6], "c": [7, -1], "free": [8, 9, 10]}
SCHEDULED = replace(
    step_output({"c": 3, "free": 4, "a": 3, "b": 1}),
    scheduled_spec_decode_tokens=DRAFTS,
    has_structured_output_requests=True,
)
GRAMMAR = Grammar(SCHEDULED, GrammarOutput(["a", "b", "c"], np.arange(7, dtype=np.int32)[:, np.newaxis]))


def in_blocks(grammar: Grammar, each: int) -> Grammar:
    """The same with as many rows for each request, as vLLM 0.33 has them; the others are not filled."""
    found = np.full((3 * each, 1), 99, np.int32)
    for block, rows in enumerate(((0, 1, 2), (3,), (4, 5, 6))):
        found[block * each : block * each + len(rows), 0] = rows
    return grammar._replace(output=GrammarOutput(["a", "b", "c"], found))


@pytest.mark.parametrize("scheduled", [GRAMMAR, in_blocks(GRAMMAR, 3), in_blocks(GRAMMAR, 5)], ids=["packed", "3", "5"])
def test_rows_of_each_position(scheduled: Grammar) -> None:
    """Requests that were rejected before, and free ones, take none. covers: A18"""
    expected = {
        0: (["c", "free", "a", "b"], [4, -1, 0, 3]),
        1: (["a", "free", "c"], [1, -1, 5]),
        2: (["free", "a"], [-1, 2]),
    }
    for position, (names, rows) in expected.items():
        grammar = grammar_at(scheduled, position, names)
        assert grammar is not None
        assert grammar.scheduler_output.scheduled_spec_decode_tokens == {}
        bitmask = bitmask_of(grammar, names)
        assert bitmask is not None
        assert bitmask[:, 0].tolist() == rows
    assert grammar_at(scheduled, 3, ["free"]) is None


def test_without_drafts_the_grammar_is_the_schedulers() -> None:
    plain = Grammar(step_output({"a": 1}), GrammarOutput(["a"], np.zeros((1, 1), np.int32)))
    assert grammar_at(plain, 0, ["a"]) is plain


def test_a_step_without_drafts_in_an_engine_that_has_some() -> None:
    """vLLM 0.33 has rows for drafts there, too."""
    rows = np.array([[7], [99], [99], [8], [99], [99]], np.int32)
    scheduled = Grammar(step_output({"b": 1, "a": 1}), GrammarOutput(["a", "b"], rows))
    grammar = grammar_at(scheduled, 0, ["b", "a"])
    assert grammar is not None
    bitmask = bitmask_of(grammar, ["b", "a"])
    assert bitmask is not None
    assert bitmask[:, 0].tolist() == [8, 7]
