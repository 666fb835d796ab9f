"""The recipe cache on disk: a second process finds what the first one compiled. covers: B6"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

ON_HOST = True
SIM = Path(__file__).parents[1] / "sim_hpu"
CHILDREN = Path(__file__).parents[1] / "children"  # what every process of a test has

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


def run_program(config: str, *sizes: int) -> list[int]:
    """Hits, misses and captured graphs of a process that captures one graph for each size."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{SIM}:{CHILDREN}",
        "PT_HPU_LAZY_MODE": "1",
        "PT_HPU_ENABLE_CACHE_METRICS": "1",
        "SIM_HPU_TORCH_FORK": "1",
        "PT_HPU_RECIPE_CACHE_CONFIG": config,
    }
    command = [sys.executable, "-c", PROGRAM, *map(str, sizes)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


def test_a_second_start_hits(tmp_path: Path) -> None:
    config = f"{tmp_path / 'recipes'},false,1024"
    assert run_program(config, 1, 2, 2) == [0, 2, 2]
    assert run_program(config, 1, 2, 3) == [2, 1, 3]


def test_delete_on_exit(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    assert run_program(f"{folder},true,1024", 1) == [0, 1, 1]
    assert not folder.exists()
