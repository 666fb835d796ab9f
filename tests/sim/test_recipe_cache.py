"""The recipe cache on disk: a second process finds what the first one compiled. covers: B6"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sim.forks import Program, in_forks

pytestmark = pytest.mark.slow  # starts processes

ON_HOST = True

PROGRAM = """
import json
import sys
import torch
import habana_frameworks.torch as ht
from habana_frameworks.torch.hpu.metrics import metric_localcontext
from habana_frameworks.torch.simulator import card
with metric_localcontext("recipe_cache") as cache:
    run = ht.hpu.wrap_in_hpu_graph(lambda x: x * 2)
    for size in map(int, sys.argv[1:]):
        run(torch.empty(size, device="hpu"))
stats = dict(cache.stats())
print(json.dumps([stats["TotalHit"], stats["TotalMiss"], card.captures]))
"""


STARTED_WITH = {"PT_HPU_LAZY_MODE": "1", "PT_HPU_ENABLE_CACHE_METRICS": "1", "SIM_HPU_TORCH_FORK": "1"}


def test_recipes_on_disk(tmp_path: Path) -> None:
    """Hits, misses and captured graphs of processes that capture one graph for each size: the second start hits."""
    kept, deleted = tmp_path / "kept", tmp_path / "deleted"
    programs = {
        name: Program(PROGRAM, {"PT_HPU_RECIPE_CACHE_CONFIG": config}, tuple(sizes))
        for name, config, sizes in (
            ("first", f"{kept},false,1024", "122"),
            ("second", f"{kept},false,1024", "123"),
            ("deletes on exit", f"{deleted},true,1024", "1"),
        )
    }
    assert in_forks(programs, {**os.environ, **STARTED_WITH}) == {
        "first": ["[0, 2, 2]", "done"],
        "second": ["[2, 1, 3]", "done"],
        "deletes on exit": ["[0, 1, 1]", "done"],
    }
    assert kept.exists()
    assert not deleted.exists()
