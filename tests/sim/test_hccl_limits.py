"""Collectives of two ranks: what HCCL lacks, what it does the long way round, and ranks that do not agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.two_ranks import on_two_ranks

pytestmark = pytest.mark.slow  # starts processes
ON_HOST = True

START = """
import sys
import torch
import torch.distributed as dist
import habana_frameworks.torch as ht
from habana_frameworks.torch.simulator import HpuConstraintError, begin_step, card, duties
rank = int(sys.argv[1])
dist.init_process_group("hccl", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

def refused(words, call):
    try:
        call()
    except HpuConstraintError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")
"""

LIMITS = """
x = torch.full((4,), rank + 1.0, device="hpu")
same = x
dist.all_reduce(x)
assert same is x and x.tolist() == [3] * 4, "in place"
synchronizations = card.synchronizations
bf16 = torch.full((2,), rank + 1.0, dtype=torch.bfloat16, device="hpu")
dist.all_reduce(bf16, op=dist.ReduceOp.MAX)
assert bf16.tolist() == [2, 2] and card.synchronizations == synchronizations

large = torch.tensor([2 ** 24 + 1, 7], dtype=torch.int32, device="hpu") * (1 - rank)
dist.all_reduce(large)
assert large.tolist() == [2 ** 24, 7], "rounded to float32"
assert card.synchronizations == synchronizations + 1
half = torch.full((3,), 0.1, dtype=torch.float16, device="hpu")
dist.all_reduce(half)
assert half.dtype == torch.float16 and card.synchronizations == synchronizations + 2
eight = torch.full((2,), 200.0, device="hpu").to(torch.float8_e4m3fn)
dist.all_reduce(eight)
assert eight.dtype == torch.float8_e4m3fn and card.synchronizations == synchronizations + 3

gathered = torch.zeros(4, dtype=torch.float8_e4m3fn, device="hpu")
own = torch.full((2,), rank + 1.0, device="hpu").to(torch.float8_e4m3fn)
(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(gathered, own)
assert gathered.float().tolist() == [1, 1, 2, 2], "moved as bytes"

assert duties.count(36) == 0
odd = torch.ones(3, dtype=torch.uint8, device="hpu")
dist.broadcast(odd, src=0)
assert duties.count(36) == 1, "odd one-byte payloads are counted"

refused("reduction", lambda: dist.all_reduce(x, op=dist.ReduceOp.PRODUCT))
refused("HCCL has no such collective", lambda: dist.gather(x, [x.clone(), x.clone()] if rank == 0 else None))
refused("HCCL has no such collective", lambda: dist.scatter(x, [x.clone(), x.clone()] if rank == 0 else None))

host = torch.tensor([2 ** 24 + 1 - rank])
cpu = dist.new_group(backend="gloo")
dist.all_reduce(host, op=dist.ReduceOp.PRODUCT, group=cpu)
assert host.item() == (2 ** 24 + 1) * 2 ** 24, "the host's own group has no such limits"

def layer(y):
    y = y * 2
    dist.all_reduce(y)
    return y + 1

compiled = torch.compile(layer, backend="hpu_backend", dynamic=False)
assert compiled(torch.ones(2, device="hpu")).tolist() == [5, 5]
assert compiled(torch.ones(2, dtype=torch.int32, device="hpu")).tolist() == [5, 5]
dist.destroy_process_group()
"""

AGREEMENT = """
x = torch.ones(4, device="hpu")
begin_step(("decode", 8, 128))
dist.all_reduce(x)
begin_step(("decode", 8, 128 * (rank + 1)))
refused("rank 1: step ('decode', 8, 256), allreduce_", lambda: dist.all_reduce(x))
with duties.without(37):
    dist.all_reduce(x)
begin_step(None)
refused("(5,)", lambda: dist.all_reduce(torch.ones(4 + rank, device="hpu")))
refused("broadcast_", lambda: dist.broadcast(x, src=0) if rank else dist.all_reduce(x))
refused("torch.bfloat16", lambda: dist.all_reduce(x.to(torch.bfloat16) if rank else x))
dist.all_reduce(x)
assert x.tolist() == [8] * 4, x
dist.destroy_process_group()
"""


def test_limits_of_hccl(tmp_path: Path) -> None:
    """36"""
    on_two_ranks(START + LIMITS, tmp_path)


def test_ranks_must_agree(tmp_path: Path) -> None:
    """37: every rank raises where real ones would hang."""
    on_two_ranks(START + AGREEMENT, tmp_path)
