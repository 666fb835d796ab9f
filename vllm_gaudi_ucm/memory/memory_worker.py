"""Moves and copies a worker's blocks before a step, in the order that the scheduler intended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.kv_cache.pair import LayerCache, alike, distinct, in_blocks
from vllm_gaudi_ucm.memory.swap_space import SwapSpace
from vllm_gaudi_ucm.ops.kv_cache.api import copy_blocks
from vllm_gaudi_ucm.protocol.memory_orders import LinkSpeed, attach_link_speed, memory_orders_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.observability.room_metrics import MemoryMetrics
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput

MOST_TOGETHER = 16
"""The most blocks of one copy on a Gaudi: five recipes, and a temporary tensor of this many blocks of one layer."""

Follower = Callable[["NDArray[np.int64]", "NDArray[np.int64]"], None]
"""(sources, targets), int64 [n] each: records that block `sources[i]` is `targets[i]` from now on."""


class MemoryWorker:
    """Moves and copies blocks.

    Args:
        caches: caches by layer. A block spans all layers of its KV-cache group, whichever group that is.
        least: returns the smallest value of all workers; all call it at the same point.
        host_slots: number of slots for blocks of preempted requests; None: these are computed again.
        summaries: [blocks, ...] other data of each block, which moves with it.
        followers: called with moves because they know blocks by their ids.
    """

    def __init__(
        self,
        caches: Mapping[str, LayerCache],
        block_size: int,
        device: Device,
        metrics: MemoryMetrics,
        least: Callable[[int], int],
        host_slots: int | None = None,
        summaries: Sequence[torch.Tensor] = (),
        followers: Sequence[Follower] = (),
    ) -> None:
        tensors = [blocks for pair in distinct(caches.values()) for blocks in in_blocks(pair, block_size)]
        self._caches = alike(tensors)
        self._summaries = alike(summaries)
        self._followers = followers
        self._device = device
        self._metrics = metrics
        self._swaps: SwapSpace | None = None
        if host_slots is not None:
            self._swaps = SwapSpace(self._caches, device, host_slots)
        self._most = largest_size(tensors[0].shape[0]) if device.kind == "hpu" else None
        self._least = least
        self._unsaid: LinkSpeed | None = None
        self._work: Counter[str] = Counter()

    def begin_step(self, scheduler_output: SchedulerOutput) -> NDArray[np.int64]:
        """Carries out a step's orders before the request table knows the step, and before anything is loaded or
        computed.

        Returns int64 [n]: blocks that were filled without being computed here since the last step.
        """
        orders = memory_orders_of(scheduler_output)
        restored: list[int] = []
        for moves in () if orders is None else orders.moves:
            self._move(torch.tensor(moves, dtype=torch.int64))
            self._work["moved_blocks"] += len(moves)
        if orders is not None and self._swaps is not None:
            # blocks that leave are given to others in the same step
            self._swaps.store(orders.swap_outs)
            # before the copies: parts of blocks that come back may be copied for others at once
            self._swaps.load(orders.swap_ins)
            restored = [block for _, block in orders.swap_ins]
            self._work["swapped_out_blocks"] += len(orders.swap_outs)
            self._work["swapped_in_blocks"] += len(orders.swap_ins)
        copies = scheduler_output.kv_cache_block_copies
        if copies:
            # the copies refer to blocks after their moves
            self._copy(torch.tensor(copies, dtype=torch.int64), self._caches)
            self._work["copied_blocks"] += len(copies)
        if orders is not None:
            self._metrics.set(orders.totals, orders.rates)
        return np.array(restored, np.int64)

    def take_work(self) -> Mapping[str, int]:
        """Returns the blocks moved and copied since the last call, under their names in the record of a step."""
        work, self._work = self._work, Counter()
        return work

    def attach_report(self, output: ModelRunnerOutput) -> None:
        """Reports the measured speed to the scheduler after a step, once."""
        if self._unsaid is not None:
            attach_link_speed(output, self._unsaid)
            self._unsaid = None

    def warm_up(self, request_bytes: int = 0) -> None:
        """Copies between empty blocks, so that a Gaudi has compiled every size in time; measures copies to the host.

        request_bytes: see LinkSpeed.
        """
        for bit in range((self._most or 1).bit_length()):
            count = 1 << bit
            pairs = [(DUMMY_BLOCK + count + number, DUMMY_BLOCK + number) for number in range(count)]
            self._copy(torch.tensor(pairs), [*self._caches, *self._summaries])
        if self._swaps is not None:
            # one worker reports, and a request waits for the slowest of all
            self._unsaid = self._swaps.measure(request_bytes).slowest(self._least)

    def close(self) -> None:
        if self._swaps is not None:
            self._swaps.close()

    def _move(self, pairs: torch.Tensor) -> None:
        self._copy(pairs, [*self._caches, *self._summaries])
        sources, targets = pairs.numpy().T
        for moved in self._followers:
            moved(sources, targets)

    def _copy(self, pairs: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copies blocks. pairs: int64 [n, 2] (from, to). tensors: [blocks, ...], grouped by equal shape."""
        # on a Gaudi each number of blocks is a separate recipe
        parts = pairs.split(copy_sizes(len(pairs), self._most)) if self._most else [pairs]
        for part in parts:
            self._device.end_recipe()
            for together in tensors:
                copy_blocks(together, part[:, 0], part[:, 1])
            self._device.end_recipe()


def copy_sizes(count: int, most: int) -> list[int]:
    """Splits `count` into powers of two up to `most`, itself one, largest first: few copies and sizes, no padding."""
    sizes = [most] * (count // most)
    rest = count % most
    return sizes + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


def largest_size(num_blocks: int) -> int:
    """Returns the largest copy in a cache with that many blocks, whose sources and targets differ."""
    room = max(1, min(MOST_TOGETHER, num_blocks // 2))
    return 1 << (room.bit_length() - 1)
