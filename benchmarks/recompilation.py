"""Recipes that a device would compile after warm-up: steps of every trace mix, scaled down, through a tiny model.

Runs the worker's whole step (request table, planner, buckets, graphs, sampling) with every operator hashed. A step
without a bucket, or a graph that was never captured, raises.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.mix_server import VOCABULARY, Serving, sampling, serving
from benchmarks.mix_sparse import METHODS, MixSparse, sparse_config
from benchmarks.mix_traffic import MixTraffic
from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, LLAMA_8B
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES


class Counts(NamedTuple):
    """Counts of the steps of one mix.

    runs: forward graphs that were replayed; more than steps if steps ran in parts. phases: runs by true phase.
    buckets: different forward buckets that were used. new_recipes: compiled while serving.
    sparse: requests that attended to a selection, one for each run; modes: by how it was made. fallbacks: requests that
    were dense for want of room. drafts, accepted: verified, and right. preempted: requests that lost their blocks.
    """

    steps: int
    runs: int
    phases: dict[str, int]
    buckets: int
    graphs: int
    new_recipes: int
    warm_up_seconds: float
    milliseconds_per_step: float
    sparse: int
    modes: dict[str, int]
    fallbacks: int
    drafts: int
    accepted: int
    preempted: int


def main() -> int:
    """Prints one line for each mix; 1 if anything was compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--warm-up", choices=("full", "skeleton"), default="full")
    parser.add_argument("--max-graphs", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sparse", choices=("none", *METHODS), default="none", help="sparse method")
    parser.add_argument("--drafts", type=int, default=0, help="most drafts that a request has verified in a step")
    parser.add_argument("--scale", type=int, default=1, help="divides tokens and requests of the mixes once more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    graphs = {"warm_up": args.warm_up, "max_graphs": args.max_graphs, "recipe_check": "count"}
    found = {}
    for mix in args.mixes:
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(mix, Path(folder), graphs, args.sparse, args.drafts, args.scale) as server,
        ):
            found[mix] = run(server, args.steps, args.seed)
    for line in table(found):
        print(line)
    if args.json:
        args.json.write_text(json.dumps({mix: counts._asdict() for mix, counts in found.items()}, indent=2) + "\n")
    return int(any(counts.new_recipes for counts in found.values()))


def run(server: Serving, steps: int, seed: int = 0) -> Counts:
    """Drives the runner as the engine does, and counts."""
    runner = server.runner
    static = runner.static
    assert static is not None, "the engine runs at static shapes"
    shape = server.mix
    cost = CostModel(DEVICES["gaudi2"], LLAMA_8B, shape.limits.block_size)
    role = None if server.sparse == "none" else MixSparse(sparse_config(server.sparse), shape.limits)
    traffic = MixTraffic(shape, cost, seed, VOCABULARY, role, server.drafts)
    before = len(read_phase_log(server.phase_log)[1])
    start = time.perf_counter()
    for message in traffic.steps(steps, sampling):
        runner.parts.steps.execute_model(message)
        traffic.take(runner.parts.steps.sample_tokens(None), runner.parts.steps.take_draft_token_ids())
    seconds = time.perf_counter() - start
    records = read_phase_log(server.phase_log)[1][before:]
    totals = server.totals
    return Counts(
        steps=steps,
        runs=len(records),
        phases=dict(Counter(record.bucket.phase for record in records)),
        buckets=len({record.padded.forward for record in records}),
        graphs=static.execution.ready.progress[0],
        new_recipes=static.stages.new_recipes,
        warm_up_seconds=round(static.summary().seconds, 2),
        milliseconds_per_step=round(1e3 * seconds / steps, 3),
        sparse=sum(record.sparse for record in records),
        modes={mode.name: count for mode, count in totals.modes.items() if count},
        fallbacks=totals.fallbacks,
        **asdict(traffic.counts),
    )


def table(found: dict[str, Counts]) -> list[str]:
    """One line for each mix."""
    lines = [
        f"{'mix':14}{'steps':>8}{'runs':>8}{'graphs':>8}{'buckets':>9}{'warm-up s':>11}{'ms/step':>9}"
        f"{'recipes after warm-up':>23}{'sparse':>9}{'fallbacks':>11}{'drafts':>8}{'accepted':>10}{'preempted':>11}"
        "  phases, modes"
    ]
    for mix, counts in found.items():
        by_name = " ".join(f"{name} {number}" for name, number in sorted({**counts.phases, **counts.modes}.items()))
        lines.append(
            f"{mix:14}{counts.steps:>8}{counts.runs:>8}{counts.graphs:>8}{counts.buckets:>9}"
            f"{counts.warm_up_seconds:>11}{counts.milliseconds_per_step:>9}{counts.new_recipes:>23}"
            f"{counts.sparse:>9}{counts.fallbacks:>11}{counts.drafts:>8}{counts.accepted:>10}{counts.preempted:>11}"
            f"  {by_name}"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
