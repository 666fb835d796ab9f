"""Engines that share out a model's experts: their forwards run in step, with shapes that all have agreed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn import functional

from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.vllm_api.distributed import GroupCoordinator, get_dp_group


class Lockstep:
    """The workers of the same rank in all engines.

    A layer's experts get the rows of all engines, so each forward is a collective: an engine computes one of its own,
    or takes part in another engine's. In each step, vLLM makes every engine compute its scheduled requests, or a step
    without requests (`execute_dummy_batch`). A step may be several forwards, and their number may differ between
    engines.

    Args:
        engines: vLLM's group.
        workers: all workers of all engines, which have the same blocks and warm the same graphs.
    """

    def __init__(self, engines: GroupCoordinator, workers: Ranks) -> None:
        self._engines = engines
        self.workers = workers
        self._forwards = 0
        self._goes_on = False

    @classmethod
    def of_engine(cls) -> Lockstep | None:
        """Returns the lockstep of vLLM's data-parallel group, once it exists; None for engines that are independent."""
        group = get_dp_group()
        return None if group.world_size == 1 else cls(group, Ranks.of_world())

    @property
    def size(self) -> int:
        return self._engines.world_size

    def begin(self, forwards: int) -> None:
        """A step of this many forwards here; 0 without requests."""
        self._forwards = forwards

    def agree(self, sizes: Sequence[int]) -> list[int]:
        """Before each forward: at each place the largest of all engines, which have as many sizes.

        A collective on the host, outside of graphs.
        """
        self._forwards = max(self._forwards - 1, 0)
        agreed = torch.tensor([*sizes, self._forwards], dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._engines.cpu_group)
        *found, more = agreed.tolist()
        self._goes_on = more > 0
        return found

    def finish(self, follow: Callable[[], None]) -> None:
        """After this engine's forwards of a step, while another one has more: `follow` takes part in one, and agrees on
        it first."""
        while self._goes_on:
            follow()

    def padded_rows(self, own: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns bool [engines * rows]: True for pads among the rows of all engines, which experts get one engine
        after the other.

        own: bool, at most `rows`, of this engine. The call may be part of a graph.
        """
        filled = functional.pad(own.to(torch.int32), (0, rows - len(own)), value=1)
        return self._engines.all_gather(filled, 0) != 0
