"""Summaries of consecutive blocks as one record of a store, so that blocks left in the store can be scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.narrow_floats import put

if TYPE_CHECKING:
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.sparse.selection.block_scorer import BlockScorer, SummaryQueue


def summary_bytes(options: BlockOptions, block_size: int, kv_heads: int, head_size: int, key_bytes: int) -> int:
    """Bytes of a block's summaries in one layer.

    Args:
        kv_heads, head_size: of the layer.
        key_bytes: of an element of a key.
    """
    kind = SummaryKind(options.summary)
    return kind.vectors(block_size) * kv_heads * kind.width(head_size) * options.summary_itemsize(key_bytes)


class SummaryRecords:
    """Copies between device and host of a fixed shape, by the worker's own thread, between two steps.

    Bytes of a record: [layer that chooses, block, summary]; beyond the last block they are undefined.

    Args:
        scorer: has the summaries, and places for those of offloaded blocks.
        record_blocks: most blocks of a record.
        device: its recipes end before and after a copy.
    """

    def __init__(self, scorer: BlockScorer, ready: SummaryQueue, record_blocks: int, device: Device) -> None:
        self._scorer = scorer
        self._ready = ready
        self._record_blocks = record_blocks
        self._device = device
        self._pad_row = len(scorer.offloaded[0]) - 1

    def are_ready(self, blocks: Sequence[int]) -> bool:
        """True if all of these blocks have a summary."""
        return bool(self._ready.ready[list(blocks)].all())

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], into: memoryview) -> None:
        """Device to host; blocks: physical ones that have a summary."""
        self._device.end_recipe()
        index = self._padded(blocks, DUMMY_BLOCK)
        offset = 0
        for layer in self._scorer.layers:
            found = layer.summaries.index_select(0, index).cpu().contiguous().view(torch.uint8).flatten()
            torch.frombuffer(into, dtype=torch.uint8, count=len(found), offset=offset).copy_(found)
            offset += len(found)
        self._device.end_recipe()

    @torch.inference_mode()
    def write(self, record: bytearray, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Host to device. Of each block of the record the row for an offloaded one, below 0 for others, and the
        physical block, DUMMY_BLOCK for an offloaded one."""
        self._device.end_recipe()
        to_rows = self._padded([self._pad_row if row < 0 else row for row in rows], self._pad_row)
        to_blocks = self._padded(blocks, DUMMY_BLOCK)
        offset = 0
        for layer, offloaded in zip(self._scorer.layers, self._scorer.offloaded, strict=True):
            shape = self._record_blocks, *offloaded.shape[1:]
            count = offloaded[0].nbytes * self._record_blocks
            flat = torch.frombuffer(record, dtype=torch.uint8, count=count, offset=offset)
            # a copy: views of other types ask for offsets that fit
            data = flat.clone().view(offloaded.dtype).view(shape).to(offloaded.device)
            put(offloaded, 0, to_rows, data)
            put(layer.summaries, 0, to_blocks, data)
            offset += count
        self._device.end_recipe()

    def _padded(self, numbers: Sequence[int], pad: int) -> torch.Tensor:
        padded = [*numbers, *[pad] * (self._record_blocks - len(numbers))]
        return torch.tensor(padded, device=self._scorer.offloaded[0].device)
