"""Prefix caching of models with layers that keep a state: a hit ends at a block behind which the state is kept.

A state takes as much memory as hundreds of tokens, so only some are kept: those behind the last full block of each
chunk of a prompt, those behind blocks that decodes have filled, and of these the ones used last. A request that decodes
gives up the state behind its previous block first. A request that begins gets a copy of one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_ucm.block_policies.policy import BlockPolicy, Hit, Turn
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.protocol.attachments import computed_tokens
from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlocks, KVCacheManager, Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock
    from vllm_gaudi_ucm.vllm_api.steps import Request, SchedulerOutput


class _Step(NamedTuple):
    """The last step of a request. computed: its tokens before the step. rows: in the step, drafts included."""

    computed: int
    rows: int


class KeptStates(BlockPolicy):
    """Decides which states are kept, by the hash of the block behind which they are.

    Args:
        requests: the live requests, by id.
        count: states that are kept at most; they have the numbers 1 to `count`.
        few: a request with so many rows, or fewer, in a step decodes. Its state is kept before the next step, when the
            right tokens are known.
        keeps_decodes: whether they are known then.
    """

    name = "kept states"

    def __init__(
        self, requests: Mapping[str, Request], block_size: int, count: int, few: int, *, keeps_decodes: bool = True
    ) -> None:
        self._requests = requests
        self._size = block_size
        self._few = few
        self._free = list(range(count, 0, -1))
        # the least recently used first
        self._kept: OrderedDict[Any, int] = OrderedDict()
        self._reads: dict[str, int] = {}
        self._keeps_decodes = keeps_decodes
        self._steps: dict[str, _Step] = {}
        # behind the last block that a decode has filled
        self._decoded: dict[str, Any] = {}

    def begin_step(self) -> None:
        self._reads = {}

    def find(self, manager: KVCacheManager, request: Request, hit: Hit) -> Hit:
        """Shortens a hit to the blocks before the last kept state."""
        count = self._last_kept(request, hit.tokens // self._size)
        blocks = KVCacheBlocks(tuple(list(group)[:count] for group in hit.blocks.blocks))
        return hit._replace(blocks=blocks, full=blocks, tokens=count * self._size)

    def _last_kept(self, request: Request, blocks: int) -> int:
        hashes = request.block_hashes
        return next((count for count in range(blocks, 0, -1) if hashes[count - 1] in self._kept), 0)

    def given(self, turn: Turn) -> None:
        """Has a request that begins behind blocks of the prefix cache read the state behind them."""
        if turn.begins and turn.found and turn.computed == turn.found:
            key = turn.request.block_hashes[turn.found // self._size - 1]
            self._kept.move_to_end(key)
            self._reads[turn.request.request_id] = self._kept[key]

    def reset(self) -> None:
        self._free += self._kept.values()
        self._kept.clear()

    def orders(self, scheduler_output: SchedulerOutput) -> dict[str, Any]:
        """Returns which states the step's requests read, and which states it keeps."""
        scheduled = scheduler_output.num_scheduled_tokens
        reads = {request_id: number for request_id, number in self._reads.items() if request_id in scheduled}
        used, keeps = set(reads.values()), list[tuple[str, int, int]]()
        copies = list[tuple[str, int, int]]()
        for request_id, computed in computed_tokens(scheduler_output):
            if self._keeps_decodes:
                copies += self._decoded_block(request_id, computed, used)
                self._steps[request_id] = _Step(computed, scheduled[request_id])
            end = (computed + scheduled[request_id]) // self._size * self._size
            if scheduled[request_id] <= self._few or end <= computed:
                continue
            hashes = self._requests[request_id].block_hashes
            number = self._number(hashes[end // self._size - 1], used)
            if number:
                used.add(number)
                keeps.append((request_id, end, number))
        return {"state_reads": reads, "state_keeps": keeps, "state_copies": copies}

    def _decoded_block(self, request_id: str, computed: int, used: set[int]) -> Iterator[tuple[str, int, int]]:
        """Yields the order to keep the state behind a block, if the request's last step was a decode that filled it.

        computed: its tokens before this step. used: see `_number`.
        """
        last, end = self._steps.get(request_id), computed // self._size * self._size
        if last is None or last.rows > self._few or not last.computed < end <= last.computed + last.rows:
            return
        hashes = self._requests[request_id].block_hashes
        if len(hashes) * self._size < end:
            # with asynchronous scheduling a token may not be known yet
            return
        key = hashes[end // self._size - 1]
        previous = self._decoded.get(request_id)
        if previous in self._kept:
            self._kept.move_to_end(previous, last=False)
        number = self._number(key, used)
        self._decoded[request_id] = key
        if number:
            used.add(number)
            yield request_id, end, number

    def preempted(self, request: Request, tables: Sequence[Sequence[KVCacheBlock]]) -> None:
        self._forget(request.request_id)

    def ended(self, request: Request) -> None:
        self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        self._steps.pop(request_id, None)
        self._decoded.pop(request_id, None)

    def _number(self, key: Any, used: set[int]) -> int:
        """Returns where to keep another state; 0 if it is kept already, or if the step uses all places.

        used: places that the step reads, or writes already.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return 0
        if self._free:
            number = self._free.pop()
        else:
            oldest = next((one for one, number in self._kept.items() if number not in used), None)
            if oldest is None:
                return 0
            number = self._kept.pop(oldest)
        self._kept[key] = number
        return number


def make_kept_states(scheduler: Scheduler, config: UcmConfig, totals: MemoryTotals) -> KeptStates:
    if len(scheduler.kv_cache_config.kv_cache_groups) > 1:
        raise UnsupportedFeatureError("several KV-cache groups with kept states", "ucm.kv_cache.kept_states")
    drafts = scheduler.vllm_config.num_speculative_tokens
    return KeptStates(
        scheduler.requests,
        scheduler.block_size,
        config.kv_cache.kept_states,
        1 + drafts,
        # of a step that still runs, it is not known which drafts are right
        keeps_decodes=not (drafts and scheduler.scheduler_config.async_scheduling),
    )
