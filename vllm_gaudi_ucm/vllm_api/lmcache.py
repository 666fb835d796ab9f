"""vLLM's connector for LMCache: `vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector`.

Internal: `LMCacheConnectorV1`, which hands every call to the adapter that the package `lmcache` brings; ours keeps the
adapter and the scheduler's side. The package is only imported when a connector is made.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1 as VllmLMCacheConnector

__all__ = ["VllmLMCacheConnector"]
