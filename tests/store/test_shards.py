"""Parts of blocks that several workers keep in one store: each finds its own, and a block is there with all parts."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, key
from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options
from vllm_gaudi_ucm.store.shards import Shard, ShardLookups, ShardStore

FIRST = Shard(kv_heads=((0, 1, 2),), layers=(0, 4, 4), tp_size=2, pp_size=1, block_bytes=BLOCK_BYTES)
SECOND = replace(FIRST, kv_heads=((1, 2, 2),))


@pytest.mark.parametrize("name", [field.name for field in fields(Shard)])
def test_every_field_is_in_the_key(name: str) -> None:
    """covers: D9. Heads, layers, and the sizes of tensor and pipeline parallelism."""
    value = getattr(FIRST, name)
    other = replace(FIRST, **{name: value + 1 if isinstance(value, int) else (*value, 1)})
    assert other.key(key(1)) != FIRST.key(key(1)) == replace(FIRST).key(key(1)) != key(1)
    assert FIRST.key(key(2)) != FIRST.key(key(1))


@pytest.fixture(params=["memory", "file"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        return resolve_store_options({"kind": "memory", "capacity": 8 * BLOCK_BYTES, "pin": False})
    file = {"kind": "file", "path": str(tmp_path / "s"), "capacity": 64 * BLOCK_BYTES, "deadline": 20.0}
    return resolve_store_options({**file, "fsync": False})


def test_each_worker_finds_its_own_part(options: Any) -> None:
    store = open_store(options, BLOCK_BYTES)
    workers = [ShardStore(store, shard) for shard in (FIRST, SECOND)]
    whole = ShardLookups({BLOCK_BYTES: store}, (FIRST, SECOND, FIRST))
    keys = [key(number) for number in range(3)]
    assert workers[0].save(keys[0], block(1))
    assert workers[0].save(keys[1], block(2))
    assert whole.lookup(keys) == [False, False, False]
    assert workers[1].save(keys[1], block(3))
    assert workers[1].save(keys[2], block(4))
    assert whole.lookup(keys) == [False, True, False]
    for worker, number in zip(workers, (2, 3), strict=True):
        into = bytearray(BLOCK_BYTES)
        assert worker.load(keys[1], memoryview(into))
        assert into == block(number)
        (lent,) = worker.lend(keys[1:2]) or [None]
        assert lent is not None
        with lent as content:
            assert content == block(number)
    assert store.lookup(keys) == [False, False, False]
    assert workers[1].delete(keys[1:2]) == 1
    assert whole.lookup(keys) == [False, False, False]
    assert workers[0].lookup(keys) == [True, True, False]
    whole.close()


def test_parts_of_different_sizes(tmp_path: Path) -> None:
    """Pipeline stages with other numbers of layers."""
    options = resolve_store_options({"kind": "file", "path": str(tmp_path / "s"), "fsync": False, "deadline": 20.0})
    large = replace(FIRST, layers=(4, 6, 6), pp_size=2, block_bytes=2 * BLOCK_BYTES)
    shards = (replace(FIRST, pp_size=2), large)
    stores = {shard.block_bytes: open_store(options, shard.block_bytes) for shard in shards}
    whole = ShardLookups(stores, shards)
    for number, shard in enumerate(shards):
        assert whole.lookup([key(1)]) == [False]
        assert ShardStore(stores[shard.block_bytes], shard).save(key(1), block(number, shard.block_bytes))
    assert whole.lookup([key(2), key(1)]) == [False, True]
    whole.close()


def test_ranks_write_to_one_folder_at_once(tmp_path: Path) -> None:
    """covers: D9. The same blocks at the same time, each rank with an index of its own, in a folder that evicts."""
    most, count = 12, 60
    given = {"kind": "file", "path": str(tmp_path / "s"), "capacity": most * BLOCK_BYTES, "fsync": False}
    options = resolve_store_options({**given, "deadline": 20.0})
    stores = [open_store(options, BLOCK_BYTES) for _ in range(2)]
    ranks = [ShardStore(store, shard) for store, shard in zip(stores, (FIRST, SECOND), strict=True)]
    wrong: list[int] = []

    def work(rank: int) -> None:
        for number in range(count):
            ranks[rank].save(key(number), block(2 * number + rank))
            into = bytearray(BLOCK_BYTES)
            if ranks[rank].load(key(number), memoryview(into)) and into != block(2 * number + rank):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    whole = ShardLookups({BLOCK_BYTES: stores[0]}, (FIRST, SECOND))
    there = [number for number in range(count) if whole.lookup([key(number)])[0]]
    for rank in range(2):
        for number in there:
            into = bytearray(BLOCK_BYTES)
            assert ranks[rank].load(key(number), memoryview(into))
            assert into == block(2 * number + rank)
        assert stores[rank].stats().corrupt == 0
    # each bounds what it knows of; what the other has written since its last look comes on top
    assert len(list((tmp_path / "s" / "blocks").rglob("*.kv"))) <= 2 * most
    for store in stores:
        store.close()
