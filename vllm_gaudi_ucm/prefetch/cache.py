"""Blocks in host memory by key: a bounded number of buffers, reused, the least recently used first."""

from collections import OrderedDict
from collections.abc import Callable


class Slot:
    """Room for a block. buffer: None until its first use, because pinned memory takes milliseconds to allocate.

    users: readers and writers of it now; it is not given to another block before they are done.
    """

    __slots__ = ("buffer", "key", "users")

    def __init__(self) -> None:
        self.buffer: memoryview | None = None
        self.key: bytes | None = None
        self.users = 0

    def memory(self, allocate: Callable[[int], memoryview], nbytes: int) -> memoryview:
        """The buffer, allocated now if it is not yet. Raises the exceptions of `allocate`."""
        if self.buffer is None:
            self.buffer = allocate(nbytes)
        return self.buffer


class HostCache:
    """At most `capacity` slots. Not thread-safe: the dispatcher's lock is held around every call.

    A slot is in exactly one place: free (empty), being filled (in use, without a key), in use with a key, or idle.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.allocated = 0
        self.evictions = 0
        self._free: list[Slot] = []
        self._by_key: dict[bytes, Slot] = {}
        self._idle: OrderedDict[bytes, Slot] = OrderedDict()

    @property
    def blocks(self) -> int:
        return len(self._by_key)

    @property
    def unkeyed(self) -> int:
        """The number of slots that are neither free nor found by a key: those being filled."""
        return self.allocated - len(self._free) - len(self._by_key)

    def keyed_users(self) -> int:
        """Returns the total uses of slots that have a key."""
        return sum(slot.users for slot in self._by_key.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def use(self, key: bytes) -> Slot | None:
        """Returns the block's slot, in use once more until `release`; None if the block is missing."""
        slot = self._by_key.get(key)
        if slot is not None:
            self._idle.pop(key, None)
            slot.users += 1
        return slot

    def take_slot(self) -> Slot | None:
        """Returns a slot to fill, in use until `release`: new, free, or the idle one that was used least recently."""
        if self._free:
            slot = self._free.pop()
        elif self.allocated < self.capacity:
            slot = Slot()
            self.allocated += 1
        elif self._idle:
            key, slot = self._idle.popitem(last=False)
            del self._by_key[key]
            slot.key = None
            self.evictions += 1
        else:
            return None
        slot.users = 1
        return slot

    def put(self, slot: Slot, key: bytes) -> None:
        """Registers that the slot holds this block now. Its key must not exist already."""
        slot.key = key
        self._by_key[key] = slot

    def release(self, slot: Slot) -> None:
        """Ends one use; an unused slot is idle, or free if it holds no block."""
        slot.users -= 1
        if slot.users:
            return
        if slot.key is None:
            self._free.append(slot)
        else:
            self._idle[slot.key] = slot

    def clear(self) -> None:
        """Frees the memory of all slots that are not in use."""
        for key in self._idle:
            del self._by_key[key]
        self.allocated -= len(self._idle) + len(self._free)
        self._idle.clear()
        self._free.clear()
