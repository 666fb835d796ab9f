"""Collectives between two cards, each driven by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

ON_HOST = True
SIM = Path(__file__).parents[1] / "sim_hpu"

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
dist.all_gather_into_tensor(whole, x)
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
    env = {**os.environ, "PYTHONPATH": str(SIM), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=env, text=True, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
