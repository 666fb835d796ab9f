"""What a worker does with blocks before a step, in the order in which the scheduler meant it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.kv_cache.pair import in_blocks
from vllm_gaudi_ucm.ops.kv_cache.api import copy_blocks
from vllm_gaudi_ucm.protocol.memory_orders import memory_orders_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.kv_cache.pair import KvPair
    from vllm_gaudi_ucm.observability.room_metrics import MemoryMetrics
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class MemoryWorker:
    """Carries out copies of blocks.

    Args:
        caches: by layer.
        block_size: tokens per block.
        device: where the caches are.
        metrics: where the scheduler's figures go.
    """

    def __init__(self, caches: Mapping[str, KvPair], block_size: int, device: Device, metrics: MemoryMetrics) -> None:
        tensors = [blocks for pair in caches.values() for blocks in in_blocks(pair, block_size)]
        # what has one shape is copied together; a draft model's layers have another one
        self._runs = [list(run) for _, run in groupby(tensors, key=lambda blocks: (blocks.shape[1:], blocks.dtype))]
        self._device = device
        self._metrics = metrics

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Before the request table knows the step, and before anything is loaded or computed."""
        copies = scheduler_output.kv_cache_block_copies
        if copies:
            self._copy(torch.tensor(copies, dtype=torch.int64))
        orders = memory_orders_of(scheduler_output)
        if orders is not None:
            self._metrics.set(orders.totals)

    def warm_up(self) -> None:
        """Copies to the dummy block, so that a Gaudi has compiled a copy before a request waits."""
        self._copy(torch.tensor([[DUMMY_BLOCK + 1, DUMMY_BLOCK]]))

    def _copy(self, pairs: torch.Tensor) -> None:
        """pairs: int64 [n, 2] (from, to)."""
        # on a Gaudi each number of blocks would be a recipe of its own
        parts = pairs.split(1) if self._device.kind == "hpu" else [pairs]
        for part in parts:
            self._device.end_recipe()
            for run in self._runs:
                copy_blocks(run, part[:, 0], part[:, 1])
            self._device.end_recipe()
