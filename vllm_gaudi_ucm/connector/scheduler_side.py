"""The connector in the scheduler: what the store holds of a request, what is to be loaded, what is to be saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from vllm_gaudi_ucm.connector.known_keys import KnownKeys
from vllm_gaudi_ucm.connector.lookup import Lookup, LookupThread
from vllm_gaudi_ucm.connector.metadata import BlockLoad, BlockSave, UcmMetadata
from vllm_gaudi_ucm.connector.request_keys import RequestKeys
from vllm_gaudi_ucm.connector.waiting_prefetch import WaitingPrefetch
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.plan import PrefetchPlan
from vllm_gaudi_ucm.sparse.request_options import read_extra_args

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_gaudi_ucm.connector.setup import ConnectorSetup

logger = plugin_logger(__name__)

# A store in memory answers within this; a slower one lets the request come back in the next step.
GRACE_SECONDS = 0.002


class LookupCounts(msgspec.Struct, kw_only=True):
    """Requests: looked up, answered too late. Blocks: hits, and those of the prompt that were none."""

    requests: int = 0
    timeouts: int = 0
    hit_blocks: int = 0
    missed_blocks: int = 0


@dataclass
class _State:
    """Of a live request. is_closed: nothing is loaded for it any more. saved: blocks that were sent, or found."""

    request: Request
    keys: RequestKeys
    lookup: Lookup | None = None
    is_closed: bool = False
    loading: BlockLoad | None = None
    saved: int = 0


class SchedulerSide:
    """Follows every request from its arrival to its end. Never raises for what a request holds (its salt, say).

    Args:
        setup: of the engine.
        block_table: block ids of a live request.
        cached_tokens: leading tokens of a request that the device's prefix cache holds.
    """

    def __init__(
        self,
        setup: ConnectorSetup,
        block_table: Callable[[str], list[int]],
        cached_tokens: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        self._setup = setup
        self._block_table = block_table
        self._cached_tokens = cached_tokens
        self._block_size = setup.block_size
        self._states: dict[str, _State] = {}
        self._epoch = b""
        self._loads: list[BlockLoad] = []
        self.known = KnownKeys()
        self.counts = LookupCounts()
        self.store = setup.open_store()
        self._lookups = LookupThread(self.store)
        batch_size = setup.vllm_config.scheduler_config.max_num_seqs
        self._waiting = WaitingPrefetch(setup.prefetch_options, batch_size, self._lookups, self._wanted_keys)
        self._plan = PrefetchPlan()

    def begin(self, request: Request) -> None:
        """A request has arrived."""
        keys = self._new_keys(request)
        if keys is not None:
            self._states[request.request_id] = _State(request, keys)

    def _new_keys(self, request: Request) -> RequestKeys | None:
        extra_args = None if request.sampling_params is None else request.sampling_params.extra_args
        try:
            namespace = self._setup.namespace(read_extra_args(extra_args))
        except ValueError:
            return None  # refused where requests are checked; one that came another way is not stored
        if self._epoch:
            namespace = sha256(namespace + self._epoch).digest()
        return RequestKeys(request, namespace, self._block_size)

    def end(self, request_id: str) -> None:
        """It has finished or was aborted; the worker ends a load of it."""
        self._states.pop(request_id, None)
        self._waiting.forget(request_id)

    def plan_prefetch(self, waiting: Iterable[Request]) -> None:
        """Before a step is scheduled: what to bring to host memory for those that will not all get their turn in it."""
        self._plan = self._waiting.plan(waiting)

    def _wanted_keys(self, request: Request) -> list[bytes] | None:
        """Of the blocks that `matched_tokens` will ask for when the request's turn comes."""
        state = self._states.get(request.request_id)
        # one that has loaded already waits with its tokens counted as computed
        if state is None or request.num_computed_tokens or not self._may_load(state):
            return None
        keys = self._keys(state, (request.num_tokens - 1) // self._block_size)
        return None if keys is None else keys[self._cached_tokens(request) // self._block_size :]

    def _may_load(self, state: _State) -> bool:
        return not state.is_closed and not state.request.skip_reading_prefix_cache and self._setup.loads

    def matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Tokens after the first `num_computed` that the store holds; None: it has not answered yet.

        The last token is never among them: its logits are wanted.
        """
        state = self._states.get(request.request_id)
        if state is None or not self._may_load(state):
            return 0
        first, end = num_computed // self._block_size, (request.num_tokens - 1) // self._block_size
        lookup = self._lookup(state, first, end)
        if lookup is None:
            return 0
        if lookup.hits is None and not lookup.answered.wait(GRACE_SECONDS):
            if self._lookups.age(lookup) < self._setup.options.lookup_deadline:
                return None
            self.counts.timeouts += 1
            state.is_closed = True
            return 0
        hits = lookup.hits or 0
        self.known.add(lookup.keys[:hits])
        self.known.missed(lookup.keys[hits:])
        return hits * self._block_size if hits >= self._setup.options.min_hit_blocks else 0

    def _lookup(self, state: _State, first: int, end: int) -> Lookup | None:
        """The question that was asked before for these blocks, or a new one; None where there is nothing to ask."""
        asked = state.lookup
        if asked is not None and (asked.first_block, asked.first_block + len(asked.keys)) == (first, end):
            return asked
        keys = self._keys(state, end)
        if keys is None or first >= end:
            return None
        self.counts.requests += 1
        state.lookup = self._lookups.ask(keys[first:], first)
        return state.lookup

    def _keys(self, state: _State, blocks: int) -> list[bytes] | None:
        try:
            return state.keys.first(blocks)
        except ValueError as error:
            logger.warning("request %s has no keys and is not stored: %s", state.request.request_id, error)
            del self._states[state.request.request_id]
            return None

    def admitted(self, request: Request, block_ids: list[int], num_external: int) -> None:
        """It has blocks now; `num_external` of its tokens are to come from the store."""
        state = self._states.get(request.request_id)
        if state is None or not num_external or state.lookup is None:
            return
        lookup, count = state.lookup, num_external // self._block_size
        self.counts.hit_blocks += count
        self.counts.missed_blocks += len(lookup.keys) - count
        targets = block_ids[lookup.first_block : lookup.first_block + count]
        load = BlockLoad(request.request_id, list(lookup.keys[:count]), targets)
        self._loads.append(load)
        self._waiting.forget(request.request_id)
        self._waiting.used(load.keys)
        # once: what could not be loaded is computed, and not asked for again
        state.is_closed, state.lookup, state.loading = True, None, load

    def metadata(self, scheduler_output: SchedulerOutput) -> UcmMetadata:
        """Of the step that was just scheduled."""
        loads, self._loads = self._loads, []
        plan, self._plan = self._plan, PrefetchPlan()
        saves: list[BlockSave] = []
        if self._setup.saves:
            for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
                state = self._states.get(request_id)
                if state is not None:
                    saves += self._new_blocks(state, num_scheduled)
        counts = self.counts
        lookups = (counts.requests, counts.timeouts, counts.hit_blocks, counts.missed_blocks)
        return UcmMetadata(loads, saves, plan, lookups)

    def _new_blocks(self, state: _State, num_scheduled: int) -> list[BlockSave]:
        """Blocks that this step fills, and those before that nobody has stored. Drafts may turn out wrong: they do not
        count, as they are no tokens of the request yet."""
        request = state.request
        end = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
        full = end // self._block_size
        if full <= state.saved:
            return []
        keys = self._keys(state, full)
        if keys is None:
            return []
        block_ids = self._block_table(request.request_id)
        # memory mode may have put the null block in the place of one that has left the device
        new = [index for index in range(state.saved, full) if block_ids[index] and keys[index] not in self.known]
        self.known.add(keys[index] for index in new)
        state.saved = full
        return [BlockSave(keys[index], block_ids[index]) for index in new]

    def loaded(self, request_ids: set[str], invalid_block_ids: set[int]) -> None:
        """The loads of these requests have ended. One that got all its blocks may load again, after a preemption."""
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is None or state.loading is None:
                continue
            blocks = zip(state.loading.keys, state.loading.block_ids, strict=True)
            lost = [key for key, block_id in blocks if block_id in invalid_block_ids]
            # computed now, and then saved again
            self.known.discard(lost)
            state.is_closed, state.loading = bool(lost), None

    def unsaved(self, keys: list[bytes]) -> None:
        """The worker could not store these blocks."""
        self.known.discard(keys)

    def clear(self) -> bool:
        """From now on nothing that was stored before is found: the weights may have been replaced.

        What else they are is not known, so nobody else finds what this engine stores from now on. Blocks in the memory
        of this process are freed; those in a folder or a server stay, for whoever has the weights that they belong to.
        What requests compute that have begun rests on what was computed before, and is not stored.
        """
        self._epoch = os.urandom(16)
        self.known.clear()
        if self._setup.options.store.kind == "memory":
            self.store.clear()
        for request_id, state in list(self._states.items()):
            self._waiting.forget(request_id)
            if state.request.num_computed_tokens:
                del self._states[request_id]
                continue
            keys = self._new_keys(state.request)
            assert keys is not None, "it had keys before"
            self._states[request_id] = _State(state.request, keys, is_closed=state.is_closed)
        return True

    @property
    def num_requests(self) -> int:
        return len(self._states)

    def close(self) -> None:
        self._lookups.close()
        self.store.close()
