"""vLLM's OffloadingConnector for keys and values in separate tensors, with copies that run on our devices.

vLLM views one tensor per layer, and its own copies need its CUDA kernels.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform

from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.ops.kv_cache.api import swap_blocks
from vllm_gaudi_ucm.vllm_api.kv_offload import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPUOffloadingSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingConnectorWorker,
    OffloadingWorker,
    TransferResult,
    VllmOffloadingConnector,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.kv_cache.pair import LayerCache
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig
    from vllm_gaudi_ucm.vllm_api.kv_transfer import KVConnectorRole


class PairWorker(OffloadingConnectorWorker):
    """The worker's side: two regions of memory for each layer."""

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache]) -> None:  # type: ignore[override]
        self._init_worker(as_pages(kv_caches, self.kv_cache_config))


class OffloadingConnector(VllmOffloadingConnector):
    """The connector under vLLM's name, by which other parts of vLLM look it up."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            self.connector_worker = PairWorker(self.connector_worker.spec, vllm_config, kv_cache_config)


def as_pages(kv_caches: Mapping[str, LayerCache], config: KVCacheConfig) -> CanonicalKVCaches:
    """Returns keys and values as int8 [blocks, bytes of a block], in the order of the groups' layers. Groups that share
    memory share a tensor, whose blocks belong to one group at a time.
    """
    tensors: list[CanonicalKVCacheTensor] = []
    known: dict[int, CanonicalKVCacheRef] = {}
    groups: list[list[CanonicalKVCacheRef]] = []
    for group in config.kv_cache_groups:
        refs = []
        for rows in (rows for name in group.layer_names for rows in kv_caches[name]):
            if id(rows) not in known:
                pages = rows.view(config.num_blocks, -1).view(torch.int8)
                known[id(rows)] = CanonicalKVCacheRef(len(tensors), pages.shape[1])
                tensors.append(CanonicalKVCacheTensor(pages, pages.shape[1]))
            refs.append(known[id(rows)])
        groups.append(refs)
    return CanonicalKVCaches(tensors, groups)


class UcmOffloadingSpec(CPUOffloadingSpec):
    """Chunks in host memory, managed as by vLLM's CPUOffloadingSpec, with the same options."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        # vLLM's attribute has the type of its own worker
        return SwappingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)


class SwappingWorker(OffloadingWorker):
    """Copies at once, in the caller's thread: a transfer has ended when its submission returns.

    Args:
        kv_caches: views of the cache, int8 [blocks, bytes of a page].
        blocks_per_chunk: blocks that are adjacent on the host.
        num_chunks: chunks there is room for.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int) -> None:
        device = get_device(current_platform.device_type)
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self._device = [tensor.tensor for tensor in kv_caches.tensors]
        self._host = [
            torch.zeros(
                (num_chunks * blocks_per_chunk, tensor.shape[1]), dtype=tensor.dtype, pin_memory=device.pins_host_memory
            )
            for tensor in self._device
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._transfer(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copies at once. expedited: a step waits for this load, which has ended on return. vLLM 0.32 lacks it."""
        return self._transfer(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: transfers have already ended."""

    @torch.inference_mode()
    def _transfer(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, to_host: bool) -> bool:
        start, copied = time.perf_counter(), 0
        chunk_ids = cast(BlockIDsLoadStoreSpec, chunks).block_ids
        for tensors, pairs in zip(self._groups, self._pairs(blocks, chunk_ids), strict=True):
            if not len(pairs):
                continue
            found = torch.from_numpy(pairs if to_host else pairs[:, ::-1].copy())
            for index in tensors:
                device, host = self._device[index], self._host[index]
                swap_blocks([device if to_host else host], [host if to_host else device], found)
                copied += len(pairs) * device.shape[1]
        self._finished.append(TransferResult(job_id, True, copied, time.perf_counter() - start))
        return True

    def _pairs(self, blocks: GPULoadStoreSpec, chunk_ids: NDArray[np.integer]) -> list[NDArray[np.int64]]:
        """Returns int64 [n, 2] per group: block on the device, block on the host. The first chunk of a group may start,
        and the last one end, in the middle.
        """
        found, block_start, chunk_start = [], 0, 0
        for size, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            skipped = first % self._blocks_per_chunk if size else 0
            count = -(-(size + skipped) // self._blocks_per_chunk)
            chunks = np.asarray(chunk_ids[chunk_start : chunk_start + count], np.int64)
            inside = chunks[:, None] * self._blocks_per_chunk + np.arange(self._blocks_per_chunk)
            host = inside.ravel()[skipped : skipped + size]
            device = np.asarray(blocks.block_ids[block_start : block_start + size], np.int64)
            found.append(np.stack([device, host], 1))
            block_start, chunk_start = block_start + size, chunk_start + count
        return found
