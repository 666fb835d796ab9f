"""Blocks of the KV cache as the store keeps them: all layers of a block in one run of bytes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.ops.kv_cache.api import swap_blocks

if TYPE_CHECKING:
    from vllm_gaudi_ucm.device import Device, Fence


NO_MEMORY = (MemoryError, RuntimeError)
"""What `DeviceBlocks.allocate` raises where the system gives no memory; page-locked memory is torch's."""


class DeviceBlocks:
    """Copies between the cache and host memory. Bytes of a block: [layer, token, kv head, k | v].

    Any thread may copy, on a GPU or a Gaudi with a stream of its own, beside the computation.

    Args:
        caches: by layer [blocks, kv heads, block size, k | v], in the order in which a stored block holds them.
        device: where they are.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], device: Device) -> None:
        self._device = device
        # layers of one shape lie side by side; a draft model's have another one
        self._runs = [
            list(run) for _, run in groupby(caches.values(), key=lambda cache: (cache.shape[1:], cache.dtype))
        ]
        self.block_bytes = sum(_block_bytes(cache) for cache in caches.values())

    def allocate(self, nbytes: int) -> memoryview:
        """Host memory that copies are fastest with. Raises one of NO_MEMORY."""
        if not self._device.pins_host_memory:
            return memoryview(bytearray(nbytes))
        # an array is a buffer, which numpy's stubs say from Python 3.12 on
        return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())  # type: ignore[arg-type]

    def warm_up(self) -> None:
        """Copies the dummy block there and back, so that a Gaudi has compiled the copies before a request waits."""
        block = self.allocate(self.block_bytes)
        self.read([(DUMMY_BLOCK, block)])
        self.write(DUMMY_BLOCK, block, self.fence())

    def fence(self) -> Fence:
        """To be asked for by the thread that computes, once it is known who a block belongs to."""
        return self._device.fence()

    def write(self, block_id: int, block: memoryview, after: Fence) -> None:
        """Host to device; the block is there when this returns.

        after: behind the steps of the request that had the block before. vLLM hands out the blocks of an aborted
            request while the device may still compute a chunk of its prompt, which writes them.
        """
        with self._device.beside_computation(after):
            self._copy([(block_id, block)], to_device=True)

    def read(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        """Device to host, (block, where to), after what was launched before; the bytes are there when this returns."""
        # in the computation's own stream: the step that filled the blocks comes before
        self._copy(blocks, to_device=False)
        if blocks:
            self._device.synchronize()

    # threads begin outside of inference mode, in which the cache was made
    @torch.inference_mode()
    def _copy(self, blocks: Sequence[tuple[int, memoryview]], to_device: bool) -> None:
        # what was launched before is no part of the recipe of a block
        self._device.end_recipe()
        for block_id, block in blocks:
            offset = 0
            pair = torch.tensor([[0, block_id]] if to_device else [[block_id, 0]])
            for run in self._runs:
                host = _host_layers(block, offset, run)
                offset += len(run) * _block_bytes(run[0])
                if to_device:
                    swap_blocks(host, run, pair, non_blocking=True)
                else:
                    swap_blocks(run, host, pair, non_blocking=True)
            # each block is one recipe, whose shape does not depend on their number
            self._device.end_recipe()


def _block_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def _host_layers(block: memoryview, offset: int, run: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Part of a block's bytes as caches of one block each, [1, kv heads, block size, k | v]."""
    cache = run[0]
    _, heads, tokens, width = cache.shape
    elements = len(run) * heads * tokens * width
    with warnings.catch_warnings():
        # a block that is only read may lie in memory that must not be written
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(block, dtype=cache.dtype, count=elements, offset=offset)
    return list(flat.view(len(run), 1, tokens, heads, width).transpose(2, 3))
