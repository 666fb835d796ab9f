"""The state of a live request in the connector's scheduler side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.connector.metadata import BlockLoad, BlockSave, RecordSave
from vllm_gaudi_ucm.store.block_key import chain_keys
from vllm_gaudi_ucm.vllm_api.scheduling import generate_block_hash_extra_keys

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.group_keys import GroupKeys, Tables
    from vllm_gaudi_ucm.connector.lookup import KnownKeys, Lookup
    from vllm_gaudi_ucm.connector.partial_loads import PartialLoads
    from vllm_gaudi_ucm.vllm_api.steps import Request


@dataclass
class RequestState:
    """is_dense: whether its keys are for requests that are dense under a sparse method. is_closed: no further blocks
    are loaded for it. lost: blocks of its load that a worker could not load. is_late: its load was late for a worker.
    saved: blocks that were sent, or found. is_whole: its next load leaves nothing in the store. has_records: the
    summaries of its prompt were offered. on_device: its first blocks that were not looked up.
    """

    request: Request
    keys: RequestKeys
    is_dense: bool
    lookup: Lookup | None = None
    is_closed: bool = False
    loading: BlockLoad | None = None
    lost: set[int] = field(default_factory=set)
    is_late: bool = False
    saved: int = 0
    is_whole: bool = False
    has_records: bool = False
    on_device: int = 0

    def begin_behind(self, blocks: int) -> None:
        """Notes how many blocks the device had when the request was looked up; after a preemption its own are there."""
        if not self.saved:
            self.on_device = blocks

    def ask(self, lookup: Lookup) -> None:
        """Sets the current look-up; an earlier one is dropped."""
        self.drop_lookup()
        self.lookup = lookup

    def drop_lookup(self) -> None:
        """Drops the current look-up; it is made again if needed."""
        if self.lookup is not None:
            self.lookup.drop()
        self.lookup = None

    def close(self) -> None:
        self.is_closed = True

    def begin_load(self, load: BlockLoad) -> None:
        """Begins the load. Blocks that cannot be loaded are computed, not loaded again."""
        self.is_closed, self.lookup, self.loading = True, None, load
        self.lost, self.is_late = set(), False

    def lose(self, block_ids: set[int]) -> None:
        """Notes that a worker could not load some of these blocks; others may still be loading."""
        if self.loading is not None:
            self.lost |= block_ids.intersection(self.loading.block_ids)

    def miss_deadline(self) -> None:
        """Notes that its load was too late on a worker."""
        self.is_late = True

    def end_load(self) -> list[bytes]:
        """Ends the load, which every worker has ended. If all blocks were loaded, it may load again after a preemption.

        Returns the keys of blocks that a worker could not load: all workers compute these.
        """
        assert self.loading is not None, "none has begun"
        blocks = zip(self.loading.keys, self.loading.block_ids, strict=True)
        lost = [key for key, block_id in blocks if block_id in self.lost]
        self.is_closed, self.loading = bool(lost), None
        return lost

    def begin_anew(self) -> None:
        """Starts again after a failed partial load: the next load is whole, or there is none if time is up. A whole
        load that failed, because its window is behind other blocks, is not tried a third time.
        """
        self.is_closed, self.is_whole, self.loading = self.is_late or self.is_whole, True, None


class RequestKeys:
    """Keys of the full blocks, each made once.

    Args:
        request: a request whose tokens only grow.
        namespace: digest of everything else that the KV depends on.
    """

    def __init__(self, request: Request, namespace: bytes, block_size: int) -> None:
        self._request = request
        self._namespace = namespace
        self._block_size = block_size
        self._keys: list[bytes] = []
        self._next_feature = 0

    @property
    def known(self) -> list[bytes]:
        return self._keys

    def first(self, blocks: int) -> list[bytes]:
        """Returns the keys of the first `blocks` blocks.

        Raises ValueError if there is no key: an extra key of the request is not plain data, or the request has fewer
        full blocks.
        """
        known, size = len(self._keys), self._block_size
        if known < blocks:
            extras: list[tuple[Any, ...] | None] = []
            for block in range(known, blocks):
                extra, self._next_feature = generate_block_hash_extra_keys(
                    self._request, block * size, (block + 1) * size, self._next_feature
                )
                extras.append(_without_adapter(self._request, extra))
            parent = self._keys[-1] if self._keys else None
            tokens = self._request.all_token_ids[known * size : blocks * size]
            self._keys += chain_keys(self._namespace, parent, tokens, size, extras)
        return self._keys[:blocks]


def _without_adapter(request: Request, extra: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Returns the extra keys without the name and path of the adapter, whose files are in the namespace."""
    adapter = request.lora_request
    if adapter is None or extra is None:
        return extra
    return tuple(key for key in extra if key != ("lora", adapter.lora_name, adapter.lora_path)) or None


class SavePlan:
    """Plans saves in the scheduler, once a step is scheduled.

    Args:
        known: keys that the store has, or will have soon.
        groups: keys in each KV-cache group.
        block_tables: of a live request.
        keys: of the first n blocks of a request, None if it has none.
        partial: loads that may leave blocks in the store, None if all are whole.
    """

    def __init__(
        self,
        known: KnownKeys,
        block_size: int,
        groups: GroupKeys,
        block_tables: Callable[[str], Tables],
        keys: Callable[[RequestState, int], list[bytes] | None],
        partial: PartialLoads | None,
    ) -> None:
        self._known = known
        self._partial = partial
        self._block_size = block_size
        self._groups = groups
        self._block_tables = block_tables
        self._keys = keys

    def blocks(self, state: RequestState, num_scheduled: int) -> list[BlockSave]:
        """Returns the blocks that this step fills, and earlier ones that are not stored. Drafts do not count, because
        they may be rejected.
        """
        request = state.request
        if self._partial is not None and self._partial.may_be_repeated(request.request_id):
            return []
        end = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
        full = end // self._block_size
        if full <= state.saved:
            return []
        keys = self._keys(state, full)
        if keys is None:
            return []
        # memory mode, or a window, may have put the null block in its place
        held = self._groups.on_device(
            self._groups.keys_of(keys[state.saved :]), self._block_tables(request.request_id), state.saved
        )
        new = [block for block in held if block.key not in self._known]
        self._known.sent(block.key for block in new)
        state.saved = full
        return [BlockSave(*block) for block in new]

    def records(self, state: RequestState, num_scheduled: int) -> list[RecordSave]:
        """Returns the summaries of a prompt whose last token this step computes."""
        request = state.request
        if self._partial is None or state.has_records:
            return []
        if request.num_computed_tokens + num_scheduled < request.num_prompt_tokens:
            return []
        state.has_records = True
        keys = state.keys.known[: (request.num_prompt_tokens - 1) // self._block_size]
        found = self._partial.record_saves(request, keys, self._block_tables(request.request_id)[0])
        new = [record for record in found if record.key not in self._known]
        self._known.sent(record.key for record in new)
        return new
