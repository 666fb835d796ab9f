"""What random histories of the pool have in common: vLLM's manager of a small cache, and requests that end."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_gaudi_ucm.scheduler.block_manager import BlockManager

LONGEST = 40


def make_vllm_manager(num_blocks: int, block_size: int, longest: int, caching: bool) -> KVCacheManager:
    """Of one layer."""
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, longest, block_size, block_size, enable_caching=caching)


def make_request(request_id: str, prompt: list[int], block_size: int) -> Request:
    hasher = get_request_block_hasher(block_size, sha256)
    return Request(request_id, prompt, SamplingParams(max_tokens=LONGEST), None, block_hasher=hasher)


class Histories(RuleBasedStateMachine):
    """Requests by their ids; how one begins, and what it writes, is up to the machine."""

    manager: BlockManager
    live: dict[str, Request]

    def _admit(self, request: Request) -> None:
        raise NotImplementedError

    @precondition(lambda self: self.live)
    @rule(data=st.data(), again=st.booleans())
    def end(self, data: st.DataObject, again: bool) -> None:
        """It ends, is aborted, or is preempted and begins again."""
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self._end(request)
        if again:
            request.num_computed_tokens = 0
            self._admit(request)

    def _end(self, request: Request) -> None:
        self.manager.free(request)
        del self.live[request.request_id]
