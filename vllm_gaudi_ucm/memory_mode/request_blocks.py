"""Block tables and free blocks of vLLM's scheduler, as far as KV offload changes them."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.vllm_api.blocks import forget_cached_blocks, kv_block_lists, whole_groups

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock, KVCacheManager
    from vllm_gaudi_ucm.vllm_api.steps import Request


class RequestBlocks:
    """Block tables of requests. As in vLLM's sliding window, a block that leaves is replaced by the null block and
    freed.

    Freeing decrements a block's count of owners, so a block that another request or the prefix cache still uses stays.

    Blocks are those of the one KV-cache group that keeps whole contexts. Groups with windows have blocks of the same
    pool, and free them on their own.
    """

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        (self.group,) = whole_groups(manager)
        self._manager = manager
        self._pool = manager.block_pool
        self._lists = kv_block_lists(manager, self.group)
        self._num_groups = len(manager.coordinator.single_type_managers)
        self._size = block_size
        # hashes of a finer grain are no hashes of blocks
        self._caching = manager.enable_caching and self._pool.hash_block_size == block_size

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    def num_spare(self, num_running: int) -> int:
        """Returns the number of free blocks beyond those that the running requests may need next: one in each group."""
        return self.num_free - num_running * self._num_groups

    def table(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks, the null block for an offloaded one; empty for a request that has none."""
        return self._lists.get(request_id, [])

    def is_owned_alone(self, request_id: str, number: int) -> bool:
        """True if releasing the block would free it."""
        block = self._lists[request_id][number]
        return not block.is_null and block.ref_cnt == 1

    def release(self, request_id: str, number: int) -> None:
        """Puts the null block instead of logical block `number`, and frees that."""
        table = self._lists[request_id]
        block, table[number] = table[number], self._pool.null_block
        self._pool.free_blocks([block])

    def put(self, request_id: str, number: int, block: KVCacheBlock) -> None:
        """Gives logical block `number` a physical block that the caller owns."""
        self._lists[request_id][number] = block

    def take_block(self) -> KVCacheBlock:
        """A free block, which is the caller's now. Raises ValueError if there is none."""
        (block,) = self._pool.get_new_blocks(1)
        return block

    def blocks_to_write(self, computed: Iterable[tuple[str, int]]) -> set[int]:
        """Physical blocks of requests from their first token on that is not computed yet.

        computed: id and computed tokens of each.
        """
        tables = ((self.table(request_id), tokens // self._size) for request_id, tokens in computed)
        return {block.block_id for table, first in tables for block in table[first:]}

    def take_cached(self, request: Request, number: int, unwritten: Set[int] = frozenset()) -> KVCacheBlock | None:
        """Takes the block with the content of logical block `number`, if the prefix cache still has it.

        unwritten: physical blocks that do not have their content yet, although the prefix cache lists them.
        """
        if not self._caching or number >= len(request.block_hashes):
            return None
        found = self._pool.get_cached_block(request.block_hashes[number], [self.group])
        if found is None or found[0].block_id in unwritten:
            return None
        self._pool.touch(found)
        return found[0]

    def forget_cached(self, request_id: str, first: int) -> None:
        """The prefix cache has logical blocks `first` and following no more, until the request's next step."""
        forget_cached_blocks(self._manager, request_id, first)

    def free_all(self, request: Request) -> None:
        self._manager.free(request)

    def give_back(self, blocks: list[KVCacheBlock]) -> None:
        self._pool.free_blocks(blocks)
