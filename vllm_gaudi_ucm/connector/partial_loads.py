"""Loads only a part of a prompt, with KV offload: the other blocks stay in the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.metadata import BlockLoad, RecordLoad, RecordSave

if TYPE_CHECKING:
    from vllm_gaudi_ucm.memory_mode.scheduler_side import Fetched, OffloadScheduler
    from vllm_gaudi_ucm.vllm_api.steps import Request

Order = Callable[[Sequence[bytes]], Sequence[int]]
"""Indices of keys, the most recently used first."""


class PartialLoads:
    """Decides in the scheduler which blocks of a stored prompt are loaded, and which records have the summaries of the
        others.

    Record i of a prompt has the summaries of the blocks from `i * record_blocks` on, as many as a record holds and the
    prompt has. Its key is the hash of the last block's key, so that prompts share the records of shared blocks.

    Args:
        offload: memory mode's side of the scheduler.
        order: by use.
    """

    def __init__(self, offload: OffloadScheduler, block_size: int, record_blocks: int, order: Order) -> None:
        self._offload = offload
        self._block_size = block_size
        self._record_blocks = record_blocks
        self._order = order

    def record_keys(self, request: Request, keys: Sequence[bytes], first: int) -> list[bytes]:
        """Returns the keys of the records that a load of blocks from `first` needs to be partial.

        Empty for a request whose load is whole: the remainder after these blocks has to be computed, and its rows can
        do without some blocks only if a sparse step has room for this many.

        Args:
            request: about to be looked up.
            keys: of all its blocks that may be loaded: all but the last one, be it full or not.
            first: the first block that is not on the device.
        """
        if request.num_preemptions or not self._is_short_remainder(request.num_tokens, keys):
            return []
        if not self._offload.dispensable(request.request_id, len(keys), range(first, len(keys))):
            return []
        return [_record_key(keys[numbers[-1]]) for numbers in self._groups(first, len(keys))]

    def all_records(self, keys: Sequence[bytes], first: int) -> list[bytes]:
        """Returns the keys of the records of blocks from `first` on. keys: of the first blocks of a context."""
        return [_record_key(keys[numbers[-1]]) for numbers in self._groups(first, len(keys))]

    def wanted(self, request: Request, keys: Sequence[bytes], first: int) -> list[bytes]:
        """Returns what will be loaded of a stored prompt when its turn comes; arguments as for `record_keys`."""
        records = self.record_keys(request, keys, first)
        if not records:
            return list(keys[first:])
        away = set(self._dispensable(request.request_id, keys, first))
        return [*records, *(keys[number] for number in range(first, len(keys)) if number not in away)]

    def plan(
        self, request_id: str, keys: Sequence[bytes], first: int, block_ids: Sequence[int], records: Sequence[bytes]
    ) -> BlockLoad | None:
        """Returns the load of a request that was just given blocks; blocks left in the store are freed. None: the load
        is whole.

        Args:
            keys: of all its blocks.
            first: the first one to be loaded.
            block_ids: physical ids of all blocks.
            records: the result of `record_keys`.
        """
        away = self._dispensable(request_id, keys, first)
        rows = self._offload.leave_stored(request_id, {number: keys[number] for number in away})
        if not rows:
            return None
        targets = {number: block_ids[number] for number in range(first, len(keys)) if number not in rows}
        groups = zip(records, self._groups(first, len(keys)), strict=True)
        loads = [_record_load(key, numbers, rows, targets) for key, numbers in groups]
        block_keys = [keys[number] for number in targets]
        return BlockLoad(request_id, block_keys, list(targets.values()), loads, is_partial=True)

    def fetch(self, request_id: str, keys: Sequence[bytes], fetched: Fetched) -> BlockLoad:
        """Returns the load of blocks that the query of a first step has chosen. keys: of all blocks of the prompt."""
        targets = {number: block for number, (_, block) in fetched.items()}
        loads = [
            _record_load(_record_key(keys[numbers[-1]]), numbers, {}, targets)
            for numbers in self._groups(0, len(keys))
            if targets.keys() & set(numbers)
        ]
        block_keys = [key for key, _ in fetched.values()]
        return BlockLoad(request_id, block_keys, list(targets.values()), loads, is_partial=True)

    def record_saves(self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[RecordSave]:
        """Returns the records of a prompt if a load of it could be partial.

        keys, block_ids: of the prompt's blocks that may be loaded, as for `record_keys`; 0 for an offloaded block.
        """
        if not self._is_short_remainder(request.num_prompt_tokens, keys):
            return []
        if not self._offload.dispensable(request.request_id, len(keys), range(len(keys))):
            return []
        return [
            RecordSave(_record_key(keys[numbers[-1]]), [block_ids[n] for n in numbers])
            for numbers in self._groups(0, len(keys))
            if all(block_ids[n] for n in numbers)
        ]

    def _is_short_remainder(self, num_tokens: int, keys: Sequence[bytes]) -> bool:
        return num_tokens - len(keys) * self._block_size <= self._offload.max_remainder

    def may_be_repeated(self, request_id: str) -> bool:
        """True if the step that is being scheduled may be computed once more, with other blocks: its results are not
        stored; otherwise the better blocks would count as stored.
        """
        return self._offload.is_guess(request_id)

    def runs(self, request: Request) -> None:
        """Notes that a request is about to compute."""
        self._offload.hide_guess(request)

    def _dispensable(self, request_id: str, keys: Sequence[bytes], first: int) -> list[int]:
        missing = [first + at for at in self._order(keys[first:])]
        return self._offload.dispensable(request_id, len(keys), missing)

    def _groups(self, first: int, end: int) -> list[range]:
        """Returns the blocks of each record that has one of the blocks [first, end)."""
        record_blocks = self._record_blocks
        return [
            range(start, min(start + record_blocks, end))
            for start in range(first // record_blocks * record_blocks, end, record_blocks)
        ]


def _record_load(key: bytes, numbers: range, rows: Mapping[int, int], targets: Mapping[int, int]) -> RecordLoad:
    return RecordLoad(key, [rows.get(number, -1) for number in numbers], [targets.get(number, 0) for number in numbers])


def _record_key(key: bytes) -> bytes:
    return sha256(key + b"summaries").digest()
