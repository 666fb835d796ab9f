"""Requests that wait for blocks of theirs: loaded by the prefetch engine, straight into the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome
from vllm_gaudi_ucm.prefetch.priority import PrefetchPriority

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.metadata import BlockLoad
    from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
    from vllm_gaudi_ucm.kv_offload.summary_records import SummaryRecords
    from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
    from vllm_gaudi_ucm.prefetch.handle import PrefetchHandle

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
    """A request that waits for blocks. records: bytes of those that have come, by place, which come before the blocks.
    is_wanted: it has not ended meanwhile."""

    handle: PrefetchHandle
    order: BlockLoad
    records: dict[int, bytearray]
    is_wanted: bool = True


class BlockLoads:
    """In the worker. Each `take_` gives what has come since its last call.

    Args:
        engine: loads; the caller's to stop.
        blocks: of the device.
        deadline: seconds that a request waits.
    """

    def __init__(self, engine: PrefetchEngine, blocks: DeviceBlocks, deadline: float) -> None:
        self._engine = engine
        self._blocks = blocks
        self._deadline = deadline
        self._loads: dict[str, _Load] = {}
        self._invalid: set[int] = set()
        self._written: set[int] = set()
        self._summarised: set[int] = set()
        self._failed: set[str] = set()
        self._late: list[str] = []
        self.counts = LoadCounts()
        self.summaries: SummaryRecords | None = None
        """Set under memory mode: where records go."""

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._loads)

    def start(self, load: BlockLoad) -> None:
        """Returns at once. For the thread that computes, before any step in which the blocks are the request's."""
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
            # the scheduler has admitted it: nothing but its blocks keeps it from running
            PrefetchPriority.URGENT,
            deliver=deliver,
            deadline=self._deadline,
        )
        self.counts.requests += 1
        self._loads[load.request_id] = _Load(handle, load, records)

    def finished(self, ended: set[str]) -> set[str]:
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
        counts, outcome = self.counts, load.handle.outcome
        self._engine.forget(request_id)
        if not load.is_wanted:
            # its blocks are freed now: they must not be taken for blocks of whoever gets them next
            counts.cancelled += 1
            return
        counts.timeouts += outcome is PrefetchOutcome.TIMEOUT
        order, first = load.order, len(load.order.records)
        lost = {index - first for index in failed if index >= first}
        if failed:
            logger.debug("request %s: %d of %d blocks failed (%s)", request_id, len(lost), len(order.keys), outcome)
        if failed and order.is_partial:
            # what has come is given back with the rest
            counts.failed_blocks += len(lost)
            self._failed.add(request_id)
            if outcome is PrefetchOutcome.TIMEOUT:
                self._late.append(request_id)
            return
        counts.loaded_blocks += len(order.block_ids) - len(lost)
        counts.failed_blocks += len(lost)
        self._invalid |= {order.block_ids[index] for index in lost}
        self._written |= {block_id for index, block_id in enumerate(order.block_ids) if index not in lost}
        self._take_records(load)

    def _take_records(self, load: _Load) -> None:
        for index, record in enumerate(load.order.records):
            assert self.summaries is not None, "the scheduler's side has the same options"
            self.summaries.write(load.records[index], record.rows, record.block_ids)
            self._summarised.update(block_id for block_id in record.block_ids if block_id)

    def take_failed(self) -> set[str]:
        """Requests that have to begin anew."""
        failed, self._failed = self._failed, set()
        return failed

    def take_summarised(self) -> set[int]:
        """Loaded blocks whose summaries have come with them."""
        summarised, self._summarised = self._summarised, set()
        return summarised

    def take_invalid(self) -> set[int]:
        """Blocks that could not be loaded."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_loaded(self) -> set[int]:
        """Blocks that were loaded."""
        written, self._written = self._written, set()
        return written

    def take_late(self) -> list[str]:
        """Those among the failed requests whose time is up."""
        late, self._late = self._late, []
        return late

    def wait(self, seconds: float) -> None:
        """Returns when a load has ended, when so much time has passed, or at once where nothing is loaded."""
        self._engine.wait_for_any([load.handle for load in self._loads.values()], seconds)
