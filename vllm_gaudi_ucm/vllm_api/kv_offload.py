"""Offloading of KV blocks to the host: `vllm.v1.kv_offload`.

Extension point, experimental: vLLM's `OffloadingConnector` loads a spec by the name of its module. `OffloadingWorker`
is what the spec makes; `BlockIDsLoadStoreSpec`, `CanonicalKVCacheRef`, `CanonicalKVCaches`, `CanonicalKVCacheTensor`,
`GPULoadStoreSpec`, `LoadStoreSpec` and `TransferResult` are types of its methods.
Internal: `CPUOffloadingSpec`, vLLM's own spec for CUDA, and `OffloadingConnectorWorker`, the worker's side of vLLM's
connector (`VllmOffloadingConnector`); ours keep their scheduler's sides.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector as VllmOffloadingConnector,
)
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

__all__ = [
    "BlockIDsLoadStoreSpec",
    "CPUOffloadingSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "OffloadingConnectorWorker",
    "OffloadingWorker",
    "TransferResult",
    "VllmOffloadingConnector",
]
