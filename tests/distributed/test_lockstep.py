"""Engines that share out experts agree on the sizes of each forward, and follow those that have more of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from tests.distributed.processes import on_ranks
from vllm_gaudi_ucm.distributed.lockstep import Lockstep
from vllm_gaudi_ucm.distributed.ranks import ALONE
from vllm_gaudi_ucm.execution.agreed_bucket import agreed_bucket
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, dominates
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES

STEPS = (Bucket("c-u", 40, 0, 3, 2), Bucket("-su", 6, 9, 2, 6))
HELD = Bucket("csu", 40, 9, 3, 0, 0, ALL_TILES)


@dataclass
class Group:
    """As much of vLLM's as is used."""

    world_size: int
    cpu_group: dist.ProcessGroup

    def all_gather(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        found = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(found, input_, group=self.cpu_group)
        return torch.cat(found, dim)


def scenario(rank: int, size: int, group: dist.ProcessGroup) -> dict[str, Any]:
    engines = Lockstep(cast(Any, Group(size, group)), ALONE)
    found: dict[str, Any] = {"forwards": []}

    # a step of no forward here and of three there
    def forward() -> None:
        found["forwards"].append(engines.agree([10 * rank, 5 - rank]))

    engines.begin(3 * rank)
    for _ in range(max(1, 3 * rank)):
        forward()
    engines.finish(forward)
    engines.begin(1)
    found["bucket"] = agreed_bucket(engines, STEPS[rank])
    engines.begin(rank)
    found["one"] = agreed_bucket(engines, STEPS[1]) if rank else agreed_bucket(engines)
    engines.begin(0)
    found["none"] = agreed_bucket(engines)
    found["padded"] = engines.padded_rows(torch.tensor([False, True][: rank + 1]), 3).tolist()
    return found


def test_agreements(tmp_path: Path) -> None:
    """covers: A18"""
    for rank, found in enumerate(on_ranks(scenario, 2, tmp_path)):
        assert found["forwards"] == [[10, 5]] * 3
        held = found["bucket"]
        assert held.forward == found["bucket"]._replace(logits=0).forward
        assert held.phase == HELD.phase
        assert held[1:4] == HELD[1:4]
        assert all(dominates(held._replace(logits=6, max_prompt_tiles=ALL_TILES), step) for step in STEPS)
        # a graph of logits is each engine's own
        assert held.logits == STEPS[rank].logits
        assert found["one"].forward == STEPS[1].forward
        assert found["none"].query_len == 0
        assert found["padded"] == [False, True, True, False, True, True]
