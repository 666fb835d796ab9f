"""The CPU attention table: its cases are what they say, every contender computes them, a byte counts once."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention_side_ours, attention_side_sdpa
from benchmarks.attention_bounds import Machine, limit_seconds
from benchmarks.attention_case import Case, exact_rows, make_data, relative_error
from benchmarks.attention_cpu import GATE, OURS, PEER, CaseResult

SMALL = (
    Case("decode", 2, 300, 1),
    Case("shared decode", 3, 256 + 40, 1, shared=256),
    Case("prefill", 2, 0, 33),
    Case("prefill after a shared prefix", 2, 256, 9, shared=256),
)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_contender_computes_the_case(case: Case) -> None:
    data = make_data(case)
    rows, exact = exact_rows(data, case)
    calls = attention_side_ours.calls(case, data) | attention_side_sdpa.calls(case, data)
    assert {"reference", "sdpa"} <= set(calls)
    assert all(relative_error(call(), rows, exact) < GATE for call in calls.values())


def test_requests_share_exactly_the_leading_blocks() -> None:
    tables = make_data(SMALL[1]).block_tables
    assert (tables[:, :2] == tables[0, :2]).all()
    assert len(tables[:, 2:].unique()) == 3
    assert not set(tables[:, 2:].flatten().tolist()) & set(tables[0, :2].tolist())


def test_a_result_that_is_not_finite_is_infinitely_wrong() -> None:
    out = torch.tensor([[1.0], [float("nan")]])
    assert relative_error(out, torch.tensor([0]), torch.ones(1, 1, dtype=torch.float64)) == float("inf")


def test_the_limit_reads_a_shared_prefix_once() -> None:
    machine = Machine(bytes_per_second=1.0, flops_per_second=float("inf"))
    alone, shared = (limit_seconds(Case("", 4, 1024, 1, shared), machine) for shared in (0, 1024))
    assert shared < 0.3 * alone


def test_ratio_is_the_others_time_over_ours() -> None:
    result = CaseResult(SMALL[0], 0.0, {OURS: [1.0, 2.0, 3.0], PEER: [4.0, 4.0, 9.0]})
    assert result.ratio(PEER) == 2.0
    assert result.ratio("absent") is None
