"""How many blocks a request has in each KV-cache group: all of its context, or those of a window."""

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
    """Of one engine's groups, whose blocks are of one pool and of one size.

    Args:
        manager: vLLM's.
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
        """Groups that keep whole contexts."""
        return len(self._wholes)

    def wholes(self, tables: Sequence[Sequence[KVCacheBlock]]) -> list[int]:
        """Of a request's blocks in each group the ids of those in groups that keep whole contexts."""
        return [block.block_id for number in self._wholes for block in tables[number]]

    def most(
        self, request: Request, ahead: int, rows: int, tables: Sequence[Sequence[KVCacheBlock]]
    ) -> tuple[int, ...]:
        """For each group with a window the most blocks that a request will have at a time.

        A window gives blocks back when the request's next step is scheduled: until then it has those of a window before
        the first token of a step, and those of the step's tokens.

        ahead: tokens behind the context for which slots are kept. rows: most tokens of a prompt in a step. tables:
            blocks that it has, which may be more: those of the last chunk of its prompt.
        """
        left = request.num_tokens - request.num_computed_tokens
        step = max(1, min(left, rows)) + ahead
        return tuple(
            max(most_blocks(window - 1 + step, self._block_size), sum(not block.is_null for block in tables[number]))
            for number, window in self._windows
        )
