"""Reads or removes everything in a medium: what `gaudi-ucm store` does, and `verify` and `clear` of a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_gaudi_ucm.store.medium import REFUSED, Medium, StoredBlock
from vllm_gaudi_ucm.store.record import HEADER_BYTES, is_intact

Progress = Callable[[float], None]
"""Called with the fraction that is done."""
_BATCH = 256


class Verified(NamedTuple):
    """How many blocks were what they should be; the others are removed."""

    intact: int
    corrupt: int


def verify_blocks(medium: Medium, blocks: Sequence[StoredBlock], progress: Progress | None = None) -> Verified:
    """Reads every block; removes the corrupt ones. One that has gone, or cannot be read, counts as neither.

    Order of use and time to live stay what they are.
    """
    intact = corrupt = 0
    buffer = bytearray()
    for done, block in enumerate(blocks, start=1):
        size = HEADER_BYTES + block.block_bytes
        if len(buffer) < size:
            buffer = bytearray(size)
        record = memoryview(buffer)[:size]
        found = medium.peek(block.key, block.block_bytes, record)
        if found == size and is_intact(record, block.key):
            intact += 1
        elif found is not None and found != REFUSED:
            corrupt += medium.delete([block])
        if progress is not None:
            progress(done / len(blocks))
    return Verified(intact, corrupt)


def clear_blocks(medium: Medium, blocks: Sequence[StoredBlock], progress: Progress | None = None) -> int:
    """Removes the blocks; returns how many were there."""
    removed = 0
    for start in range(0, len(blocks), _BATCH):
        batch = blocks[start : start + _BATCH]
        removed += medium.delete(batch)
        if progress is not None:
            progress((start + len(batch)) / len(blocks))
    return removed
