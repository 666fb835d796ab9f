"""Once the buckets are warm, no step of any trace mix compiles anything, and each has a bucket.

`python -m benchmarks.recompilation` runs 10,000 steps of each mix; this is the same with fewer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recompilation import run, serving
from vllm_gaudi_ucm.cli.trace_mix import MIXES
from vllm_gaudi_ucm.graphs.bucket import dominates
from vllm_gaudi_ucm.phase_log import read_phase_log

STEPS = 300
GRAPHS = {"recipe_check": "fail", "warm_up": "full", "max_graphs": 20}


@pytest.mark.parametrize("mix", MIXES)
def test_steps_of_a_mix(mix: str, tmp_path: Path, in_process: None) -> None:
    """Whole steps, sampling of every kind included, over scattered blocks. covers: B1 B2 B3 B5"""
    with serving(mix, tmp_path, GRAPHS) as server:
        counts = run(mix, server, STEPS, seed=1)
        assert server.runner.static is not None
        buckets = server.runner.static.execution.ready.buckets
        server.runner.requests.check_integrity()
    assert counts.new_recipes == 0
    assert counts.graphs == buckets.num_graphs
    records = read_phase_log(server.phase_log)[1]
    assert len(records) == counts.runs >= STEPS
    assert all(dominates(record.padded, record.bucket) for record in records)
    assert {record.padded.forward for record in records} <= set(buckets.forward)
    # traffic that asks for one bucket only would prove little
    assert counts.buckets >= 3
    assert len(counts.phases) >= 3
