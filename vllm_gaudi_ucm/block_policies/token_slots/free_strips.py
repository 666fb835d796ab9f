"""The queue of free slots that gives requests strips: consecutive slots that no other request writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from vllm_gaudi_ucm.block_policies.id_runs import IdRuns
from vllm_gaudi_ucm.vllm_api.scheduling import FreeKVCacheBlockQueue, KVCacheBlock

_IN_USE, _EMPTY, _CACHED, _RESERVED = range(4)
# This fraction of the strips is kept empty while the prefix cache has any. Otherwise each token would take a slot that
# the cache gives up, wherever it lies.
READY = 1 / 32
# The number of strips' worth of slots that leave the prefix cache at once.
EVICTED = 4
# The strips of room that a request should find after the slots that it is known to need.
GROWTH = 2


class FreeStrips(FreeKVCacheBlockQueue):
    """A version of vLLM's queue for blocks of one token, which are slots. A strip is `size` slots, from slot 1 on.

    A free slot is empty, in the prefix cache, or reserved: in the rest of the strip that a request is filling. A
    request fills one strip before it gets another, and gets only strips that are entirely empty, so its context has no
    more ranges than strips. vLLM's linked list has the slots of the prefix cache, the longest unused first.

    Args:
        blocks: blocks of the pool, by id; 0 is vLLM's null block.
        free: all free blocks among these, in no list.
        size: slots of a strip.
        evict: takes blocks, by id, out of the prefix cache.
    """

    def __init__(
        self,
        blocks: Sequence[KVCacheBlock],
        free: Sequence[KVCacheBlock],
        size: int,
        evict: Callable[[set[int]], None],
    ) -> None:
        super().__init__([])
        self._blocks = blocks
        self._size = size
        self._evict = evict
        self.num_slots = len(blocks) - 1
        count = -(-self.num_slots // size)
        self._states = bytearray(len(blocks))
        # for each strip, the slots that are not empty, and the slots that are in use or reserved
        self._filled = [len(self._slots_of(strip)) for strip in range(count)]
        self._held = self._filled.copy()
        self._empty = IdRuns()
        self._not_held = 0
        self._rests: dict[str, range] = {}
        self._next: list[int] = []
        self.append_n([block for block in free if block.block_hash is not None])
        self.prepend_n([block for block in free if block.block_hash is None])

    def reserve(
        self, request_id: str, last: int, count: int, expected: int, found: Sequence[KVCacheBlock] = ()
    ) -> bool:
        """Chooses the slots that are given away next to one request; returns whether there are `count` slots.

        last: the request's last slot, or 0. expected: slots that it is known to need from now on. found: slots of the
        prefix cache that it will get, which stay there.
        """
        before = self._rests.pop(request_id, range(0))
        rest = before or self._rest_behind(last)
        chosen, missing = list(rest[:count]), count - len(rest)
        rest = rest[count:]
        if missing > 0:
            strips = self._take(missing, self._strip_of(last) if last else -2, expected - len(chosen), found)
            if strips is None:
                self._keep_rest(request_id, before)
                return False
            slots = [slot for strip in strips for slot in self._slots_of(strip)]
            chosen += slots[:missing]
            rest = range(slots[missing - 1] + 1, slots[-1] + 1)
        self._next = chosen
        self._set(chosen, _RESERVED)
        self._keep_rest(request_id, rest)
        return True

    def cancel(self, request_id: str, last: int) -> None:
        """Returns the chosen slots. last: the request's last slot, whose strip it continues to fill; 0: none."""
        rest = self._rests.pop(request_id, range(0))
        self._set([*self._next, *rest], _EMPTY)
        self._next = []
        self._keep_rest(request_id, self._rest_behind(last))

    def release(self, request_id: str) -> None:
        """Frees the rest of the strip of a request that has ended or was preempted."""
        self._set(self._rests.pop(request_id, range(0)), _EMPTY)

    def forget_cached(self) -> None:
        """Called when the prefix cache was emptied."""
        self._empty_cached(super().get_all_free_blocks())

    def popleft(self) -> KVCacheBlock:
        (block,) = self.popleft_n(1)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        chosen, self._next = self._next, []
        if len(chosen) != n:
            raise RuntimeError(f"{n} slots are asked for, {len(chosen)} were reserved; only `BlockManager` takes slots")
        self._set(chosen, _IN_USE)
        self.num_free_blocks -= n
        return [self._blocks[slot] for slot in chosen]

    def remove(self, block: KVCacheBlock) -> None:
        """Removes a slot from the prefix cache for a request that has found it there."""
        super().remove(block)
        self._set([block.block_id], _IN_USE)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Appends slots that are in the prefix cache."""
        super().append_n(blocks)
        self._set([block.block_id for block in blocks], _CACHED)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Prepends slots that are not in the prefix cache."""
        self._set([block.block_id for block in blocks], _EMPTY)
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        states = (_EMPTY, _RESERVED)
        others = [block for block, state in zip(self._blocks, self._states, strict=True) if state in states]
        return others + super().get_all_free_blocks()

    def _take(self, count: int, after: int, expected: int, found: Sequence[KVCacheBlock]) -> list[int] | None:
        """Takes strips with `count` slots, after strip `after` if possible; returns None if there are fewer."""
        kept = {block.block_id for block in found if self._states[block.block_id] == _CACHED}
        with_kept = {strip for strip in map(self._strip_of, kept) if not self._held[strip]}
        last = len(self._held) - 1
        is_there = not self._held[last] and last not in with_kept
        if count > self._slots_in(self._not_held - len(with_kept), is_there):
            return None
        while self._slots_in(len(self._empty), last in self._empty) < count:
            self._evict_some(kept, EVICTED)
        ready = -(-count // self._size) + int(READY * len(self._held))
        if len(self._empty) < ready:
            self._evict_some(kept, min(EVICTED, ready - len(self._empty)))
        strips: list[int] = []
        while (missing := count - sum(len(self._slots_of(strip)) for strip in strips)) > 0:
            number = -(-missing // self._size)
            strips += self._empty.take_apart(number, after, -(-expected // self._size) + GROWTH)
        for strip in strips:
            slots = self._slots_of(strip)
            self._filled[strip] = self._held[strip] = len(slots)
            self._states[slots.start : slots.stop] = bytes([_RESERVED]) * len(slots)
        self._not_held -= len(strips)
        return strips

    def _slots_in(self, strips: int, with_last: bool) -> int:
        """Returns the slots of that many strips. The very last strip may be shorter."""
        return strips * self._size - with_last * (len(self._held) * self._size - self.num_slots)

    def _evict_some(self, kept: set[int], strips: int) -> None:
        """Evicts the slots of `strips` strips: the longest unused ones of the prefix cache, except those in `kept`."""
        others = (block for block in self.iter_blocks_after(None) if block.block_id not in kept)
        self._empty_cached(list(islice(others, strips * self._size)))

    def _empty_cached(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self._evict({block.block_id})
            super().remove(block)
            self._set([block.block_id], _EMPTY)
            self.num_free_blocks += 1

    def _rest_behind(self, last: int) -> range:
        """Returns the empty slots after slot `last` in its strip."""
        end = last + 1
        if last:
            stop = self._slots_of(self._strip_of(last)).stop
            while end < stop and self._states[end] == _EMPTY:
                end += 1
        return range(last + 1, end)

    def _keep_rest(self, request_id: str, rest: range) -> None:
        if rest:
            self._rests[request_id] = rest
            # usually it has been reserved since the strip was taken
            if self._states[rest.start] != _RESERVED:
                self._set(rest, _RESERVED)

    def _strip_of(self, slot: int) -> int:
        return (slot - 1) // self._size

    def _slots_of(self, strip: int) -> range:
        return range(strip * self._size + 1, min((strip + 1) * self._size, self.num_slots) + 1)

    def _set(self, slots: Iterable[int], state: int) -> None:
        states, filled, held = self._states, self._filled, self._held
        for slot in slots:
            before, states[slot] = states[slot], state
            strip = (slot - 1) // self._size
            was_held, is_held = before in (_IN_USE, _RESERVED), state in (_IN_USE, _RESERVED)
            if was_held != is_held:
                held[strip] += is_held - was_held
                if held[strip] == (1 if is_held else 0):
                    self._not_held += was_held - is_held
            change = (state != _EMPTY) - (before != _EMPTY)
            if change:
                filled[strip] += change
                if change < 0 and not filled[strip]:
                    self._empty.add([strip])
                elif change > 0 and filled[strip] == 1:
                    self._empty.discard(strip)

    def check_integrity(self) -> None:
        """Checks that states, counts and lists agree about every slot."""
        free = self.get_all_free_blocks()
        known = [slot for slot in range(1, self.num_slots + 1) if self._states[slot] != _IN_USE]
        if sorted(block.block_id for block in free) != known or len(free) != self.num_free_blocks:
            raise AssertionError(f"free slots: listed {len(free)}, known {len(known)}, counted {self.num_free_blocks}")
        reserved = [slot for slot in known if self._states[slot] == _RESERVED]
        if sorted([*self._next, *(slot for rest in self._rests.values() for slot in rest)]) != reserved:
            raise AssertionError(f"reserved slots: known {reserved}, of requests {self._rests}, next {self._next}")
        for strip, counts in enumerate(zip(self._filled, self._held, strict=True)):
            states = [self._states[slot] for slot in self._slots_of(strip)]
            filled, cached = len(states) - states.count(_EMPTY), states.count(_CACHED)
            if counts != (filled, filled - cached) or (strip in self._empty) != (not filled):
                raise AssertionError(f"strip {strip}: counted {counts}, found {(filled, filled - cached)}")
        if self._not_held != self._held.count(0):
            raise AssertionError(f"strips without holders: counted {self._not_held}, found {self._held.count(0)}")
