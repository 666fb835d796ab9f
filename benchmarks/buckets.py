"""Shapes: the time of one lookup, and padded over true cost of every strategy on every mix. Costs are modelled."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from vllm_gaudi_ucm.graphs.cost.specs import DEVICES, LLAMA_8B
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, dominates
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm_tools.buckets.certificate import certify
from vllm_gaudi_ucm_tools.buckets.tune import TuneReport
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES, Simulation
from vllm_gaudi_ucm_tools.tuning.objective import Objective
from vllm_gaudi_ucm_tools.tuning.tune import DEFAULT_MARGIN, tune

REPEATS = 7


def main() -> None:
    """Measure and print one line for each mix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--max-graphs", type=int, default=64)
    parser.add_argument("--device", choices=DEVICES, default="gaudi2")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(mix, args.steps, args.max_graphs, args.device) for mix in MIXES]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


def measure(mix: str, count: int, max_graphs: int, device: str) -> dict[str, Any]:
    """Tunes on the first `count` steps of a mix, and measures on them and on as many after them."""
    cost = CostModel(DEVICES[device], LLAMA_8B, MIXES[mix].limits.block_size)
    simulation = Simulation(MIXES[mix], cost, seed=0)
    first, after = ([record.bucket for record in simulation.steps(count)] for _ in range(2))
    start = time.perf_counter()
    report = tuned(mix, Steps.from_buckets(first), cost, max_graphs, DEFAULT_MARGIN, Steps.from_buckets(after))
    seconds = time.perf_counter() - start
    exact = tuned(mix, Steps.from_buckets(first), cost, max_graphs, 0.0, None)
    later = report.later_padding
    ours, scan = lookup_times(report.buckets, after)
    return {
        "mix": mix,
        "graphs": report.buckets.num_graphs,
        "tuned": round(report.padding.ratio, 4),
        "gap": round(report.certified.gap, 4),
        "later_steps": later and round(later.ratio, 4),
        "no_margin": round(exact.padding.ratio, 4),
        "no_margin_bound": round(exact.bound_ratio, 4),
        "no_margin_gap": round(exact.certified.gap, 4),
        **{name: round(padding.ratio, 2) for name, padding in report.others.items()},
        "tune_s": round(seconds, 1),
        "lookup_us": round(ours, 2),
        "scan_us": round(scan, 2),
    }


def tuned(mix: str, steps: Steps, cost: CostModel, max_graphs: int, margin: float, later: Steps | None) -> TuneReport:
    """Tunes like `gaudi-ucm tune`."""
    limits = MIXES[mix].limits
    buckets = tune(steps, limits, cost, max_graphs, margin)
    certified = certify(Objective.of(steps, limits, cost, margin), buckets, max_graphs)
    return TuneReport(certified, steps, max_graphs, margin, later)


def lookup_times(buckets: BucketSet, steps: list[Bucket]) -> tuple[float, float]:
    """Microseconds of one lookup, and of a scan through the buckets in ascending cost; medians, interleaved."""
    listed = [shape.step(buckets.logits[-1]) for shape in buckets.forward]
    ours, scans = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for step in steps:
            buckets.lookup(step)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        for step in steps[:500]:
            next(bucket for bucket in listed if dominates(bucket, step))
        scans.append((time.perf_counter() - start) * len(steps) / 500)
    return 1e6 * statistics.median(ours) / len(steps), 1e6 * statistics.median(scans) / len(steps)


if __name__ == "__main__":
    main()
