"""The connector in the scheduler: which blocks of a request are stored, which to load, which to save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
from vllm.platforms import current_platform

from vllm_gaudi_ucm.connector.adapter_digests import AdapterDigests
from vllm_gaudi_ucm.connector.lookup import KnownKeys, Lookup, LookupThread
from vllm_gaudi_ucm.connector.metadata import BlockLoad, BlockSave, RecordSave, UcmMetadata
from vllm_gaudi_ucm.connector.partial_loads import PartialLoads
from vllm_gaudi_ucm.connector.request_state import RequestKeys, RequestState, SavePlan
from vllm_gaudi_ucm.connector.waiting_prefetch import WaitingPrefetch
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.plan import PrefetchPlan
from vllm_gaudi_ucm.vllm_api.blocks import is_isolated

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.group_keys import Tables
    from vllm_gaudi_ucm.connector.setup import ConnectorSetup
    from vllm_gaudi_ucm.memory_mode.scheduler_side import Fetched, OffloadScheduler
    from vllm_gaudi_ucm.vllm_api.steps import Request, SchedulerOutput

logger = plugin_logger(__name__)


class LookupCounts(msgspec.Struct, kw_only=True):
    """Requests: looked up, answered too late. Blocks of prompts: hits and misses."""

    requests: int = 0
    timeouts: int = 0
    hit_blocks: int = 0
    missed_blocks: int = 0


class SchedulerSide:
    """Follows every request from its arrival to its end. Never raises for the content of a request (such as its salt).

    Args:
        block_tables: of a live request.
        cached_tokens: leading tokens of a request that the device's prefix cache holds.
        offload: KV offload, with which loads may leave blocks in the store.
    """

    def __init__(
        self,
        setup: ConnectorSetup,
        block_tables: Callable[[str], Tables],
        cached_tokens: Callable[[Request], int] = lambda request: 0,
        offload: OffloadScheduler | None = None,
    ) -> None:
        self._setup = setup
        setup.namespace(sparse=False)  # now, because it reads files, which may be missing
        self._cached_tokens = cached_tokens
        self._block_size = setup.block_size
        self._groups = setup.group_keys
        self._states: dict[str, RequestState] = {}
        self._adapters = AdapterDigests()
        self._epoch = b""
        self._loads: list[BlockLoad] = []
        self._used: list[list[bytes]] = []
        self.known = KnownKeys()
        self.counts = LookupCounts()
        self._saves_wait = setup.saves and setup.options.patience(current_platform.device_type) > 0
        self._hurries_saves = False
        self.store = setup.open_lookups()
        self._lookups = LookupThread(self.store, setup.options.lookup_deadline)
        batch_size = setup.vllm_config.scheduler_config.max_num_seqs
        self._waiting = WaitingPrefetch(
            setup.prefetch_options, batch_size, self._lookups, self._wanted_keys, self._wanted_part
        )
        self._plan = PrefetchPlan()
        self._partial = None if offload is None else self._partial_loads(offload)
        self._saves = SavePlan(self.known, self._block_size, self._groups, block_tables, self._keys, self._partial)

    def _partial_loads(self, offload: OffloadScheduler) -> PartialLoads | None:
        record_blocks = self._setup.summaries_per_record(offload.method)
        if not self._setup.loads_partly or not record_blocks:
            return None
        return PartialLoads(offload, self._block_size, record_blocks, self._waiting.order)

    def wanted_by_query(self, request_id: str, numbers: list[int]) -> None:
        """Receives the logical blocks that a request's query would choose among all, for partial loads."""
        state = self._states.get(request_id)
        if state is not None and self._partial is not None:
            keys = state.keys.known
            self._waiting.used(keys[number] for number in numbers if number < len(keys))

    def begin(self, request: Request) -> None:
        self._states[request.request_id] = RequestState(request, self._new_keys(request), is_isolated(request))

    def next_input(self, request: Request) -> None:
        """Continues a session. If it may be sparse from now on, its blocks are stored under other keys, including the
        computed ones, from which the keys of later blocks follow.
        """
        state = self._states.get(request.request_id)
        if state is None or state.is_dense == is_isolated(request):
            return
        self._waiting.forget(request.request_id)
        state.drop_lookup()
        keys = self._new_keys(request)
        self._states[request.request_id] = RequestState(request, keys, False, is_closed=state.is_closed)

    def _new_keys(self, request: Request) -> RequestKeys:
        # our scheduler has marked the request if it is dense under a sparse method
        namespace = self._setup.namespace(not is_isolated(request))
        if self._epoch:
            namespace = sha256(namespace + self._epoch).digest()
        if request.lora_request is not None:
            namespace = self._adapters.namespace(namespace, request.lora_request.lora_path)
        return RequestKeys(request, namespace, self._block_size)

    def end(self, request_id: str) -> None:
        """Ends a request that has finished or was aborted; the worker ends its load."""
        state = self._states.pop(request_id, None)
        if state is not None:
            state.drop_lookup()
            if used := self._used_keys(state):
                self._used.append(used)
        self._waiting.forget(request_id)

    def _used_keys(self, state: RequestState) -> list[bytes]:
        """Returns the keys of a request's blocks, and of their summaries, in the order of its context.

        Without those that were on the device: a store that is too small for all is better used for the others.
        """
        first, keys = state.on_device, state.keys.known
        records = [] if self._partial is None else self._partial.all_records(keys, first)
        return [*records, *self._groups.keys_of(keys[first:])]

    def plan_prefetch(self, waiting: Iterable[Request]) -> None:
        """Plans, before a step is scheduled, which blocks of waiting requests to bring to host memory."""
        self._plan = self._waiting.plan(waiting)

    def _wanted_keys(self, request: Request) -> list[bytes] | None:
        """Returns the keys of the blocks that `matched_tokens` will look up when the request's turn comes."""
        state = self._states.get(request.request_id)
        # a request that has loaded already waits with its tokens counted as computed
        if state is None or request.num_computed_tokens or not self._may_load(state):
            return None
        keys = self._keys(state, (request.num_tokens - 1) // self._block_size)
        return None if keys is None else self._groups.keys_of(keys[self._cached_tokens(request) // self._block_size :])

    def _wanted_part(self, request: Request, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the wanted part of blocks that are all stored, up to the last one that may be loaded."""
        if self._partial is None:
            return self._groups.seen(keys, (request.num_tokens - 1) // self._block_size)
        state = self._states.get(request.request_id)
        if state is None or state.is_whole:
            return keys
        every = state.keys.known[: (request.num_tokens - 1) // self._block_size]
        return self._partial.wanted(request, every, len(every) - len(keys))

    def _may_load(self, state: RequestState) -> bool:
        return not state.is_closed and not state.request.skip_reading_prefix_cache and self._setup.loads

    def matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Returns how many tokens after the first `num_computed` the store holds; None if it has not answered yet.

        The last token is never included: its logits are needed.
        """
        state = self._states.get(request.request_id)
        if state is None or not self._may_load(state):
            return 0
        first, end = num_computed // self._block_size, (request.num_tokens - 1) // self._block_size
        state.begin_behind(first)
        lookup = self._lookup(state, first, end)
        if lookup is None:
            return 0
        if not self._lookups.is_answered(lookup):
            if not self._lookups.is_late(lookup):
                return None
            self.counts.timeouts += 1
            state.close()
            return 0
        found = lookup.hits or 0
        if self._waits_for_saves(lookup, found):
            return None
        # those of which all parts are stored
        hits = found // self._groups.count
        self.known.found(lookup.keys[:found])
        if lookup.has_records:
            self.known.found(lookup.records)
        else:
            self.known.missed(lookup.records)
        self.known.missed(lookup.keys[found:])
        return hits * self._block_size if hits >= self._setup.options.min_hit_blocks else 0

    def _waits_for_saves(self, lookup: Lookup, found: int) -> bool:
        """Asks again if the first block that is missing is on its way to the store, where saves wait for idle times."""
        if found == len(lookup.keys) or not self._saves_wait or not self.known.is_in_transit(lookup.keys[found]):
            return False
        asks = self._lookups.ask_again(lookup)
        self._hurries_saves |= asks
        return asks

    def _lookup(self, state: RequestState, first: int, end: int) -> Lookup | None:
        """Returns the earlier look-up of these blocks, or a new one; None if there are no blocks to look up."""
        asked = state.lookup
        if asked is not None and (asked.first_block, asked.first_block + self._blocks(asked)) == (first, end):
            return asked
        keys = self._keys(state, end)
        if keys is None or first >= end:
            return None
        self.counts.requests += 1
        records: list[bytes] = []
        if self._partial is not None and not state.is_whole:
            records = self._partial.record_keys(state.request, keys, first)
        lookup = self._lookups.ask(self._groups.keys_of(keys[first:]), first, records)
        state.ask(lookup)
        return lookup

    def _blocks(self, lookup: Lookup) -> int:
        return len(lookup.keys) // self._groups.count

    def _keys(self, state: RequestState, blocks: int) -> list[bytes] | None:
        try:
            return state.keys.first(blocks)
        except ValueError as error:
            logger.warning("request %s has no keys and is not stored: %s", state.request.request_id, error)
            del self._states[state.request.request_id]
            return None

    def admitted(self, request: Request, tables: Tables, num_external: int) -> None:
        """Starts the load of a request that has blocks now; `num_external` of its tokens come from the store."""
        state = self._states.get(request.request_id)
        if state is None or not num_external or state.lookup is None:
            return
        lookup, count = state.lookup, num_external // self._block_size
        self.counts.hit_blocks += count
        self.counts.missed_blocks += self._blocks(lookup) - count
        load = self._plan_partial(state, lookup, count, tables[0])
        self._waiting.forget(request.request_id)
        if load is None:
            load = self._whole_load(request.request_id, lookup, count, tables)
            self._waiting.used(load.keys)
        self._loads.append(load)
        state.begin_load(load)

    def _whole_load(self, request_id: str, lookup: Lookup, count: int, tables: Tables) -> BlockLoad:
        """Returns which of `count` blocks the request has room for: with a window, what its next token sees."""
        keys = lookup.keys[: count * self._groups.count]
        wanted = self._groups.on_device(keys, tables, lookup.first_block)
        has_gaps = any(0 in blocks[: lookup.first_block + count] for blocks in tables)
        return BlockLoad(
            request_id,
            [one.key for one in wanted],
            [one.block_id for one in wanted],
            # vLLM does not take back some of the blocks of several groups
            is_partial=has_gaps or self._groups.count > 1,
        )

    def runs(self, request: Request) -> None:
        """Notes that a request has blocks now, and computes without loading first."""
        state = self._states.get(request.request_id)
        if state is not None:
            # the store's answer is outdated once the request is preempted
            state.drop_lookup()
        if self._partial is not None:
            self._partial.runs(request)

    def _plan_partial(
        self, state: RequestState, lookup: Lookup, count: int, block_ids: Sequence[int]
    ) -> BlockLoad | None:
        """Plans a partial load; None if everything is loaded."""
        if self._partial is None or state.is_whole or not lookup.has_records or count < len(lookup.keys):
            return None
        if state.request.num_preemptions:  # after the look-up
            return None
        request_id, first = state.request.request_id, lookup.first_block
        keys = state.keys.first(first + count)
        return self._partial.plan(request_id, keys, first, block_ids, lookup.records)

    def fetch(self, request_id: str, fetched: Fetched) -> None:
        """Loads blocks that were left in the store for a request that has run and waits again."""
        assert self._partial is not None, "only a partial load has left something"
        state = self._states.get(request_id)
        # without a state the cache was reset meanwhile: the blocks that are there are old, too
        keys = [] if state is None else state.keys.known[: (state.request.num_prompt_tokens - 1) // self._block_size]
        load = self._partial.fetch(request_id, keys, fetched)
        self._loads.append(load)
        if state is not None:
            state.begin_load(load)

    def metadata(self, scheduler_output: SchedulerOutput) -> UcmMetadata:
        """Returns the message for the step that was just scheduled."""
        self._lookups.end_step()
        loads, self._loads = self._loads, []
        used, self._used = self._used, []
        plan, self._plan = self._plan, PrefetchPlan()
        saves: list[BlockSave] = []
        records: list[RecordSave] = []
        if self._setup.saves:
            for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
                state = self._states.get(request_id)
                if state is not None:
                    saves += self._saves.blocks(state, num_scheduled)
                    records += self._saves.records(state, num_scheduled)
        counts = self.counts
        lookups = (counts.requests, counts.timeouts, counts.hit_blocks, counts.missed_blocks)
        hurries, self._hurries_saves = self._hurries_saves, False
        return UcmMetadata(loads, saves, records, prefetch=plan, lookups=lookups, used=used, hurries_saves=hurries)

    def lost(self, block_ids: set[int], late: Iterable[str]) -> None:
        """Notes blocks that a worker could not load, and requests whose partial loads were too late there. Other
        workers may still be loading: what happens to a request is decided once all have ended.
        """
        if block_ids:
            for state in self._states.values():
                state.lose(block_ids)
        for request_id in self._states.keys() & late:
            self._states[request_id].miss_deadline()

    def failed(self, request_ids: set[str]) -> None:
        """Handles requests with blocks left in the store, or before a window, of which not all others could be loaded.
        They start again with a whole load, or compute if time is up or this was tried before.
        """
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is None or state.loading is None:
                continue
            # stored again once they are computed again
            self.known.discard(record.key for record in state.loading.records)
            if self._partial is None:
                # and it is unknown which blocks could not be loaded
                self.known.discard(state.loading.keys)
            state.begin_anew()

    def loaded(self, request_ids: set[str]) -> None:
        """Ends the loads of these requests. A request that got all its blocks may load again after a preemption."""
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None and state.loading is not None:
                # computed now, and then saved again
                self.known.discard(state.end_load())

    def unsaved(self, keys: list[bytes]) -> None:
        """Notes blocks that the worker could not store."""
        self.known.discard(keys)

    def clear(self) -> bool:
        """Makes everything stored before unfindable, because the weights may have been replaced.

        The new weights have no known digest, so other engines do not find what this one stores from now on. Blocks in
        the memory of this process are freed; those in a folder or a server stay, for engines with their weights.
        Running requests build on earlier results, so their blocks are not stored.
        """
        self._epoch = os.urandom(16)
        self.known.clear()
        if self._setup.options.store.ends_with_process:
            self.store.clear()
        for request_id, state in list(self._states.items()):
            self._waiting.forget(request_id)
            state.drop_lookup()
            if state.request.num_computed_tokens:
                del self._states[request_id]
                continue
            keys = self._new_keys(state.request)
            self._states[request_id] = RequestState(state.request, keys, state.is_dense, is_closed=state.is_closed)
        return True

    @property
    def num_requests(self) -> int:
        return len(self._states)

    def close(self) -> None:
        self._lookups.close()
        self.store.close()
