"""The connector in the worker: blocks come by the prefetch engine, and leave by the saver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform

from vllm_gaudi_ucm.connector.block_loads import BlockLoads, LoadCounts
from vllm_gaudi_ucm.connector.block_saver import BlockSaver, SaveQueue
from vllm_gaudi_ucm.connector.metadata import RecordSave, UcmMetadata, UcmWorkerMetadata
from vllm_gaudi_ucm.connector.waiting_prefetch import apply_plan
from vllm_gaudi_ucm.device import Device, get_device
from vllm_gaudi_ucm.device.step_activity import StepActivity
from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
from vllm_gaudi_ucm.kv_offload.copies import CopyLoads
from vllm_gaudi_ucm.kv_offload.summary_records import SummaryRecords
from vllm_gaudi_ucm.kv_offload.worker_side import StoredCopies
from vllm_gaudi_ucm.observability.reporter import MetricsReporter
from vllm_gaudi_ucm.observability.room_metrics import TransferTotals
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
from vllm_gaudi_ucm.store.base import KvStore

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.setup import ConnectorSetup
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import BlockSelection

USE = "connector"


class WorkerMetrics:
    """Reads totals of objects that count by themselves, until `close`.

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
        self._store_series = metrics.store(store.stats().kind)
        self._engine_series = metrics.prefetch(USE)
        self._transfer_series = metrics.transfer()
        self.lookups = (0, 0, 0, 0)
        """As the scheduler's side last told them."""
        self._reporter = MetricsReporter(self._report)

    def _report(self) -> None:
        self._store_series.set(self._store.stats())
        self._engine_series.set(self._engine.stats())
        self._transfer_series.set(*self._totals())
        self._transfer_series.set_lookups(*self.lookups)

    def close(self) -> None:
        """To be called before what is counted is closed."""
        self._reporter.close()


class WorkerSide:
    """Made once the cache is allocated, and with KV offload once blocks have summaries.

    Args:
        setup: of the engine.
        caches: by layer [blocks, kv heads, block size, k | v]; they stay where they are until the end.
        selection: of the method that chooses blocks, with KV offload: then loads may leave blocks in the store.
        method: the method's options.
    """

    def __init__(
        self,
        setup: ConnectorSetup,
        caches: Mapping[str, torch.Tensor],
        selection: BlockSelection | None = None,
        method: BlockOptions | None = None,
    ) -> None:
        device, options = get_device(current_platform.device_type), setup.options
        self.blocks = blocks = DeviceBlocks({name: caches[name] for name in setup.layers}, device)
        if blocks.block_bytes != setup.block_bytes:
            raise RuntimeError(
                f"UcmConnector: a block of the cache has {blocks.block_bytes} bytes, expected {setup.block_bytes}"
            )
        blocks.warm_up()
        self.activity = StepActivity()
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
        waiting = SaveQueue(options.save_queue, options.patience(device.kind), self.activity)
        self.saver = BlockSaver(self.store, blocks, waiting, options.save_workers)
        self._metrics: WorkerMetrics | None = None
        self._leaves_out_saves = self._is_closed = False

    def stored_copies(self) -> StoredCopies | None:
        """How blocks that loads have left in the store come from there; None where none are left."""
        if self._summaries is None:
            return None
        return StoredCopies(CopyLoads(self.engine, self.blocks.block_bytes, self.blocks.allocate), self.blocks)

    def start_loads(self, metadata: UcmMetadata) -> None:
        """Before the step, also one without tokens: loads do without the threads that save, as steps do."""
        self.activity.begin()
        self.saver.expect(len(metadata.saves) + len(metadata.records))
        apply_plan(self.engine, metadata.prefetch)
        if self._metrics is not None:
            self._metrics.lookups = metadata.lookups
        for load in metadata.loads:
            self.loads.start(load)

    def save(self, metadata: UcmMetadata) -> None:
        """After the step: the blocks are full now, and may be written by the next one."""
        if self._leaves_out_saves:
            keys = [save.key for save in metadata.saves] + [record.key for record in metadata.records]
            for key in keys:
                self.saver.refuse(key)
            self._leaves_out_saves = False
            self.activity.end()
            return
        if metadata.saves:
            self.saver.submit(metadata.saves)
        for record in metadata.records:
            self._save_record(record)
        self.activity.end()

    def leave_out_saves(self) -> None:
        """Blocks of the step that runs hold what nobody has computed."""
        self._leaves_out_saves = True

    def _save_record(self, record: RecordSave) -> None:
        summaries, block_ids = self._summaries, record.block_ids
        if summaries is None or not summaries.are_ready(block_ids):
            # at static shapes blocks that were loaded wait for theirs
            self.saver.refuse(record.key)
            return
        self.saver.submit_record(record.key, lambda buffer: summaries.read(block_ids, buffer))

    def report(self) -> UcmWorkerMetadata | None:
        unsaved, late = self.saver.take_unsaved(), self.loads.take_late()
        return UcmWorkerMetadata(unsaved, late) if unsaved or late else None

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
        return len(self.loads)

    @property
    def load_counts(self) -> LoadCounts:
        """Since the start."""
        return self.loads.counts

    def close(self) -> None:
        """Stores what is on its way, and ends all threads; a second call does nothing."""
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
    """None where every load is whole."""
    span, scorer = setup.summaries_per_record(method), selection.selector.scorer
    if not setup.options.loads_partly or not span or scorer is None:
        return None
    summaries = SummaryRecords(scorer, selection.state.summaries, span, device)
    # has a device that compiles compile both directions now
    record = blocks.allocate(setup.block_bytes)
    summaries.read([], record)
    summaries.write(bytearray(record), [], [])
    return summaries
