"""Steps of trace mixes on the simulated card, in compile mode: once warm, nothing more is compiled.

`test_no_recompilation.py` asks the same of the recipe recorder; here dynamo's graphs are counted, and the recipes of
the device itself, by the keys of its cache: graph, sizes, strides, storage offsets and dtypes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.hpu_counts import broken_duties, remains
from tests.engine.hpu_process import run_on_card

# starts engines on the simulated card
pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """An engine with the limits of a mix, scaled, and so many steps. With selected blocks there are twice as many
    phases."""

    mix: str
    sparse: str = "none"
    drafts: int = 0
    scale: int = 1
    steps: int = 24
    max_graphs: int = 6


# of the mixes those that differ most, one of them dense: `test_no_recompilation.py` has the others
DENSE = Case("long-context")
SPARSE = Case("chat", "KVStar", 3, 2, steps=30, max_graphs=13)


def drive(cases: list[list[Any]]) -> list[dict[str, Any]]:
    """Counts of each case: an engine with its limits, warm, and then its steps."""
    from benchmarks.mix_server import serving
    from benchmarks.recompilation import run

    found = []
    for case in (Case(*given) for given in cases):
        graphs = {"mode": "auto", "warm_up": "full", "max_graphs": case.max_graphs}
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(case.mix, Path(folder), graphs, case.sparse, case.drafts, case.scale) as server,
        ):
            from habana_frameworks.torch.simulator import card

            warm = card.compilations, card.compiled_graphs, card.bypasses
            counts = run(server, case.steps)
            found.append(
                {
                    **counts._asdict(),
                    "warm": warm,
                    "served": (card.compilations, card.compiled_graphs, card.bypasses),
                    "broken": broken_duties(),
                    "remains": remains(),
                }
            )
    return found


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """All engines, one after the other."""
    cases = [DENSE, SPARSE]
    found = run_on_card(drive, tmp_path_factory.mktemp("traffic"), cases=cases).result
    return dict(zip(cases, found, strict=True))


def check(case: Case, counts: dict[str, Any]) -> None:
    assert counts["served"] == counts["warm"], case
    assert counts["broken"] == {}, case
    assert counts["remains"] == [], case
    assert counts["warm"][1] >= counts["graphs"] >= case.max_graphs - 4, case
    assert counts["runs"] >= case.steps, case
    assert counts["buckets"] >= 3, case


def test_dense_steps(driven: dict[Case, dict[str, Any]]) -> None:
    """covers: B1 B2 B3 B5"""
    check(DENSE, driven[DENSE])


def test_a_sparse_method_with_drafts(driven: dict[Case, dict[str, Any]]) -> None:
    """covers: B1 B3 C16. Choices are made and used again, and drafts verified, in graphs that were compiled before."""
    counts = driven[SPARSE]
    check(SPARSE, counts)
    assert counts["sparse"] >= SPARSE.steps / 2
    assert counts["drafts"] > counts["accepted"] > 0
