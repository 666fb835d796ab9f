"""What workers compare of a step before they run it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from vllm_gaudi_ucm.batch.selection_plan import SelectionPlan
from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.execution.execution import StepShape
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.protocol.attachments import attach_report
from vllm_gaudi_ucm.protocol.offload import OffloadReport
from vllm_gaudi_ucm.runner.step_check import StepCheck

SHAPE = StepShape(*[cast(Bucket, "--u 1")] * 2)


class Told:
    """Stands for the ranks: keeps what this one has found."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def check_same(self, what: str, found: str) -> None:
        self.found.append((what, found))


def told(selection: SelectionPlan | None) -> list[tuple[str, str]]:
    ranks: Any = Told()
    division: Any = SimpleNamespace(shape=SHAPE, plan=SimpleNamespace(selection=selection))
    StepCheck(cast(Ranks, ranks), cast(Ranks, ranks)).before_forward(division)
    return ranks.found


def plan(**changes: list[int]) -> SelectionPlan:
    """Two requests, of two and three candidates."""
    arrays = {name: np.array([1, 2]) for name in SelectionPlan._fields}
    arrays |= {"candidate_blocks": np.array([4, 5, 6, 7, 8]), "modes": np.array([0, 2])}
    return SelectionPlan(**{**arrays, **{name: np.array(values) for name, values in changes.items()}})


def test_a_dense_step_has_no_candidates() -> None:
    assert told(None) == [("step 0, bucket", "--u 1 for --u 1")]


def test_ranks_with_the_same_candidates_agree() -> None:
    assert told(plan()) == told(plan())
    what, found = told(plan())[1]
    assert what == "step 0, candidates of sparse requests"
    assert found.startswith("5, modes [0, 2], checksum ")


@pytest.mark.parametrize(
    "changes",
    [{"candidate_blocks": [4, 5, 6, 7, 9]}, {"candidate_blocks": [4, 5, 6, 7]}, {"modes": [0, 0]}, {"counts": [1, 3]}],
)
def test_any_difference_is_told(changes: dict[str, list[int]]) -> None:
    assert told(plan(**changes))[1] != told(plan())[1]


def test_reports_of_offloaded_blocks_are_compared() -> None:
    """Also where one rank has nothing to report."""
    ranks: Any = Told()
    check = StepCheck(cast(Ranks, ranks), cast(Ranks, ranks), checks_offload=True)
    step: Any = None
    for report in (OffloadReport(), OffloadReport(saved=[(1, 2)]), OffloadReport(scores={1: [0.5, -1.0]})):
        output: Any = SimpleNamespace()
        attach_report(output, report)
        check.before_output(step, output)
    assert len({found for _, found in ranks.found}) == 3
    assert ranks.found[1][1] == '{"saved":[[1,2]],"unsaved":[],"loaded":[],"failed":[],"scores":{}}'
