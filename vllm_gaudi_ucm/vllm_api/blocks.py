"""Blocks and requests of vLLM's scheduler, where it has no call for what we do with them.

Each entry names its reason and when to remove it.
"""

from typing import TYPE_CHECKING, cast

from vllm_gaudi_ucm.logger import plugin_logger

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = plugin_logger(__name__)


def kv_block_lists(manager: "KVCacheManager") -> "dict[str, list[KVCacheBlock]]":
    """The block list of each request, in the order of its context; to be changed in place.

    Reason: vLLM replaces blocks of a running request by the null block for attention types that say so
    (`SingleTypeKVCacheManager.remove_skipped_blocks`), but has no call for blocks that its caller names.
    Remove when: `KVCacheManager` can replace named blocks of a request.
    """
    (group,) = manager.coordinator.single_type_managers
    return group.req_to_blocks


def forget_cached_blocks(manager: "KVCacheManager", request_id: str, first: int) -> None:
    """The prefix cache does not know blocks `first` and following of a request any more, until the request is allotted
    slots again with these blocks full.

    Reason: `KVCacheManager.evict_blocks` leaves them counted as cached, so that they would never be cached again.
    Remove when: `KVCacheManager` can be told that what a step computes is not certain yet.
    """
    (group,) = manager.coordinator.single_type_managers
    blocks = group.req_to_blocks.get(request_id, [])[first:]
    manager.evict_blocks({block.block_id for block in blocks if not block.is_null})
    cached = group.num_cached_block
    if request_id in cached:
        cached[request_id] = min(cached[request_id], first)


def forget_uncomputed_blocks(manager: "KVCacheManager", request: "Request", block_size: int) -> None:
    """The prefix cache does not know blocks of a request that is about to be preempted and that nobody has computed.

    Called by our `_preempt_request`, before a step counts as scheduled: `num_computed_tokens` is what was computed.

    Reason: under `--scheduling-policy priority` vLLM preempts requests that the same step has scheduled already. What
    they were to fill stands in the prefix cache then, and they find it themselves when they resume: wrong tokens.
    Remove when: `Scheduler.schedule` takes these blocks out of the cache where it takes the request out of the step.
    """
    forget_cached_blocks(manager, request.request_id, request.num_computed_tokens // block_size)


def kv_block_bytes(manager: "KVCacheManager") -> int:
    """Bytes of a block of all layers.

    Reason: the scheduler's classes know pages of layers only.
    Remove when: `KVCacheConfig` says it.
    """
    (group,) = manager.kv_cache_config.kv_cache_groups
    return group.kv_cache_spec.page_size_bytes * len(group.layer_names)


class _Salted:
    """A request as vLLM's block hasher sees it: with a salt of its own, and everything else of `request`."""

    def __init__(self, request: "Request", mark: str) -> None:
        self._request = request
        # no user's: theirs are text
        self.cache_salt = (mark, request.cache_salt)

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)


def set_blocks_apart(request: "Request", mark: str) -> None:
    """From now on nobody finds the blocks of a request by their hashes but requests with the same mark and salt.

    For a request that nobody has looked blocks up for yet. Its `cache_salt` stays what it is.

    Reason: vLLM makes block hashes of fields of the request alone, and the one for such uses, `cache_salt`, is the
    user's, and goes to connectors and events.
    Remove when: a scheduler can give a request extra keys of its own.
    """
    hasher = request._block_hasher
    if hasher is None:
        return  # neither prefix cache nor connector
    # keeps no request: that would be a circle
    request._block_hasher = lambda grown: hasher(cast("Request", _Salted(grown, mark)))
    request.block_hashes.clear()
    request.update_block_hashes()


def step_never_was(request: "Request", output: "ModelRunnerOutput") -> None:
    """Takes what a step sampled for a request, if it sampled something, out of the step's output.

    Reason: vLLM has rejected drafts, but no rejected steps.
    Remove when: a connector or a runner can ask for a step to be repeated.
    """
    output.sampled_token_ids[output.req_id_to_index[request.request_id]] = []


def wait_for_blocks_again(scheduler: "Scheduler", request: "Request", num_computed: int) -> None:
    """Puts a running request, whose last step was taken back, where requests wait for a connector's load.

    num_computed: its computed tokens before that step. It keeps its blocks, and goes on as after its first load once
    the worker reports it as received: vLLM sends it to the worker as a new request then.

    Reason: as for `step_never_was`; vLLM moves requests there from its queue of waiting ones only.
    Remove when: as for `step_never_was`.
    """
    from vllm.v1.request import RequestStatus

    scheduler.running.remove(request)
    # whatever was scheduled for it: rows of a prompt's tail and of drafts count, too
    request.num_computed_tokens = num_computed
    request.spec_token_ids = []
    # drafts that were proposed behind the token are ignored
    request.is_prefill_chunk = True
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler._inflight_prefills.add(request)
    scheduler._enqueue_waiting_request(request)
