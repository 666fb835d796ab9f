"""Time to plan a step against a plain numpy rendering of the same rule: interleaved medians, one thread, one table.

The sides take turns of a few steps each, so that both find their own code and arrays in the core's caches. The table
also shows the host's work for a whole step on a CPU before its first layer: plan, tensors, and jobs of the C++ kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.planning_peer import plan_plainly
from benchmarks.positive import positive
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, GroupPlan, SteadyPlanner, UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm_tools.output import report_console

BLOCK_SIZE = 128
CACHE_BLOCKS = 1 << 17  # of a cache of 16 million tokens; block ids are scattered over it
TURN = 20  # steps of one side, then the same steps of the other; the last plans of a turn are compared


@dataclass(frozen=True)
class Workload:
    """`requests` decodes near `context` tokens, the first `prefix` of them shared, for many steps.

    prefixes: different ones, given to the requests in turn.
    rows: new tokens of a request, half of which stay: with more than one it is a verification of drafts.
    chunk: new tokens of the last request, which is a prompt in chunks, instead of `rows`.
    steady: ours plans each step from the one before.
    goal_ms, host_goal_ms: limits for ours, and for all of the host's work.
    """

    name: str
    requests: int
    context: int
    prefix: int = 0
    prefixes: int = 1
    rows: int = 1
    chunk: int | None = None
    steady: bool = False
    goal_ms: float | None = None
    block_size: int = BLOCK_SIZE
    host_goal_ms: float | None = None

    def steps(self, count: int) -> Iterator[BatchInput]:
        """Successive batches; contexts end anywhere in a block, and blocks are appended as they fill."""
        rng, size = np.random.default_rng(0), self.block_size
        computed = self.context - rng.integers(0, size, self.requests, np.int32)
        new = np.full(self.requests, self.rows, np.int32)
        stay = np.full(self.requests, (self.rows + 1) // 2, np.int32)
        if self.chunk is not None:
            new[-1], stay[-1] = self.chunk, 0
        width = int((computed + count * stay + new).max()) // size + 1
        tables = rng.permutation(CACHE_BLOCKS)[: self.requests * width].reshape(self.requests, width).astype(np.int32)
        shared = self.prefix // size
        tables[:, :shared] = tables[np.arange(self.requests) % self.prefixes, :shared]
        for _ in range(count):
            reach = int((computed + new).max() - 1) // size + 1
            yield BatchInput(computed.copy(), new.copy(), computed + new, (tables[:, :reach].copy(),))
            computed += stay

    def planner(self) -> Callable[[BatchInput], UnifiedPlan]:
        """Ours."""
        size = self.block_size
        return SteadyPlanner(size).plan if self.steady else lambda batch: plan_batch(batch, size)

    def host(self) -> Callable[[BatchInput], UnifiedPlan]:
        """Plans, and turns the plan into the data that the first layer reads."""
        plan, staging = self.planner(), TrueShapeTensors(torch.device("cpu"))

        def run(batch: BatchInput) -> UnifiedPlan:
            planned = plan(batch)
            ATTENTION.make("native").plan(
                staging.stage(PlannedStep.of_tokens(planned, planned.positions))[0].parts, self.block_size
            )
            return planned

        return run


WORKLOADS = (
    Workload("64 at 4K", 64, 4096, goal_ms=0.06),
    Workload("256 at 4K, 2K shared", 256, 4096, 2048, goal_ms=0.2),
    Workload("64 at 4K, steady", 64, 4096, steady=True, goal_ms=0.015),
    Workload("256 at 4K, 2K shared, steady", 256, 4096, 2048, steady=True),
    Workload("256 at 4K, four prefixes of 2K", 256, 4096, 2048, prefixes=4),
    Workload("64 at 4K, 2K shared, one chunk", 64, 4096, 2048, chunk=512),
    Workload("16 of 4 rows at 8K", 16, 8192, rows=4, host_goal_ms=2.2),
    Workload("16 of 4 rows at 8K, blocks of 16", 16, 8192, rows=4, block_size=16, host_goal_ms=2.2),
    Workload("64 at 4K, 2K shared, one chunk, blocks of 16", 64, 4096, 2048, chunk=512, block_size=16),
    Workload("64 of 4 rows at 4K, 2K shared", 64, 4096, 2048, rows=4),
)


@dataclass(frozen=True)
class Result:
    """Milliseconds of every step, by side; host: of everything before a step's first layer."""

    workload: Workload
    ours: list[float]
    peer: list[float]
    host: list[float]

    @property
    def ratio(self) -> float:
        return median(self.peer) / median(self.ours)

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "steps": len(self.ours),
            "ours_ms": median(self.ours),
            "ours_mean_ms": fmean(self.ours),
            "peer_ms": median(self.peer),
            "ratio": self.ratio,
            "goal_ms": self.workload.goal_ms,
            "host_ms": median(self.host),
            "host_goal_ms": self.workload.host_goal_ms,
        }


class PlansDiffer(Exception):
    """The two sides do not decide the same."""


def measure(workload: Workload, count: int, peer: Callable[[BatchInput, int], UnifiedPlan] = plan_plainly) -> Result:
    """Times both sides on the same batches in turn, and compares the plans of the last step of every turn.

    Raises:
        PlansDiffer: with the workload, the step and the field.
    """
    plan, host = workload.planner(), workload.host()
    result = Result(workload, [], [], [])
    steps = workload.steps(count)
    while turn := list(islice(steps, TURN)):
        ours = _timed(plan, turn, result.ours)
        theirs = _timed(lambda batch: peer(batch, workload.block_size), turn, result.peer)
        _timed(host, turn, result.host)
        field = difference(ours, theirs)
        if field is not None:
            raise PlansDiffer(f"{workload.name}, step {len(result.ours) - 1}: the plans differ in {field}")
    return result


def _timed(plan: Callable[[BatchInput], UnifiedPlan], turn: Sequence[BatchInput], times: list[float]) -> UnifiedPlan:
    """Plans each batch, adds its milliseconds to `times`, and returns the last plan."""
    for batch in turn:
        start = time.perf_counter()
        result = plan(batch)
        times.append(1e3 * (time.perf_counter() - start))
    return result


def difference(ours: UnifiedPlan, theirs: UnifiedPlan) -> str | None:
    """The first field in which two plans decide differently; the order of the shared blocks does not matter."""
    for name in (*UnifiedPlan._fields, *GroupPlan._fields):
        if name == "groups":
            continue
        one, other = getattr(ours, name), getattr(theirs, name)
        if name == "shared":
            one, other = _shared_content(ours), _shared_content(theirs)
        if not _equal(one, other):
            return name
    return None


def _shared_content(plan: UnifiedPlan) -> tuple[Any, ...] | None:
    """Ranges in the order of block ids, and the rows of every block."""
    if plan.shared is None:
        return None
    blocks, lo, hi, groups, rise = plan.shared
    order = np.argsort(blocks)
    rows = {int(blocks[column]): sorted(rows) for rows, begin, end in groups for column in range(begin, end)}
    return blocks[order], lo[:, order], hi[:, order], rows, sorted(sorted(rows) for rows, _, _ in groups), rise


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def table(results: Sequence[Result]) -> Table:
    """Medians, ratio and goals of each workload."""
    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("requests")
    for heading in ("ours, ms", "plain numpy, ms", "ratio", "goal, ms", "host, ms", "goal, ms"):
        result.add_column(heading, justify="right")
    for row in results:
        result.add_row(
            row.workload.name,
            _coloured(row.ours, row.workload.goal_ms, 4),
            f"{median(row.peer):.4f}",
            f"{row.ratio:.1f}x",
            _goal(row.workload.goal_ms),
            _coloured(row.host, row.workload.host_goal_ms, 2),
            _goal(row.workload.host_goal_ms),
        )
    return result


def _coloured(times: Sequence[float], goal: float | None, digits: int) -> str:
    middle = median(times)
    colour = "default" if goal is None else "green" if middle <= goal else "red"
    return f"[{colour}]{middle:.{digits}f}[/]"


def _goal(goal: float | None) -> str:
    return "-" if goal is None else f"{goal:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if the two sides plan differently."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--steps", type=positive, default=1000, help="steps of each workload")
    parser.add_argument("--json", action="store_true", help="one JSON object per workload instead of a table")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        results = [measure(workload, args.steps) for workload in WORKLOADS]
    except PlansDiffer as error:
        print(f"benchmarks.planning: {error}", file=sys.stderr)
        return 1
    if args.json:
        for row in results:
            print(json.dumps(row.to_json()))
        return 0
    console = report_console()
    console.print(
        f"{describe_machine()}; blocks of {BLOCK_SIZE} where nothing else is said, median of {args.steps} steps",
        style="dim",
    )
    console.print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
