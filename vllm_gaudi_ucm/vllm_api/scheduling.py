"""vLLM's scheduler and its blocks."""

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, generate_block_hash_extra_keys
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs

__all__ = [
    "AsyncScheduler",
    "EngineCoreOutputs",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheManager",
    "Scheduler",
    "generate_block_hash_extra_keys",
]
