"""Blocks of the KV cache as the store keeps them: all layers of a block in one run of bytes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.kv_cache.pair import LayerCache, alike, distinct, in_blocks
from vllm_gaudi_ucm.ops.kv_cache.api import swap_blocks

if TYPE_CHECKING:
    from vllm_gaudi_ucm.device import Device, Fence


NO_MEMORY = (MemoryError, RuntimeError)
"""What `DeviceBlocks.allocate` raises where the system gives no memory; page-locked memory is torch's."""


class DeviceBlocks:
    """Copies between the cache and host memory. Bytes of a block: for each layer keys [token, kv head, head size], then
    values in the same order, if they are not a part of the keys.

    Any thread may copy, on a GPU or a Gaudi with a stream of its own, beside the computation.

    Layers of several KV-cache groups have one memory: a block is that of any group, and has its bytes.

    Args:
        caches: by layer, in the order in which a stored block holds them.
        block_size: tokens of a block.
        device: where they are.
    """

    def __init__(self, caches: Mapping[str, LayerCache], block_size: int, device: Device) -> None:
        self.device = device
        tensors = [blocks for pair in distinct(caches.values()) for blocks in in_blocks(pair, block_size)]
        self._runs = alike(tensors)
        self.block_bytes = sum(_block_bytes(blocks) for blocks in tensors)

    def allocate(self, nbytes: int) -> memoryview:
        """Host memory that copies are fastest with. Raises one of NO_MEMORY."""
        if not self.device.pins_host_memory:
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
        return self.device.fence()

    def write(self, block_id: int, block: memoryview, after: Fence) -> None:
        """Host to device; the block is there when this returns.

        after: behind the steps of the request that had the block before. vLLM hands out the blocks of an aborted
            request while the device may still compute a chunk of its prompt, which writes them.
        """
        with self.device.beside_computation(after):
            self._copy([(block_id, block)], to_device=True)

    def read(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        """Device to host, (block, where to), after what was launched before; the bytes are there when this returns."""
        # in the computation's own stream: the step that filled the blocks comes before
        self._copy(blocks, to_device=False)
        if blocks:
            self.device.synchronize()

    # threads begin outside of inference mode, in which the cache was made
    @torch.inference_mode()
    def _copy(self, blocks: Sequence[tuple[int, memoryview]], to_device: bool) -> None:
        # what was launched before is no part of the recipe of a block
        self.device.end_recipe()
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
            self.device.end_recipe()


def _block_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def _host_layers(block: memoryview, offset: int, run: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Part of a block's bytes as caches of one block each, [1, block size, kv heads, head size]."""
    shape = (len(run), 1, *run[0].shape[1:])
    with warnings.catch_warnings():
        # a block that is only read may lie in memory that must not be written
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(block, dtype=run[0].dtype, count=math.prod(shape), offset=offset)
    return list(flat.view(shape))
