"""The scheduler and its blocks: `vllm.v1.core`.

Extension point: `--scheduler-cls` names a class; vLLM declares the interface not public. Ours derive from `Scheduler`
and `AsyncScheduler`.
Internal: `BlockPool`, `EngineCoreOutputs`, `FreeKVCacheBlockQueue`, `KVCacheBlock`, `KVCacheBlocks`,
`KVCacheManager` and `generate_block_hash_extra_keys`.
Functions that the scheduler lacks are in `blocks`.
"""

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock, generate_block_hash_extra_keys
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs

__all__ = [
    "AsyncScheduler",
    "BlockPool",
    "EngineCoreOutputs",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheManager",
    "Scheduler",
    "generate_block_hash_extra_keys",
]
