"""A scenario in several processes, each a rank of one gloo group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.warm_process import WARM

Scenario = Callable[[int, int, dist.ProcessGroup], Any]
"""(rank, number of ranks, group) -> what the test compares."""


def _member(rank: int, size: int, store: str, scenario: Scenario, found: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    try:
        found[rank] = scenario(rank, size, group)
    finally:
        dist.destroy_process_group()


def on_ranks(scenario: Scenario, size: int, folder: Path) -> list[Any]:
    """What the scenario, a function of a module, has returned on each rank."""
    with WARM.Manager() as manager:
        found = manager.dict()
        arguments = (size, str(folder / "store"), scenario, found)
        mp.start_processes(_member, arguments, nprocs=size, start_method="forkserver")
        return [found[rank] for rank in range(size)]
