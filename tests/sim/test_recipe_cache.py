"""The recipe cache on disk: a second process finds what the first one compiled. covers: B6"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ON_HOST = True
SIM = Path(__file__).parents[1] / "sim_hpu"

PROGRAM = """
import sys
import torch
import habana_frameworks.torch as ht
from habana_frameworks.torch.hpu.metrics import metric_localcontext
from habana_frameworks.torch.simulator import card
with metric_localcontext("recipe_cache") as cache:
    run = ht.hpu.wrap_in_hpu_graph(lambda x: x * 2)
    for size in map(int, sys.argv[1:]):
        run(torch.empty(size, device="hpu"))
print(dict(cache.stats()), card.captures)
"""


def run_program(config: str, *sizes: int) -> str:
    env = {**os.environ, "PYTHONPATH": str(SIM), "PT_HPU_RECIPE_CACHE_CONFIG": config}
    command = [sys.executable, "-c", PROGRAM, *map(str, sizes)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    return done.stdout.strip() if done.returncode == 0 else done.stderr


def test_a_second_start_hits(tmp_path: Path) -> None:
    config = f"{tmp_path / 'recipes'},false,1024"
    assert run_program(config, 1, 2, 2) == "{'TotalHit': 0, 'TotalMiss': 2} 2"
    assert run_program(config, 1, 2, 3) == "{'TotalHit': 2, 'TotalMiss': 1} 3"


def test_delete_on_exit(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    assert run_program(f"{folder},true,1024", 1).startswith("{'TotalHit': 0, 'TotalMiss': 1}")
    assert not folder.exists()
