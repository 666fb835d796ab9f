"""Steps of trace mixes on the simulated card, in compile mode: once warm, nothing more is compiled.

`test_no_recompilation.py` asks the same of the recipe recorder; here dynamo's graphs are counted, and the recipes of
the device itself, by the keys of its cache: graph, sizes, strides, storage offsets and dtypes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_counts import broken_duties, remains
from tests.engine.hpu_process import run_on_card

# starts engines on the simulated card
pytestmark = pytest.mark.slow

STEPS, SPARSE_STEPS = 24, 30
# with selected blocks there are twice as many phases
MAX_GRAPHS, MAX_SPARSE_GRAPHS = 8, 15
# mix, sparse method, drafts, scale; of the mixes those that differ most: `test_no_recompilation.py` has the others
DENSE = [[mix, "none", 0, 1] for mix in ("chat", "long-context")]
SPARSE = [["chat", "KVStar", 3, 2]]


def drive(cases: list[list[Any]], steps: int, max_graphs: int) -> dict[str, Any]:
    """Counts of each case (mix, sparse method, drafts, scale): an engine with its limits, warm, and then so many
    steps."""
    from benchmarks.mix_server import serving
    from benchmarks.recompilation import run

    found = {}
    for mix, sparse, drafts, scale in cases:
        graphs = {"mode": "auto", "warm_up": "full", "max_graphs": max_graphs}
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(mix, Path(folder), graphs, sparse, drafts, scale) as server,
        ):
            from habana_frameworks.torch.simulator import card

            warm = card.compilations, card.compiled_graphs, card.bypasses
            counts = run(server, steps)
            found[f"{mix} {sparse}"] = {
                **counts._asdict(),
                "warm": warm,
                "served": (card.compilations, card.compiled_graphs, card.bypasses),
                "broken": broken_duties(),
                "remains": remains(),
            }
    return found


def check(name: str, counts: dict[str, Any], steps: int, max_graphs: int) -> None:
    assert counts["served"] == counts["warm"], name
    assert counts["broken"] == {}, name
    assert counts["remains"] == [], name
    assert counts["warm"][1] >= counts["graphs"] >= max_graphs - 4, name
    assert counts["runs"] >= steps, name
    assert counts["buckets"] >= 3, name


def test_mixes(tmp_path: Path) -> None:
    """covers: B1 B2 B3 B5"""
    found = run_on_card(drive, tmp_path, cases=DENSE, steps=STEPS, max_graphs=MAX_GRAPHS).result
    assert len(found) == len(DENSE)
    for name, counts in found.items():
        check(name, counts, STEPS, MAX_GRAPHS)


def test_a_sparse_method_with_drafts(tmp_path: Path) -> None:
    """covers: B1 B3 C16. Choices are made and used again, and drafts verified, in graphs that were compiled before."""
    found = run_on_card(drive, tmp_path, cases=SPARSE, steps=SPARSE_STEPS, max_graphs=MAX_SPARSE_GRAPHS).result
    assert len(found) == len(SPARSE)
    for name, counts in found.items():
        check(name, counts, SPARSE_STEPS, MAX_SPARSE_GRAPHS)
        assert counts["sparse"] >= SPARSE_STEPS / 2, name
    assert found["chat KVStar"]["drafts"] > found["chat KVStar"]["accepted"] > 0
