"""What a step makes that the store does not have yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.metadata import BlockSave, RecordSave

if TYPE_CHECKING:
    from vllm_gaudi_ucm.connector.known_keys import KnownKeys
    from vllm_gaudi_ucm.connector.partial_load import PartialLoads
    from vllm_gaudi_ucm.connector.request_state import RequestState


class SavePlan:
    """In the scheduler, once a step is scheduled.

    Args:
        known: keys that the store has, or is about to have.
        block_size: tokens per block.
        block_table: block ids of a live request.
        keys: of the first so many blocks of a request, None where it has none.
    """

    def __init__(
        self,
        known: KnownKeys,
        block_size: int,
        block_table: Callable[[str], list[int]],
        keys: Callable[[RequestState, int], list[bytes] | None],
    ) -> None:
        self.known = known
        self.partial: PartialLoads | None = None
        self._block_size = block_size
        self._block_table = block_table
        self._keys = keys

    def blocks(self, state: RequestState, num_scheduled: int) -> list[BlockSave]:
        """Blocks that this step fills, and those before that nobody has stored. Drafts may turn out wrong: they do not
        count, as they are no tokens of the request yet."""
        request = state.request
        if self.partial is not None and self.partial.may_be_repeated(request.request_id):
            return []
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

    def records(self, state: RequestState, num_scheduled: int) -> list[RecordSave]:
        """Summaries of a prompt whose last token this step computes."""
        request = state.request
        if self.partial is None or state.has_records:
            return []
        if request.num_computed_tokens + num_scheduled < request.num_prompt_tokens:
            return []
        state.has_records = True
        keys = state.keys.known[: (request.num_prompt_tokens - 1) // self._block_size]
        found = self.partial.record_saves(request, keys, self._block_table(request.request_id))
        new = [record for record in found if record.key not in self.known]
        self.known.add(record.key for record in new)
        return new
