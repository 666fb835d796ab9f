"""Once the buckets are warm, no step of any trace mix compiles anything, and each has a bucket.

`python -m benchmarks.recompilation` runs 10,000 steps of each mix; this is the same with fewer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mix_server import Serving, serving
from benchmarks.recompilation import Counts, run
from vllm_gaudi_ucm.graphs.shapes.bucket import dominates
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES

pytestmark = pytest.mark.slow  # starts engines

STEPS, SPARSE_STEPS = 80, 60
GRAPHS = {"recipe_check": "fail", "warm_up": "full", "max_graphs": 14}
# a sparse method has twice as many phases
SPARSE_GRAPHS = {**GRAPHS, "max_graphs": 20}


def check(server: Serving, counts: Counts) -> None:
    """Nothing was compiled, every step ran in a bucket that was warm, and the steps asked for several."""
    assert server.runner.static is not None
    buckets = server.runner.static.execution.ready.buckets
    server.runner.parts.requests.check_integrity()
    assert counts.new_recipes == 0
    assert counts.graphs == buckets.num_graphs
    records = read_phase_log(server.phase_log)[1]
    assert len(records) == counts.runs >= counts.steps
    assert all(dominates(record.padded, record.bucket) for record in records)
    assert {record.padded.forward for record in records} <= set(buckets.forward)
    # traffic that asks for one bucket only would prove little
    assert counts.buckets >= 3
    assert len(counts.phases) >= 3


@pytest.mark.parametrize("mix", MIXES)
def test_steps_of_a_mix(mix: str, tmp_path: Path, in_process: None) -> None:
    """Whole steps, sampling of every kind included, over scattered blocks. covers: B1 B2 B3 B5"""
    with serving(mix, tmp_path, GRAPHS) as server:
        check(server, run(server, STEPS, seed=1))


@pytest.mark.parametrize(
    ("mix", "method", "drafts"), [("agentic", "GSA", 0), ("batch", "ESA", 0), ("chat", "KVStar", 3)]
)
def test_steps_with_a_sparse_method(mix: str, method: str, drafts: int, tmp_path: Path, in_process: None) -> None:
    """Choices of every mode, drafts that are accepted in part, and requests that lose their blocks.

    covers: B1 B3 C16 C20
    """
    with serving(mix, tmp_path, SPARSE_GRAPHS, method, drafts, scale=2) as server:
        counts = run(server, SPARSE_STEPS, seed=1)
        check(server, counts)
        worker = server.runner.parts.sparse
        assert worker is not None
        assert worker.state is not None
        worker.state.slots.check_integrity()
        worker.state.summaries.check_integrity()
    # all but short contexts, prompt chunks and what a request asked for
    assert counts.sparse >= SPARSE_STEPS
    assert counts.fallbacks == 0
    assert set(counts.modes) == {"GSA": {"SELECT", "REUSE"}, "ESA": {"SELECT"}}.get(
        method, {"SELECT", "REUSE", "CHECK"}
    )
    if drafts:
        assert 0 < counts.accepted < counts.drafts
