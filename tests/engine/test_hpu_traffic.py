"""Steps of every trace mix on the simulated card, in HPU graphs: once warm, the card compiles nothing more.

`test_no_recompilation.py` asks the same of the recipe recorder; here the device itself counts, by the keys of its graph
cache and by what accumulates outside of graphs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.engine.hpu_process import run_on_card
from vllm_gaudi_ucm.cli.trace_mix import MIXES

STEPS = 120
MAX_GRAPHS = 12


def drive(mixes: list[str], steps: int, max_graphs: int) -> dict[str, Any]:
    """Counts of each mix: an engine with its limits, warm, and then so many steps."""
    from benchmarks.recompilation import run, serving

    found = {}
    for mix in mixes:
        graphs = {"mode": "capture", "warm_up": "full", "max_graphs": max_graphs}
        with tempfile.TemporaryDirectory() as folder, serving(mix, Path(folder), graphs) as server:
            from habana_frameworks.torch.simulator import card

            warm = card.compilations, card.captures, card.bypasses
            replays = card.replays
            counts = run(mix, server, steps)
            found[mix] = {
                **counts._asdict(),
                "warm": warm,
                "served": (card.compilations, card.captures, card.bypasses),
                "replays": card.replays - replays,
            }
    return found


def test_every_mix(tmp_path: Path) -> None:
    """covers: B1 B2 B3 B5"""
    found = run_on_card(drive, tmp_path, mixes=list(MIXES), steps=STEPS, max_graphs=MAX_GRAPHS).result
    assert set(found) == set(MIXES)
    for mix, counts in found.items():
        assert counts["served"] == counts["warm"], mix
        assert counts["warm"][1] >= counts["graphs"] >= MAX_GRAPHS - 4, mix
        assert counts["runs"] >= STEPS, mix
        assert counts["replays"] >= counts["runs"], mix
        assert counts["buckets"] >= 3, mix
