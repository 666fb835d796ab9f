"""Counts the blocks that a request has in each KV-cache group: for its whole context or for a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.shapes.group_room import most_blocks
from vllm_gaudi_ucm.vllm_api.blocks import skipped_tokens
from vllm_gaudi_ucm.vllm_api.kv_cache import kept_tokens

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock, KVCacheManager
    from vllm_gaudi_ucm.vllm_api.steps import Request


class GroupBlocks:
    """Counts blocks in the groups of one engine, which share one pool and one block size.

    Args:
        manager: vLLM's KV-cache manager.
        block_size: tokens per block.
    """

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        windows = kept_tokens(manager.kv_cache_config.kv_cache_groups)
        self._block_size = block_size
        self._skipped = skipped_tokens(manager)
        self._wholes = [number for number, window in enumerate(windows) if window is None]
        self._windows = [(number, window) for number, window in enumerate(windows) if window is not None]

    @property
    def whole(self) -> int:
        """Returns the number of groups that keep whole contexts."""
        return len(self._wholes)

    def wholes(self, tables: Sequence[Sequence[KVCacheBlock]]) -> list[int]:
        """Returns the ids of a request's blocks in the groups that keep whole contexts."""
        return [block.block_id for number in self._wholes for block in tables[number]]

    def most(
        self, request: Request, ahead: int, rows: int, tables: Sequence[Sequence[KVCacheBlock]]
    ) -> tuple[int, ...]:
        """Returns, for each group with a window, the most blocks that a request will have at a time.

        A window gives blocks back when the request's next step is scheduled: until then it has the blocks of a window
        before the first token of a step, and the blocks of the step's tokens.

        ahead: tokens after the context for which slots are kept. rows: the most tokens of a prompt in a step. tables:
            the request's current blocks, which may be more: those of the last chunk of its prompt.
        """
        left = request.num_tokens - request.num_computed_tokens
        step = max(1, min(left, rows)) + ahead
        return tuple(
            max(most_blocks(window - 1 + step, self._block_size), sum(not block.is_null for block in tables[number]))
            for number, window in self._windows
        )
