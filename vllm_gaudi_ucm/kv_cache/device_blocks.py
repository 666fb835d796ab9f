"""Blocks of the KV cache in the format of the store: all layers of a block in one run of bytes."""

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
"""Errors of `DeviceBlocks.allocate` if the system has no memory; torch allocates page-locked memory."""


class DeviceBlocks:
    """Copies blocks between the cache and host memory. The bytes of a block are, for each layer, the keys [token, kv
    head, head size], then the values in the same order unless they are part of the keys.

    Any thread may copy; on a GPU or a Gaudi it uses a separate stream, so the computation continues.

    Layers of several KV-cache groups share one memory: a block belongs to any one group, and has its bytes.

    Args:
        caches: cache of each layer, in the order in which a stored block holds them.
    """

    def __init__(self, caches: Mapping[str, LayerCache], block_size: int, device: Device) -> None:
        self.device = device
        tensors = [blocks for pair in distinct(caches.values()) for blocks in in_blocks(pair, block_size)]
        self._runs = alike(tensors)
        self.block_bytes = sum(_block_bytes(blocks) for blocks in tensors)

    def allocate(self, nbytes: int) -> memoryview:
        """Returns host memory with which copies are fastest. Raises one of NO_MEMORY."""
        if not self.device.pins_host_memory:
            return memoryview(bytearray(nbytes))
        # an array is a buffer; numpy's stubs declare this only from Python 3.12 on
        return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())  # type: ignore[arg-type]

    def warm_up(self) -> None:
        """Copies the dummy block to the host and back: a Gaudi then has compiled the copies before requests come."""
        block = self.allocate(self.block_bytes)
        self.read([(DUMMY_BLOCK, block)])
        self.write(DUMMY_BLOCK, block, self.fence())

    def fence(self) -> Fence:
        """Returns a fence; the computing thread calls this once it is known which request a block belongs to."""
        return self.device.fence()

    def write(self, block_id: int, block: memoryview, after: Fence) -> None:
        """Copies from host to device; the block is complete when this returns.

        after: fence behind the steps of the request that had the block before. vLLM reuses the blocks of an aborted
            request while the device may still compute a chunk of its prompt, which writes them.
        """
        with self.device.beside_computation(after):
            self._copy([(block_id, block)], to_device=True)

    def read(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        """Copies each (block, destination) to the host, after all earlier launches; complete when this returns."""
        # in the computation's own stream, so that it follows the step that filled the blocks
        self._copy(blocks, to_device=False)
        if blocks:
            self.device.synchronize()

    # threads start outside inference mode, in which the cache was made
    @torch.inference_mode()
    def _copy(self, blocks: Sequence[tuple[int, memoryview]], to_device: bool) -> None:
        # earlier launches must not become part of the recipe of a block
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
            # each block is one recipe, whose shape does not depend on the number of blocks
            self.device.end_recipe()


# callers may be threads, which start outside inference mode
@torch.inference_mode()
def copy_each(
    device: Device, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pairs: torch.Tensor
) -> None:
    """Copies blocks between a device and the host like `swap_blocks`, complete when this returns. A Gaudi copies one
    block of one tensor at a time: it would compile a recipe for each number of blocks.
    """
    if device.kind != "hpu":
        for some, others in zip(alike(sources), alike(targets), strict=True):
            swap_blocks(some, others, pairs)
        return
    device.end_recipe()
    for pair in pairs.split(1):
        for source, target in zip(sources, targets, strict=True):
            swap_blocks([source], [target], pair)
            device.end_recipe()


def _block_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def _host_layers(block: memoryview, offset: int, run: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns a part of a block's bytes as caches of one block each, [1, block size, kv heads, head size]."""
    shape = (len(run), 1, *run[0].shape[1:])
    with warnings.catch_warnings():
        # a block that is only read may be in read-only memory
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(block, dtype=run[0].dtype, count=math.prod(shape), offset=offset)
    return list(flat.view(shape))
