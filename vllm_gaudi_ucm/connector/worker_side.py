"""The connector in the worker: blocks come by the prefetch engine, and leave by the saver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from vllm.platforms import current_platform

from vllm_gaudi_ucm.connector.block_saver import BlockSaver
from vllm_gaudi_ucm.connector.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.connector.metadata import BlockLoad, UcmMetadata, UcmWorkerMetadata
from vllm_gaudi_ucm.connector.transfer_totals import TransferTotals
from vllm_gaudi_ucm.connector.waiting_prefetch import apply_plan
from vllm_gaudi_ucm.connector.worker_metrics import WorkerMetrics
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.prefetch.handle import PrefetchHandle
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome
from vllm_gaudi_ucm.prefetch.priority import PrefetchPriority

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.setup import ConnectorSetup
    from vllm_gaudi_ucm.metrics.step_metrics import StepMetrics

logger = plugin_logger(__name__)


class LoadCounts(msgspec.Struct, kw_only=True):
    """Requests: those that got blocks, some of them or all late, ended while they waited. Blocks: loaded, failed."""

    requests: int = 0
    timeouts: int = 0
    cancelled: int = 0
    loaded_blocks: int = 0
    failed_blocks: int = 0


@dataclass
class _Load:
    """A request that waits for blocks. is_wanted: it has not ended meanwhile."""

    handle: PrefetchHandle
    block_ids: list[int]
    is_wanted: bool = True


class WorkerSide:
    """Made before the cache is allocated; works from `register_kv_caches` on."""

    def __init__(self, setup: ConnectorSetup) -> None:
        self._setup = setup
        self._loads: dict[str, _Load] = {}
        self._invalid: set[int] = set()
        self._written: set[int] = set()
        self.load_counts = LoadCounts()
        self.blocks: DeviceBlocks | None = None
        self._metrics: WorkerMetrics | None = None

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """caches: by layer [blocks, kv heads, block size, k | v]."""
        setup, device = self._setup, get_device(current_platform.device_type)
        self.blocks = DeviceBlocks({name: caches[name] for name in setup.layers}, device)
        if self.blocks.block_bytes != setup.block_bytes:
            raise RuntimeError(
                f"UcmConnector: a block of the cache has {self.blocks.block_bytes} bytes, expected {setup.block_bytes}"
            )
        self.blocks.warm_up()
        self.store = setup.open_store()
        options = setup.options
        self.engine = PrefetchEngine(
            self.store,
            setup.block_bytes,
            setup.prefetch_options,
            allocate=self.blocks.allocate,
            enter_thread=device.enter_thread,
        )
        self.engine.start()
        self.saver = BlockSaver(self.store, self.blocks, options.save_queue, options.save_workers)

    def start_loads(self, metadata: UcmMetadata) -> None:
        apply_plan(self.engine, metadata.prefetch)
        if self._metrics is not None:
            self._metrics.lookups = metadata.lookups
        for load in metadata.loads:
            self._start(load)

    def _start(self, load: BlockLoad) -> None:
        blocks, block_ids = self.blocks, load.block_ids
        assert blocks is not None, "the cache is registered before the first step"
        handle = self.engine.submit_prefetch(
            load.request_id,
            load.keys,
            # the scheduler has admitted it: nothing but its blocks keeps it from running
            PrefetchPriority.URGENT,
            deliver=lambda index, block: blocks.write(block_ids[index], block),
            deadline=self._setup.options.load_deadline,
        )
        self.load_counts.requests += 1
        self._loads[load.request_id] = _Load(handle, block_ids)

    def save(self, metadata: UcmMetadata) -> None:
        """After the step: the blocks are full now, and may be written by the next one."""
        if metadata.saves:
            self.saver.submit(metadata.saves)

    def finished_loads(self, ended: set[str]) -> set[str]:
        """Requests into whose blocks nothing is or will be written any more; nobody waits for `ended` ones."""
        for request_id in ended:
            load = self._loads.get(request_id)
            if load is not None:
                load.is_wanted = False
                load.handle.cancel()
        finished = {request_id for request_id, load in self._loads.items() if load.handle.outcome is not None}
        for request_id in finished:
            self._finish(request_id, self._loads.pop(request_id))
        return finished

    def _finish(self, request_id: str, load: _Load) -> None:
        failed = load.handle.failed
        counts, outcome = self.load_counts, load.handle.outcome
        self.engine.forget(request_id)
        if not load.is_wanted:
            # its blocks are freed now: they must not be taken for blocks of whoever gets them next
            counts.cancelled += 1
            return
        counts.timeouts += outcome is PrefetchOutcome.TIMEOUT
        counts.loaded_blocks += len(load.block_ids) - len(failed)
        counts.failed_blocks += len(failed)
        self._invalid |= {load.block_ids[index] for index in failed}
        self._written |= {block_id for index, block_id in enumerate(load.block_ids) if index not in failed}
        if failed:
            logger.debug(
                "request %s: %d of %d blocks failed (%s)", request_id, len(failed), len(load.block_ids), outcome
            )

    def take_invalid(self) -> set[int]:
        """Blocks that could not be loaded, once."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_loaded(self) -> set[int]:
        """Blocks that were loaded since the last call."""
        written, self._written = self._written, set()
        return written

    def report(self) -> UcmWorkerMetadata | None:
        unsaved = self.saver.take_unsaved()
        return UcmWorkerMetadata(unsaved) if unsaved else None

    def wait_for_load(self, seconds: float) -> None:
        """Returns when a load has ended, when so much time has passed, or at once where nothing is loaded."""
        self.engine.wait_for_any([load.handle for load in self._loads.values()], seconds)

    def totals(self) -> TransferTotals:
        """Blocks that were moved so far; may be called in any thread."""
        loads, saves = self.load_counts, self.saver.counts()
        return TransferTotals(loads.loaded_blocks, loads.failed_blocks, saves.saved, saves.dropped + saves.refused)

    def report_to(self, metrics: StepMetrics) -> None:
        """Figures reach /metrics from now on."""
        self._metrics = WorkerMetrics(metrics, self.store, self.engine, self.totals)

    @property
    def num_loading(self) -> int:
        """Requests that wait for blocks."""
        return len(self._loads)

    def close(self) -> None:
        """Stores what is on its way, and ends all threads; a second call does nothing."""
        if self.blocks is None:
            return
        self.blocks = None
        if self._metrics is not None:
            self._metrics.close()
        self.saver.close()
        self.engine.stop()
        self.store.close()
