"""Requests that wait for blocks of theirs: loaded by the prefetch engine, straight into the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from vllm_gaudi_ucm.connector.metadata import BlockLoad, RecordLoad, RecordSave
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.tasks import PrefetchOutcome, PrefetchPriority

if TYPE_CHECKING:
    from vllm_gaudi_ucm.kv_cache.device_blocks import DeviceBlocks
    from vllm_gaudi_ucm.kv_offload.scheduler_side import Fetched, ResidencyScheduler
    from vllm_gaudi_ucm.kv_offload.summary_records import SummaryRecords
    from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
    from vllm_gaudi_ucm.prefetch.stats import PrefetchHandle
    from vllm_gaudi_ucm.vllm_api.steps import Request

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
        summaries: where records go, None without KV offload.
    """

    def __init__(
        self, engine: PrefetchEngine, blocks: DeviceBlocks, deadline: float, summaries: SummaryRecords | None = None
    ) -> None:
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
        self._summaries = summaries

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
            assert self._summaries is not None, "the scheduler's side has the same options"
            self._summaries.write(load.records[index], record.rows, record.block_ids)
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


Order = Callable[[Sequence[bytes]], Sequence[int]]
"""Indices of keys, the one that was used most lately first."""


class PartialLoads:
    """In the scheduler: which blocks of a stored prompt are loaded, and which records have the summaries of the others.

    Record i of a prompt has the summaries of the blocks [i * span, (i + 1) * span), as far as there are such; its key
    is that of the last of them, hashed once more, so that prompts share the records of what they have in common.

    Args:
        residency: memory mode's side of the scheduler.
        block_size: tokens per block.
        span: blocks of a record.
        order: by use.
    """

    def __init__(self, residency: ResidencyScheduler, block_size: int, span: int, order: Order) -> None:
        self._residency = residency
        self._block_size = block_size
        self._span = span
        self._order = order

    def record_keys(self, request: Request, keys: Sequence[bytes], first: int) -> list[bytes]:
        """Keys of the records that a load of blocks `first` and following needs to be partial.

        Empty for a request whose load is whole: what is left to compute is the tail behind these blocks, and its rows
        can do without some of them only where a sparse step has room for so many.

        Args:
            request: about to be looked up.
            keys: of all its blocks that may be loaded: all but the last one, be it full or not.
            first: the first one that is not on the device.
        """
        if request.num_preemptions or not self._is_short_tail(request.num_tokens, keys):
            return []
        if not self._residency.dispensable(request.request_id, len(keys), range(first, len(keys))):
            return []
        return [_record_key(keys[numbers[-1]]) for numbers in self._groups(first, len(keys))]

    def wanted(self, request: Request, keys: Sequence[bytes], first: int) -> list[bytes]:
        """Of a stored prompt what will be loaded once it is its turn; arguments as for `record_keys`."""
        records = self.record_keys(request, keys, first)
        if not records:
            return list(keys[first:])
        away = set(self._dispensable(request.request_id, keys, first))
        return [*records, *(keys[number] for number in range(first, len(keys)) if number not in away)]

    def plan(
        self, request_id: str, keys: Sequence[bytes], first: int, block_ids: Sequence[int], records: Sequence[bytes]
    ) -> BlockLoad | None:
        """The load of a request that was just given blocks; what it leaves in the store is freed. None: a whole one.

        Args:
            request_id: of the request.
            keys: of all its blocks.
            first: the first one to be loaded.
            block_ids: physical ids of all blocks.
            records: what `record_keys` said.
        """
        away = self._dispensable(request_id, keys, first)
        rows = self._residency.leave_stored(request_id, {number: keys[number] for number in away})
        if not rows:
            return None
        targets = {number: block_ids[number] for number in range(first, len(keys)) if number not in rows}
        groups = zip(records, self._groups(first, len(keys)), strict=True)
        loads = [_record_load(key, numbers, rows, targets) for key, numbers in groups]
        block_keys = [keys[number] for number in targets]
        return BlockLoad(request_id, block_keys, list(targets.values()), loads, is_partial=True)

    def fetch(self, request_id: str, keys: Sequence[bytes], fetched: Fetched) -> BlockLoad:
        """The load of blocks that the query of a first step has asked for. keys: of all blocks of the prompt."""
        targets = {number: block for number, (_, block) in fetched.items()}
        loads = [
            _record_load(_record_key(keys[numbers[-1]]), numbers, {}, targets)
            for numbers in self._groups(0, len(keys))
            if targets.keys() & set(numbers)
        ]
        block_keys = [key for key, _ in fetched.values()]
        return BlockLoad(request_id, block_keys, list(targets.values()), loads, is_partial=True)

    def record_saves(self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[RecordSave]:
        """Records of a prompt where a load of it could be partial.

        keys, block_ids: of the prompt's blocks that may be loaded, as for `record_keys`; 0 where one is away.
        """
        if not self._is_short_tail(request.num_prompt_tokens, keys):
            return []
        if not self._residency.dispensable(request.request_id, len(keys), range(len(keys))):
            return []
        return [
            RecordSave(_record_key(keys[numbers[-1]]), [block_ids[n] for n in numbers])
            for numbers in self._groups(0, len(keys))
            if all(block_ids[n] for n in numbers)
        ]

    def _is_short_tail(self, num_tokens: int, keys: Sequence[bytes]) -> bool:
        return num_tokens - len(keys) * self._block_size <= self._residency.max_tail

    def may_be_repeated(self, request_id: str) -> bool:
        """Whether the step that is being scheduled may be computed once more, with other blocks: what it computes is
        not stored, or the better blocks would be taken for stored ones."""
        return self._residency.is_guess(request_id)

    def runs(self, request: Request) -> None:
        """A request is about to compute; whoever looks for its blocks on the device comes after."""
        self._residency.hide_guess(request)

    def _dispensable(self, request_id: str, keys: Sequence[bytes], first: int) -> list[int]:
        missing = [first + at for at in self._order(keys[first:])]
        return self._residency.dispensable(request_id, len(keys), missing)

    def _groups(self, first: int, end: int) -> list[range]:
        """The blocks of each record that has one of the blocks [first, end)."""
        span = self._span
        return [range(start, min(start + span, end)) for start in range(first // span * span, end, span)]


def _record_load(key: bytes, numbers: range, rows: Mapping[int, int], targets: Mapping[int, int]) -> RecordLoad:
    return RecordLoad(key, [rows.get(number, -1) for number in numbers], [targets.get(number, 0) for number in numbers])


def _record_key(key: bytes) -> bytes:
    return sha256(key + b"summaries").digest()
