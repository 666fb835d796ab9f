"""KV connectors: `vllm.distributed.kv_transfer`.

Extension point, experimental: `--kv-transfer-config` names a connector and its module. `KVConnectorBase_V1` and
`SupportsHMA` are its base classes; `KVConnectorHandshakeMetadata`, `KVConnectorMetadata`, `KVConnectorRole`,
`KVConnectorTransferResults` and `KVConnectorWorkerMetadata` are types of their methods.
Internal: `ensure_kv_transfer_initialized`, `ensure_kv_transfer_shutdown` and `get_kv_transfer_group`, by which vLLM's
own runner drives connectors; `KVConnectorFactory` and `MultiConnector`.
"""

from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "MultiConnector",
    "SupportsHMA",
    "ensure_kv_transfer_initialized",
    "ensure_kv_transfer_shutdown",
    "get_kv_transfer_group",
]
