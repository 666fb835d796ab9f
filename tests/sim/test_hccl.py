"""Collectives between two cards, each driven by a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.two_ranks import on_two_ranks

pytestmark = pytest.mark.slow  # starts processes

ON_HOST = True

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import habana_frameworks.torch as ht
from habana_frameworks.torch.simulator import card
rank = int(sys.argv[1])
dist.init_process_group("hccl", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
x = torch.arange(3, device="hpu") + 10 * rank
summed, most = x.clone(), x.clone()
dist.all_reduce(summed)
dist.all_reduce(most, op=dist.ReduceOp.MAX)
assert summed.tolist() == [10, 12, 14], summed
assert most.tolist() == [10, 11, 12], most
parts = [torch.empty_like(x) for _ in range(2)]
dist.all_gather(parts, x)
assert [part.tolist() for part in parts] == [[0, 1, 2], [10, 11, 12]], parts
whole = torch.empty(6, dtype=x.dtype, device="hpu")
(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(whole, x)
assert whole.tolist() == [0, 1, 2, 10, 11, 12], whole
dist.broadcast(x, src=1)
assert x.tolist() == [10, 11, 12], x
for rows in (1, 2):
    handed = torch.full((rows, 4), float(rows), device="hpu") if rank == 0 else torch.zeros(rows, 4, device="hpu")
    made = card.compilations
    if rank == 0:
        dist.isend(handed, 1).wait()
    else:
        dist.recv(handed, 0)
    assert card.compilations == made, "a call of HCCL, whatever the shape"
    assert handed.tolist() == [[rows] * 4] * rows, handed
for tensor in (summed, most, *parts, whole, x):
    assert tensor.device == torch.device("hpu", 0)
dist.destroy_process_group()
"""


def test_two_cards(tmp_path: Path) -> None:
    """Sum, maximum, gathering, broadcast, and what one hands to the other; what comes back is on the card."""
    on_two_ranks(PROGRAM, tmp_path)
