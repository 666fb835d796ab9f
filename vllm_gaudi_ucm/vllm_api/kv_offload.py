"""Offloading of KV blocks to the host: `vllm.v1.kv_offload`.

Extension point, experimental: vLLM's `OffloadingConnector` loads a spec by the name of its module. `OffloadingWorker`
is what the spec makes; `BlockIDsLoadStoreSpec`, `CanonicalKVCaches`, `GPULoadStoreSpec`, `LoadStoreSpec` and
`TransferResult` are types of its methods.
Internal: `CPUOffloadingSpec`, vLLM's own spec for CUDA; ours keeps its scheduler's side.
"""

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

__all__ = [
    "BlockIDsLoadStoreSpec",
    "CPUOffloadingSpec",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "OffloadingWorker",
    "TransferResult",
]
