"""The queue of free blocks that prefers contiguous ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from vllm_gaudi_ucm.block_policies.free_blocks import FreeBlocks
from vllm_gaudi_ucm.block_policies.id_runs import IdRuns

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.scheduling import FreeKVCacheBlockQueue, KVCacheBlock

NO_BLOCK = -1
_IN_USE, _EMPTY, _KEPT = 0, 1, 2


class FreeRuns(FreeBlocks):
    """A version of vLLM's queue that gives away consecutive blocks.

    A free block is either empty or kept: it is in the prefix cache, or useful for a partial hit. vLLM's linked list has
    the empty blocks at its front, followed by the kept ones, the longest unused first. Of the empty blocks, a request
    gets those after its own last block, then the shortest run that holds what it needs. If no block is empty, it gets
    kept ones in vLLM's order.
    """

    _blocks: Sequence[KVCacheBlock]
    _empty: IdRuns
    _states: bytearray
    _after: int
    _expected: int

    @classmethod
    def over(
        cls,
        blocks: Sequence[KVCacheBlock],
        queue: FreeKVCacheBlockQueue,
        is_of_use: Callable[[KVCacheBlock], bool],
        reused: Callable[[Iterable[KVCacheBlock]], None],
    ) -> Self:
        """Replaces a queue. blocks: of the pool, in the order of their ids. For the others see `FreeBlocks.of`."""
        made = cls.of(queue, is_of_use, reused)
        made._blocks = blocks
        made._after, made._expected = NO_BLOCK, 0
        made.sort_anew()
        return made

    def sort_anew(self) -> None:
        """Sorts the free blocks again, after some became useless or left the prefix cache while they were free."""
        self._states = bytearray(len(self._blocks))
        free = self.get_all_free_blocks()
        empty = [block for block in free if block.block_hash is None and not self._is_of_use(block)]
        for block in free:
            self._states[block.block_id] = _KEPT
        self._empty = IdRuns(block.block_id for block in empty)
        for block in empty:
            self._states[block.block_id] = _EMPTY
            super().remove(block)
        super().prepend_n(empty)

    def expect(self, after: int, count: int) -> None:
        """Announces the request that takes blocks next. after: id of its last block, or NO_BLOCK. count: blocks that it
        is expected to need, including those that it takes now.
        """
        self._after, self._expected = after, count

    def popleft(self) -> KVCacheBlock:
        (block,) = self.popleft_n(1)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if n > self.num_free_blocks:
            raise ValueError("No free blocks available")
        taken = [self._blocks[number] for number in self._empty.take(n, self._after, self._expected)]
        for block in taken:
            self._states[block.block_id] = _IN_USE
            super().remove(block)
        self._reused(taken)
        if len(taken) < n:
            kept = sorted(super().popleft_n(n - len(taken)), key=lambda block: block.block_id)
            for block in kept:
                self._states[block.block_id] = _IN_USE
            taken += kept
        if taken:
            self.expect(taken[-1].block_id, self._expected - n)
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        super().remove(block)
        self._states[block.block_id] = _IN_USE
        self._empty.discard(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        super().append(block)
        self._states[block.block_id] = _KEPT

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)
        for block in blocks:
            self._states[block.block_id] = _KEPT

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        super().prepend_n(blocks)
        # the call above has appended the blocks that are of use
        empty = [block.block_id for block in blocks if self._states[block.block_id] == _IN_USE]
        for number in empty:
            self._states[number] = _EMPTY
        self._empty.add(empty)

    @property
    def highest_in_use(self) -> int:
        """Returns the highest id in use; 0, the null block's, if no request has a block."""
        return self._states.rfind(_IN_USE)

    def in_use_from(self, first: int, most: int, without: Collection[int]) -> list[int]:
        """Returns at most `most` ids of blocks in use from `first` on, the highest ones, ascending, not `without`."""
        found: list[int] = []
        number = self._states.rfind(_IN_USE, first)
        while number >= 0 and len(found) < most:
            if number not in without:
                found.append(number)
            number = self._states.rfind(_IN_USE, first, number)
        return found[::-1]

    def lowest_empty(self, count: int, below: int) -> list[int]:
        """Returns at most `count` ids of empty blocks below `below`, ascending."""
        return self._empty.lowest(count, below)

    def lowest_kept(self, below: int) -> int:
        """Returns the lowest id of a kept block below `below`, or NO_BLOCK."""
        return self._states.find(_KEPT, 0, below)

    @property
    def next_given_away(self) -> KVCacheBlock:
        """Returns the first of vLLM's list: an empty block, or the longest unused kept one if no block is empty."""
        block = self.fake_free_list_head.next_free_block
        assert block is not None, "the list has two ends"
        return block

    def renumbered(self, block: KVCacheBlock, before: int) -> None:
        """Updates the states after a kept block, which keeps its place in the list, has changed its id.

        before: its previous id.
        """
        self._states[before], self._states[block.block_id] = _IN_USE, _KEPT

    def check_integrity(self) -> None:
        """Checks that the linked list, the states and the runs agree about every block."""
        free = self.get_all_free_blocks()
        ids = [block.block_id for block in free]
        known = [number for number, state in enumerate(self._states) if state != _IN_USE]
        empty = [number for number, state in enumerate(self._states) if state == _EMPTY]
        if sorted(ids) != known or len(ids) != self.num_free_blocks:
            raise AssertionError(f"free blocks: listed {sorted(ids)}, known {known}, counted {self.num_free_blocks}")
        if list(self._empty) != empty or sorted(ids[: len(empty)]) != empty:
            raise AssertionError(f"empty blocks: runs {list(self._empty)}, known {empty}, first {ids[: len(empty)]}")
        if any(self._blocks[number] is not block for number, block in zip(ids, free, strict=True)):
            raise AssertionError("a free block is not where its id says")
