"""Drafts continue the longest n-gram at the end as it went on the first time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm import SamplingParams

from tests.batch.scheduling import Known, new_request, step_output
from vllm_gaudi_ucm.batch.request_table import RequestTable
from vllm_gaudi_ucm.speculation.proposer import NgramProposer, SampledStep, wanted_drafts

MAX_MODEL_LEN = 24


def drafts_of(prompts: Sequence[list[int]], wanted: Sequence[int], min_n: int = 1, rows: int = 8) -> list[list[int]]:
    table = RequestTable(rows, MAX_MODEL_LEN, 4)
    proposer = NgramProposer(table, 4, min_n, 3)
    known = [Known(f"request-{i}", prompt, blocks=[i + 1]) for i, prompt in enumerate(prompts)]
    scheduled = {request.request_id: len(request.prompt) for request in known}
    table.update(step_output(scheduled, map(new_request, known)))
    requests, batch = table.scheduled(scheduled)
    # what lies behind the tokens is no token of the request
    table.write_drafts({request.request_id: [1, 2, 3] for request in known if len(request.prompt) < MAX_MODEL_LEN - 3})
    step = SampledStep(requests, batch, np.array(wanted) > 0, np.array(wanted, np.int64))
    return proposer.propose(step)


def test_the_longest_match_is_continued() -> None:
    found = drafts_of([[1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3], [5, 6, 7], [4, 4, 4, 4]], [4, 4, 4])
    assert found == [[9, 8, 2, 3], [], [4]]


def test_only_what_is_wanted() -> None:
    prompt = [1, 2, 3, 4, 5, 1, 2]
    assert drafts_of([prompt, prompt, prompt], [4, 0, 2]) == [[3, 4, 5, 1], [], [3, 4]]
    assert drafts_of([[7, 1, 5, 7]], [4], min_n=2) == [[]]


def test_rows_of_a_table_that_grew() -> None:
    """A preempted request keeps its row, so that rows exceed max_num_seqs."""
    prompts = [[i, 50, i] for i in range(5)]
    assert drafts_of(prompts, [4] * 5, rows=2) == [[50, i] for i in range(5)]


def test_as_many_as_a_request_can_still_use() -> None:
    """One token is sampled in any case."""
    table = RequestTable(4, MAX_MODEL_LEN, 4)
    params = [SamplingParams(max_tokens=n) for n in (1, 3, 100)] + [SamplingParams(max_tokens=100)]
    prompts = [[1], [1], [1], [1] * (MAX_MODEL_LEN - 3)]
    known = [
        Known(str(i), prompt, blocks=[1], params=p) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    table.update(step_output({"0": 1, "1": 1, "2": 1, "3": 1}, map(new_request, known)))
    requests = list(table.requests.values())
    assert wanted_drafts(requests, np.ones(4, bool), table, 5).tolist() == [0, 2, 5, 2]
    assert wanted_drafts(requests, np.zeros(4, bool), table, 5).tolist() == [0, 0, 0, 0]
