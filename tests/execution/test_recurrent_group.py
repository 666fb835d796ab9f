"""Rows of layers with a state: a bucket has room for every step that it may hold, and each row is in one place."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.execution.recurrent_group import MOST_PROMPTS, RecurrentGroup, RowsPlan
from vllm_gaudi_ucm.execution.step_sizes import Sizes
from vllm_gaudi_ucm.execution.step_tensors import StepArrays
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.vllm_api.kv_cache import MambaSpec

BLOCK = 16
SPEC = MambaSpec(block_size=BLOCK, shapes=((3, 8), (2, 4, 4)), dtypes=(torch.float32, torch.bfloat16))


def group_of(max_num_seqs: int, drafts: int) -> RecurrentGroup:
    group = RecurrentGroup(KvGroup(0, BLOCK), max_num_seqs, 1 + drafts)
    group.allocate({"layer": SPEC}, 100, torch.device("cpu"))
    return group


def batch_of(counts: list[int]) -> BatchInput:
    """Requests that begin, with so many tokens each."""
    new = np.array(counts, np.int32)
    width = -(-max(counts) // BLOCK)
    table = np.arange(1, 1 + len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    return BatchInput(np.zeros(len(counts), np.int32), new, new, (table,))


@given(st.randoms(use_true_random=False), st.integers(1, 40), st.integers(0, 3))
def test_a_bucket_has_room_for_its_steps(rng: random.Random, requests: int, drafts: int) -> None:
    group = group_of(requests, drafts)
    counts = [rng.choice([1, 1 + drafts, rng.randrange(1, 140)]) for _ in range(requests)]
    limits = Limits(sum(counts) + 8, requests, 4096, BLOCK, 10_000)
    batch = batch_of(counts)
    parts = group.divide(batch, cast(Any, SimpleNamespace()))
    assert sorted(np.concatenate(parts).tolist()) == list(range(requests))
    planner = group.planner(512, 1)
    for part in parts:
        taken = batch.take(part)
        step = plan_batch(taken, BLOCK)
        own = planner.plan(taken, step, {})
        assert isinstance(own, RowsPlan)
        arrays, few = own.arrays, 1 + drafts
        # each row is computed once, and its result is found there
        for row, place in enumerate(arrays["places"].tolist()):
            kind, index = ("few_rows", place) if place >= 0 else ("tile_rows", -1 - place)
            assert arrays[kind].reshape(-1)[index] == row
        assert (arrays["few_rows"] >= 0).sum() + (arrays["tile_rows"] >= 0).sum() == step.num_rows
        phase = "c--" if step.num_single < step.num_rows else "--u"
        sizes = Sizes(ForwardShape(phase, step.num_rows + 5, 0, 0), limits, None)
        plan = step._replace(groups=(*step.groups, own))
        for entry in group.tensors(1):
            values, room = entry.values(cast(StepArrays, SimpleNamespace(plan=plan))), entry.size(sizes)
            assert room is not None
            assert len(values) <= room[0], entry.name
            assert values.shape[1:] == room[1:]
        assert arrays["few_rows"].shape[1] == few


def test_a_step_of_many_prompts_is_divided_in_buckets_alone() -> None:
    batch, group = batch_of([20] * (2 * MOST_PROMPTS + 1)), group_of(64, 0)
    assert [len(part) for part in group.divide(batch, cast(Any, SimpleNamespace()))] == [MOST_PROMPTS, MOST_PROMPTS, 1]
    assert len(group.divide(batch, None)) == 1


def test_blocks_have_no_states_and_running_requests_count() -> None:
    group = group_of(4, 2)
    each = 3 * 8 * 4 + 2 * 4 * 4 * 2
    assert group.bytes_per_block(SPEC) == 0
    # one for pads and one of zeros
    assert group.bytes_of_requests(SPEC) == (4 * 3 + 2) * each
    made = group.allocate({"layer": SPEC}, 100, torch.device("cpu"))["layer"]
    assert sum(one.nbytes for one in made) == group.bytes_of_requests(SPEC)


def test_a_request_that_goes_on_without_a_state_is_a_defect() -> None:
    batch = batch_of([3])._replace(num_computed=np.array([16], np.int32))
    batch = batch._replace(tables=(np.array([[1, 2]], np.int32),))
    with pytest.raises(ValueError, match="blocks have no states"):
        group_of(1, 0).planner(512, 1).plan(batch, plan_batch(batch, BLOCK), {})
