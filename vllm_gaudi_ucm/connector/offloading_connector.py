"""vLLM's OffloadingConnector for keys and values in separate tensors, although it views one tensor per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.vllm_api.kv_offload import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadingConnectorWorker,
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
