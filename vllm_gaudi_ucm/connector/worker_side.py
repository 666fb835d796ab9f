"""The connector in the worker: the prefetch engine loads blocks, and the saver stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from vllm.platforms import current_platform

from vllm_gaudi_ucm.connector.block_saver import BlockSaver, SaveQueue
from vllm_gaudi_ucm.connector.metadata import BlockLoad, RecordSave, UcmMetadata, UcmWorkerMetadata
from vllm_gaudi_ucm.connector.waiting_prefetch import apply_plan
from vllm_gaudi_ucm.device import Device, get_device
from vllm_gaudi_ucm.device.step_activity import STEPS
from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.memory_mode.copies import CopyLoads
from vllm_gaudi_ucm.memory_mode.summary_records import SummaryRecords
from vllm_gaudi_ucm.memory_mode.worker_side import StoredCopies
from vllm_gaudi_ucm.observability.reporter import MetricsReporter
from vllm_gaudi_ucm.observability.room_metrics import PrefetchMetrics, StoreMetrics, TransferMetrics, TransferTotals
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine, PrefetchHandle
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority
from vllm_gaudi_ucm.store.base import KvStore

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.setup import ConnectorSetup
    from vllm_gaudi_ucm.kv_cache.pair import LayerCache
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import BlockSelection

logger = plugin_logger(__name__)
USE = "connector"


class LoadCounts(msgspec.Struct, kw_only=True):
    """Requests: with loads, timed out, ended while they waited. Blocks: loaded, failed."""

    requests: int = 0
    timeouts: int = 0
    cancelled: int = 0
    loaded_blocks: int = 0
    failed_blocks: int = 0


@dataclass
class _Load:
    """A request that waits for blocks. records: bytes of the loaded records by place; records come before the blocks.
    is_wanted: the request has not ended in the meantime.
    """

    handle: PrefetchHandle
    order: BlockLoad
    records: dict[int, bytearray]
    is_wanted: bool = True


class BlockLoads:
    """Loads of blocks in the worker. Each `take_` returns what is new since its last call.

    The order of a load lists the blocks that it writes, and those that get their summaries with it. It travels with the
    step's message, so all workers know the same about every block. No step reads such a block before the load is over
    on all workers; blocks that could not be loaded are computed by all of them.

    Args:
        engine: loads blocks; the caller stops it.
        deadline: seconds that a request waits.
        summaries: the target of records, None without KV offload.
    """

    def __init__(
        self, engine: PrefetchEngine, blocks: DeviceBlocks, deadline: float, summaries: SummaryRecords | None = None
    ) -> None:
        self._engine = engine
        self._blocks = blocks
        self._deadline = deadline
        self._loads: dict[str, _Load] = {}
        self._invalid: set[int] = set()
        self._ordered: set[int] = set()
        self._summarised: set[int] = set()
        self._failed: set[str] = set()
        self._late: list[str] = []
        self.counts = LoadCounts()
        self._summaries = summaries

    def __len__(self) -> int:
        return len(self._loads)

    def start(self, load: BlockLoad) -> None:
        """Starts a load and returns at once. Call it in the thread that computes, before steps with the blocks."""
        blocks, block_ids, first, fence = self._blocks, load.block_ids, len(load.records), self._blocks.fence()
        records: dict[int, bytearray] = {}

        def deliver(index: int, block: memoryview) -> None:
            if index < first:
                records[index] = bytearray(block)
            else:
                blocks.write(block_ids[index - first], block, fence)

        handle = self._engine.submit_prefetch(
            load.request_id,
            [*(record.key for record in load.records), *load.keys],
            # the scheduler has admitted it: only its blocks keep it from running
            PrefetchPriority.URGENT,
            deliver=deliver,
            deadline=self._deadline,
        )
        self.counts.requests += 1
        self._loads[load.request_id] = _Load(handle, load, records)
        self._ordered.update(block_ids)
        for record in load.records:
            self._summarised.update(block_id for block_id in record.block_ids if block_id)

    def finished(self, ended: set[str]) -> set[str]:
        """Returns requests whose load has ended: their blocks are written no more. Cancels loads of `ended` ones."""
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
        counts, outcome = self.counts, load.handle.outcome
        self._engine.forget(request_id)
        if not load.is_wanted:
            counts.cancelled += 1
            return
        counts.timeouts += outcome is PrefetchOutcome.TIMEOUT
        order, first = load.order, len(load.order.records)
        lost = {index - first for index in failed if index >= first}
        if failed:
            logger.debug("request %s: %d of %d blocks failed (%s)", request_id, len(lost), len(order.keys), outcome)
        if failed and order.is_partial:
            # the loaded blocks are given back with the rest
            counts.failed_blocks += len(lost)
            self._failed.add(request_id)
            if outcome is PrefetchOutcome.TIMEOUT:
                self._late.append(request_id)
            return
        counts.loaded_blocks += len(order.block_ids) - len(lost)
        counts.failed_blocks += len(lost)
        self._invalid |= {order.block_ids[index] for index in lost}
        self._take_records(load)

    def _take_records(self, load: _Load) -> None:
        for index, record in enumerate(load.order.records):
            assert self._summaries is not None, "the scheduler's side has the same options"
            self._summaries.write(load.records[index], record.rows, record.block_ids)

    def take_failed(self) -> set[str]:
        """Returns requests that have to start again."""
        failed, self._failed = self._failed, set()
        return failed

    def take_summarised(self) -> set[int]:
        """Returns the ordered blocks whose summaries come with them."""
        summarised, self._summarised = self._summarised, set()
        return summarised

    def take_invalid(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_ordered(self) -> set[int]:
        ordered, self._ordered = self._ordered, set()
        return ordered

    def take_late(self) -> list[str]:
        """Returns those of the failed requests whose time is up."""
        late, self._late = self._late, []
        return late

    def wait(self, seconds: float) -> None:
        """Returns when a load has ended, after the given time, or at once if no load is running."""
        self._engine.wait_for_any([load.handle for load in self._loads.values()], seconds)


class WorkerMetrics:
    """Reads totals of objects that keep their own counts, until `close`.

    metrics: of the worker. totals: of the connector's blocks.
    """

    def __init__(
        self,
        metrics: StepMetrics,
        store: KvStore,
        engine: PrefetchEngine,
        totals: Callable[[], TransferTotals],
    ) -> None:
        self._store, self._engine, self._totals = store, engine, totals
        self._store_series = StoreMetrics(metrics.file, store.stats().kind)
        self._engine_series = PrefetchMetrics(metrics.file, USE)
        self._transfer_series = TransferMetrics(metrics.file)
        self.lookups = (0, 0, 0, 0)
        """Totals that the scheduler's side last sent."""
        self._reporter = MetricsReporter(self._report)

    def _report(self) -> None:
        self._store_series.set(self._store.stats())
        self._engine_series.set(self._engine.stats())
        self._transfer_series.set(*self._totals())
        self._transfer_series.set_lookups(*self.lookups)

    def close(self) -> None:
        """Ends the metrics; call it before the counted objects are closed."""
        self._reporter.close()


class WorkerSide:
    """The worker's side, made once the cache is allocated, and with KV offload once blocks have summaries.

    Args:
        caches: by layer; they stay where they are until the end.
        selection: the selection of the method that chooses blocks, with KV offload: loads may then leave blocks in the
            store.
    """

    def __init__(
        self,
        setup: ConnectorSetup,
        caches: Mapping[str, LayerCache],
        selection: BlockSelection | None = None,
        method: BlockOptions | None = None,
    ) -> None:
        device, options = get_device(current_platform.device_type), setup.options
        self.blocks = blocks = DeviceBlocks({name: caches[name] for name in setup.layers}, setup.block_size, device)
        if blocks.block_bytes != setup.block_bytes:
            raise RuntimeError(
                f"UcmConnector: a block of the cache has {blocks.block_bytes} bytes, expected {setup.block_bytes}"
            )
        blocks.warm_up()
        self.store = setup.open_store()
        self.engine = PrefetchEngine(
            self.store,
            setup.block_bytes,
            setup.prefetch_options,
            allocate=blocks.allocate,
            enter_thread=device.enter_thread,
        )
        self.engine.start()
        self._summaries = None
        if selection is not None and method is not None:
            self._summaries = _summary_records(setup, blocks, device, selection, method)
        self.loads = BlockLoads(self.engine, blocks, options.load_deadline, self._summaries)
        waiting = SaveQueue(options.save_queue, options.patience(device.kind), STEPS)
        self.saver = BlockSaver(self.store, blocks, waiting, options.save_workers)
        self._saves = setup.worker_saves
        self._metrics: WorkerMetrics | None = None
        self._leaves_out_saves = self._is_closed = False

    def stored_copies(self) -> StoredCopies | None:
        """Returns the copies of blocks that loads have left in the store; None if none are left."""
        if self._summaries is None:
            return None
        return StoredCopies(CopyLoads(self.engine, self.blocks.block_bytes, self.blocks.allocate), self.blocks)

    def start_loads(self, metadata: UcmMetadata) -> None:
        """Starts loads before a step, even one without tokens."""
        if self._saves:
            self.saver.expect(len(metadata.saves) + len(metadata.records))
            if metadata.hurries_saves:
                self.saver.hurry()
        apply_plan(self.engine, metadata.prefetch)
        if self._metrics is not None:
            self._metrics.lookups = metadata.lookups
        for load in metadata.loads:
            self.loads.start(load)

    def save(self, metadata: UcmMetadata) -> None:
        """Saves blocks after a step: they are full now, and the next step may overwrite them."""
        if not self._saves:
            return
        for keys in metadata.used:
            self.saver.submit_use(keys)
        if self._leaves_out_saves:
            keys = [save.key for save in metadata.saves] + [record.key for record in metadata.records]
            for key in keys:
                self.saver.refuse(key)
            self._leaves_out_saves = False
            return
        if metadata.saves:
            self.saver.submit(metadata.saves)
        for record in metadata.records:
            self._save_record(record)

    def leave_out_saves(self) -> None:
        """Skips the saves of the running step, which reads blocks that were not loaded."""
        self._leaves_out_saves = True

    def _save_record(self, record: RecordSave) -> None:
        summaries, block_ids = self._summaries, record.block_ids
        if summaries is None or not summaries.are_ready(block_ids):
            # at static shapes, loaded blocks wait for theirs
            self.saver.refuse(record.key)
            return
        self.saver.submit_record(record.key, lambda buffer: summaries.read(block_ids, buffer))

    def report(self) -> UcmWorkerMetadata | None:
        unsaved, late = self.saver.take_unsaved(), self.loads.take_late()
        return UcmWorkerMetadata(unsaved, late) if unsaved or late else None

    def totals(self) -> TransferTotals:
        """Returns the blocks moved so far; may be called in any thread."""
        loads, saves = self.loads.counts, self.saver.counts()
        return TransferTotals(loads.loaded_blocks, loads.failed_blocks, saves.saved, saves.dropped + saves.refused)

    def report_to(self, metrics: StepMetrics) -> None:
        self._metrics = WorkerMetrics(metrics, self.store, self.engine, self.totals)

    def close(self) -> None:
        """Stores blocks in transit, and ends all threads; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._metrics is not None:
            self._metrics.close()
        self.saver.close()
        self.engine.stop()
        self.store.close()


def _summary_records(
    setup: ConnectorSetup, blocks: DeviceBlocks, device: Device, selection: BlockSelection, method: BlockOptions
) -> SummaryRecords | None:
    """Returns the records of summaries; None if every load is whole."""
    record_blocks, scorer = setup.summaries_per_record(method), selection.selector.scorer
    if not setup.loads_partly or not record_blocks or scorer is None:
        return None
    summaries = SummaryRecords(scorer, selection.state.summaries, record_blocks, device)
    # makes a device that compiles compile both directions now
    record = blocks.allocate(setup.block_bytes)
    summaries.read([], record)
    summaries.write(bytearray(record), [], [])
    return summaries
