"""Blocks and requests of vLLM's scheduler: operations that `vllm.v1.core` has no call for.

Imports vLLM inside functions only: our platform class, which is loaded while vLLM is being imported, comes here.
"""

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, FreeKVCacheBlockQueue, KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


def kv_block_lists(manager: "KVCacheManager", group: int) -> "dict[str, list[KVCacheBlock]]":
    """The block list of each request in a KV-cache group, in the order of its context; to be changed in place.

    Reason: vLLM replaces blocks of a running request by the null block for attention types that say so
    (`SingleTypeKVCacheManager.remove_skipped_blocks`), but has no call for blocks that its caller names.
    Remove when: `KVCacheManager` can replace named blocks of a request.
    """
    return manager.coordinator.single_type_managers[group].req_to_blocks


def forget_cached_blocks(manager: "KVCacheManager", request_id: str, first: int) -> None:
    """Takes blocks `first` and following of a request out of the prefix cache, in every KV-cache group, until the
    request is allotted slots again with these blocks full.

    Reason: `KVCacheManager.evict_blocks` leaves them counted as cached, so that they would never be cached again.
    Remove when: `KVCacheManager` can be told that what a step computes is not certain yet.
    """
    for group in manager.coordinator.single_type_managers:
        _forget(manager, group, request_id, first)


def _forget(manager: "KVCacheManager", group: "SingleTypeKVCacheManager", request_id: str, first: int) -> None:
    blocks = group.req_to_blocks.get(request_id, [])[first:]
    # of the pool: the content of the blocks is right
    manager.block_pool.evict_blocks({block.block_id for block in blocks if not block.is_null})
    cached = group.num_cached_block
    if request_id in cached:
        cached[request_id] = min(cached[request_id], first)


def forget_uncomputed_blocks(manager: "KVCacheManager", request: "Request") -> None:
    """Takes the blocks that a request has not computed out of the prefix cache, in every KV-cache group, before the
    request is preempted.

    Called by our `_preempt_request`, before a step counts as scheduled: `num_computed_tokens` is what was computed.

    Reason: under `--scheduling-policy priority` vLLM preempts requests that the same step has scheduled already. The
    blocks that they were to fill are in the prefix cache then, and they find them when they resume: wrong tokens.
    Remove when: `Scheduler.schedule` takes these blocks out of the cache where it takes the request out of the step.
    """
    for group in manager.coordinator.single_type_managers:
        _forget(manager, group, request.request_id, request.num_computed_tokens // group.block_size)


def replace_free_blocks(manager: "KVCacheManager", queue: "FreeKVCacheBlockQueue") -> None:
    """Has a manager's pool take blocks from another queue, which holds the same ones.

    Reason: vLLM makes the queue itself, and has one order in which blocks are given away.
    Remove when: a pool can be made with a queue, or asked for blocks in an order.
    """
    manager.block_pool.free_block_queue = queue


def exchange_block_ids(pool: "BlockPool", one: "KVCacheBlock", other: "KVCacheBlock") -> None:
    """Gives two blocks each other's id. Their content has to follow: tables, the prefix cache and the list of free
    blocks refer to the objects, so they all have the new ids at once.

    Reason: vLLM moves no block; a few of its tables have ids for keys.
    Remove when: a pool can give a block another id.
    """
    by_block, by_hash = pool.cached_block_hashes_by_block, pool.cached_block_hash_to_block._cache
    more = [by_block.pop(block.block_id, None) for block in (one, other)]
    one.block_id, other.block_id = other.block_id, one.block_id
    for block, hashes in zip((one, other), more, strict=True):
        pool.blocks[block.block_id] = block
        if hashes is not None:
            by_block[block.block_id] = hashes
    for key in {one.block_hash, other.block_hash, *(more[0] or ()), *(more[1] or ())} - {None}:
        alike = by_hash.get(cast("BlockHashWithGroupId", key))
        if isinstance(alike, dict):
            # in their order: the first is the one that requests find
            by_hash[cast("BlockHashWithGroupId", key)] = {block.block_id: block for block in alike.values()}
    if pool.metrics_collector is not None:
        metrics = pool.metrics_collector.block_metrics
        known = {block.block_id: metrics.pop(old.block_id, None) for block, old in ((one, other), (other, one))}
        metrics.update({number: state for number, state in known.items() if state is not None})


def blocks_to_be_freed(scheduler: "Scheduler") -> set[int]:
    """Ids of blocks whose request is gone, and which a step or a connector may write to yet.

    Reason: they are in no table.
    Remove when: `BlockPool` says which blocks must stay where they are.
    """
    return {block.block_id for _, blocks in scheduler.deferred_frees for block in blocks}


def kv_block_bytes(manager: "KVCacheManager", group: int | None = None) -> int:
    """Returns the bytes of a block on one worker, which has room for the layers of any KV-cache group; the bytes of a
    group's own layers if one is given.

    Reason: the scheduler's classes know pages of layers only.
    Remove when: `KVCacheConfig` has it.
    """
    groups = manager.kv_cache_config.kv_cache_groups
    # of one size in all groups
    page_bytes = groups[0].kv_cache_spec.page_size_bytes
    of = groups if group is None else [groups[group]]
    return page_bytes * max(len(one.layer_names) for one in of)


def whole_groups(manager: "KVCacheManager") -> list[int]:
    """The KV-cache groups that keep the blocks of whole contexts, by number.

    Reason: as for `kept_tokens`.
    Remove when: as for `kept_tokens`.
    """
    from vllm_gaudi_ucm.vllm_api.kv_cache import kept_tokens

    kept = kept_tokens(manager.kv_cache_config.kv_cache_groups)
    return [number for number, tokens in enumerate(kept) if tokens is None]


def skipped_tokens(manager: "KVCacheManager") -> "tuple[Callable[[int], int], ...]":
    """Returns for each KV-cache group how many of a request's first tokens no later one sees, by the number of its
    computed tokens. A request has no blocks for them.

    Reason: vLLM's managers of a group know, and `KVCacheManager` has no call for it.
    Remove when: `KVCacheManager` has one.
    """
    return tuple(group.get_num_skipped_tokens for group in manager.coordinator.single_type_managers)


class _Salted:
    """A request as vLLM's block hasher is to see it: `request`, except for its salt."""

    def __init__(self, request: "Request", mark: str) -> None:
        self._request = request
        # a tuple, because users' salts are text
        self.cache_salt = (mark, request.cache_salt)

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)


class _Isolated:
    """The block hasher of a request with a mark. It does not hold the request: that would be a reference cycle.

    Args:
        shared: the hasher of other requests.
        mark: a part of the salt.
    """

    def __init__(self, shared: "Callable[[Request], list[BlockHash]]", mark: str) -> None:
        self.shared = shared
        self._mark = mark

    def __call__(self, request: "Request") -> "list[BlockHash]":
        return self.shared(cast("Request", _Salted(request, self._mark)))


def isolate_blocks(request: "Request", mark: str) -> None:
    """Hashes the blocks of a request so that only requests with the same mark and salt find them.

    For a request whose blocks have not been looked up yet. Its `cache_salt` does not change.

    Reason: vLLM computes block hashes from fields of the request alone. `cache_salt`, the field for such uses, is the
    user's, and goes to connectors and events.
    Remove when: a scheduler can give a request extra keys of its own.
    """
    if request._block_hasher is None:
        return  # there is neither a prefix cache nor a connector
    _hash_by(request, _Isolated(request._block_hasher, mark))


def is_isolated(request: "Request") -> bool:
    """Returns whether `isolate_blocks` applies to a request.

    Reason: a scheduler cannot attach a note to vLLM's request.
    Remove when: it has, or a scheduler can give a request extra keys of its own.
    """
    return isinstance(request._block_hasher, _Isolated)


def share_blocks(request: "Request") -> None:
    """Undoes `isolate_blocks`: hashes all blocks of the request as other requests hash theirs.

    Blocks that are in the prefix cache keep the hashes by which the requests with the mark find them.

    Reason: as for `isolate_blocks`, and a session of streamed inputs may become a request of another kind.
    Remove when: `isolate_blocks` is removed.
    """
    if isinstance(request._block_hasher, _Isolated):
        _hash_by(request, request._block_hasher.shared)


def _hash_by(request: "Request", hasher: "Callable[[Request], list[BlockHash]]") -> None:
    request._block_hasher = hasher
    request.block_hashes.clear()
    request.update_block_hashes()


def drop_sampled_tokens(request: "Request", output: "ModelRunnerOutput") -> None:
    """Removes what a step sampled or pooled for a request from the step's output.

    Reason: vLLM can reject drafts, but not a step.
    Remove when: a connector or a runner can ask for a step to be repeated.
    """
    index = output.req_id_to_index[request.request_id]
    if output.sampled_token_ids:
        output.sampled_token_ids[index] = []
    if output.pooler_output:
        output.pooler_output[index] = None


def fail_request(scheduler: "Scheduler", request: "Request", reason: str) -> None:
    """Ends a request with an error for its client, once the scheduler has taken the output of the current step.

    Reason: a runner's output has no place for the error of a request. vLLM ends requests whose grammar cannot be
    compiled in the same place, with the same kind of error.
    Remove when: `ModelRunnerOutput` has one.
    """
    errors = scheduler.grammar_compile_error_reqs
    if isinstance(errors, dict):
        from vllm.outputs import RequestError

        errors[request.request_id] = RequestError(code="validation_error", message=reason)
    else:
        # of vLLM 0.32, whose clients get an error without a reason
        errors.add(request.request_id)


def tells_clients_of_errors() -> bool:
    """Returns whether the output of a request can have an error with a reason.

    Reason: vLLM 0.32 has no place for it. It would answer a failed request that pools with an empty vector.
    Remove when: vLLM 0.32 is no longer supported.
    """
    from vllm.v1.engine import EngineCoreOutput

    return "error" in EngineCoreOutput.__struct_fields__


def pool_nothing(outputs: "dict[int, EngineCoreOutputs]", failed: "Collection[str]") -> None:
    """Gives the outputs of failed requests an empty vector.

    Reason: vLLM takes an output without a vector for one with tokens. For a request that pools, this is an assertion
    that ends the engine. A server raises the error of the output first; `LLM` returns the empty vector, as it does for
    aborted requests.
    Remove when: `OutputProcessor.process_outputs` handles the errors of requests that pool.
    """
    import torch

    for of_client in outputs.values():
        for output in of_client.outputs:
            if output.request_id in failed:
                output.pooling_output = torch.empty(0)


def drop_steps_in_flight(request: "Request") -> None:
    """Discards the results of steps in flight for a running request; its next step computes from `num_computed_tokens`.

    Reason: if a load within a step has failed, vLLM takes back only that step. With async scheduling the next one is
    already planned; it also reads the missing blocks, and follows a token that was taken back.
    Remove when: `Scheduler._handle_invalid_blocks` marks the output in flight as stale, as `_preempt_request` does.
    """
    request.drop_stale_output = True
    request.num_stale_output_tokens = request.num_in_flight_tokens
    request.num_output_placeholders = 0
    request.spec_token_ids = []


def release_reservations(scheduler: "Scheduler") -> None:
    """Releases the room reserved for the rest of prompts whose load has failed, so that they start again.

    Reason: vLLM reserves it until such a prompt is computed, although the request gives all of its blocks back. If that
    is more than is free, no request can start any more.
    Remove when: `Scheduler._update_waiting_for_remote_kv` takes a request that it frees out of `_inflight_prefills`.
    """
    for request_id in scheduler.failed_recving_kv_req_ids:
        request = scheduler.requests.get(request_id)
        if request is not None and not request.num_computed_tokens:
            scheduler._inflight_prefills.discard(request)


def wait_for_blocks_again(scheduler: "Scheduler", request: "Request", num_computed: int) -> None:
    """Moves a running request, whose last step was taken back, to the queue of requests that wait for a load.

    num_computed: its computed tokens before that step. The request keeps its blocks. Once the worker reports the load
    as received, vLLM sends it to the worker as a new request, as after a first load.

    Reason: as for `drop_sampled_tokens`; vLLM moves requests there only from its queue of waiting requests.
    Remove when: as for `drop_sampled_tokens`.
    """
    from vllm.v1.request import RequestStatus

    scheduler.running.remove(request)
    # without the tokens scheduled for it, including rows of a prompt remainder and of drafts
    request.num_computed_tokens = num_computed
    request.spec_token_ids = []
    # vLLM ignores drafts for a request in its prefill
    request.is_prefill_chunk = True
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler._inflight_prefills.add(request)
    scheduler._enqueue_waiting_request(request)
