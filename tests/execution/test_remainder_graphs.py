"""Graphs for remainders of prompts: shapes that hold every tail of a server, and which steps are for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.execution.bucketed_execution import is_remainder, remainder_shapes
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, LimitsError
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShapes, most_remainders, remainder_rows
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.sparse_worker import ServerSizes, selection_limits

BLOCK = 16
LIMITS = Limits(256, 8, 1024, BLOCK, 600, False, max_selected_blocks=160)
OPTIONS = BlockOptions(min_tokens=64, min_blocks=2)
SIZES = ServerSizes(1024, 8, 1, BLOCK, 600, static=True, remainder_rows=BLOCK)
CHOICES = selection_limits(OPTIONS, SIZES)


def remainders_of(limits: Limits = LIMITS, choices: SelectionLimits = CHOICES) -> RemainderShapes:
    found = remainder_shapes(limits, choices)
    assert found is not None
    return found


def test_small_graphs_and_one_for_every_remainder() -> None:
    sizes = (4, 5), (4, CHOICES.most), (64, CHOICES.most)
    assert len(sizes) == most_remainders(tiles=False)
    assert remainders_of().shapes == [ForwardShape("cs-", BLOCK, shared, 0, selected) for shared, selected in sizes]
    short, few = replace(LIMITS, max_model_len=48), replace(CHOICES, most=1)
    assert len(remainders_of(short, few).keys) == 1, "one that holds all is enough"


def test_chunks_whose_tiles_choose_have_twice_as_many() -> None:
    options = OPTIONS.model_copy(update={"prompt_ratio": 0.3, "prompt_tile": 32})
    found = remainders_of(
        choices=selection_limits(options, SIZES._replace(remainder_rows=LIMITS.max_num_batched_tokens))
    )
    assert len(found.shapes) == most_remainders(tiles=True) == 6
    assert {shape.query_len for shape in found.shapes} == {64, 256}


def test_only_static_shapes_have_them() -> None:
    assert remainder_shapes(LIMITS, selection_limits(OPTIONS, SIZES._replace(static=False))) is None
    assert remainder_shapes(LIMITS, None) is None


@given(full=st.integers(5, 63), new=st.integers(2, BLOCK), unready=st.integers(0, 63))
def test_every_remainder_has_a_graph_and_a_usual_one_a_small_one(full: int, new: int, unready: int) -> None:
    """Blocks without a summary are attended in any case."""
    budget = block_budget(full * BLOCK + new, BLOCK, OPTIONS)
    assert budget is not None
    candidates = max(1, budget.num_candidates - unready)
    chosen = min(budget.num_selected, candidates)
    step = Bucket("cs-", new, full - candidates, 0, 1, chosen)
    found = remainders_of().lookup(step)
    live = full - budget.num_candidates
    assert live <= CHOICES.live_blocks
    is_usual = step.shared_blocks <= CHOICES.live_blocks
    assert found == remainders_of().shapes[2 if not is_usual else chosen > 5]
    assert CHOICES.of_remainder().candidates(BLOCK, found.selected_blocks) >= candidates


def test_rows_of_remainders_are_those_of_a_block_and_more_than_drafts_need() -> None:
    assert [remainder_rows(16, tokens, most) for tokens, most in ((64, 4), (10, 4), (64, 15), (64, 16))] == [
        16,
        10,
        16,
        0,
    ]
    assert remainder_rows(16, 64, 16, tiles=True) == 64


def test_what_is_no_remainder_of_the_server() -> None:
    with pytest.raises(LimitsError, match="graphs for prompt remainders"):
        remainders_of().lookup(Bucket("cs-", BLOCK + 1, 4, 0, 1, 5))


@pytest.mark.parametrize(("rows", "held"), [(None, False), ([1, 1], False), ([2], True)])
def test_steps_that_are_for_them(rows: list[int] | None, held: bool) -> None:
    plan: Any = SimpleNamespace(selection=None if rows is None else SimpleNamespace(num_rows=np.array(rows)))
    assert is_remainder(plan, CHOICES.max_rows) == held
