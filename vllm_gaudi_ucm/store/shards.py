"""Blocks of which several workers each hold a part: a part is a record of its own, and a block exists if all its parts
do.

All parts of a block have the block's key. The key in the store is a digest of it and of the part.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property

from vllm_gaudi_ucm.store.base import KvStore, StoreStats
from vllm_gaudi_ucm.store.block_key import digest_of

Part = tuple[int, int, int]
"""A range and the total: (first, end, total)."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of every block that a worker holds; workers with equal shards hold the same.

    kv_heads: range of each model that has layers in the block. layers: range of the model's layers. tp_size, pp_size:
        sizes of the engine. block_bytes: bytes of the part.
    """

    kv_heads: tuple[Part, ...]
    layers: Part
    tp_size: int
    pp_size: int
    block_bytes: int

    @cached_property
    def _digest(self) -> bytes:
        return digest_of(["gaudi-ucm shard", asdict(self)])

    def key(self, block: bytes) -> bytes:
        """Returns the key of the record, 32 bytes. block: the block's own key."""
        return hashlib.sha256(self._digest + block).digest()

    def keys(self, blocks: Sequence[bytes]) -> list[bytes]:
        return [self.key(block) for block in blocks]


class ShardStore(KvStore):
    """A store from the view of one worker, which saves and loads its own part of blocks by the blocks' keys.

    Args:
        store: holds the worker's parts; closed with this object.
    """

    def __init__(self, store: KvStore, shard: Shard) -> None:
        self._store = store
        self._shard = shard
        self.batch_bytes = store.batch_bytes
        self.waits = store.waits

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return self._store.lookup(self._shard.keys(keys))

    def load(self, key: bytes, into: memoryview) -> bool:
        return self._store.load(self._shard.key(key), into)

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None] | None:
        return self._store.lend(self._shard.keys(keys))

    def save(self, key: bytes, block: memoryview) -> bool:
        return self._store.save(self._shard.key(key), block)

    def use(self, keys: Sequence[bytes]) -> None:
        self._store.use(self._shard.keys(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._store.delete(self._shard.keys(keys))

    def clear(self) -> int:
        return self._store.clear()

    def verify(self) -> tuple[int, int]:
        return self._store.verify()

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()


class ShardLookups:
    """The stores from the view of the scheduler, which only looks up: a block exists if every shard of it does.

    Args:
        stores: by the bytes of a part; closed with this object.
    """

    def __init__(self, stores: Mapping[int, KvStore], shards: Sequence[Shard]) -> None:
        self._stores = stores
        self._shards = tuple(dict.fromkeys(shards))

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Like `KvStore.lookup`; a block that one shard lacks is not looked up further."""
        wanted = list(range(len(keys)))
        for shard in self._shards:
            found = self._stores[shard.block_bytes].lookup([shard.key(keys[index]) for index in wanted])
            wanted = [index for index, is_there in zip(wanted, found, strict=True) if is_there]
        there = set(wanted)
        return [index in there for index in range(len(keys))]

    def clear(self) -> int:
        """Like `KvStore.clear`, for all sizes; returns the number of parts."""
        return sum(store.clear() for store in self._stores.values())

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
