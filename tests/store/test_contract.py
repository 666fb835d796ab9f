"""What every store promises, on each of them: memory, files, and a real Redis server."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.store.blocks import BLOCK_BYTES, block, holds, key, loaded


def test_a_block_comes_back_as_it_was(store: Any) -> None:
    assert loaded(store, 1) is None
    assert store.save(key(1), block(1))
    assert store.save(key(2), block(2))
    assert loaded(store, 1) == block(1)
    assert store.lookup([key(1), key(3), key(2)]) == [True, False, True]
    assert store.lookup([]) == []
    store.check_integrity()


def test_saving_again_changes_nothing(store: Any) -> None:
    assert store.save(key(1), block(1))
    assert store.save(key(1), block(1))
    stats = store.stats()
    assert (stats.blocks, stats.bytes, stats.saves, stats.bytes_saved) == (1, BLOCK_BYTES, 1, BLOCK_BYTES)
    assert loaded(store, 1) == block(1)


def test_delete_and_clear_say_how_many_were_there(store: Any) -> None:
    for number in range(5):
        store.save(key(number), block(number))
    assert store.delete([key(0), key(9), key(1)]) == 2
    assert store.delete([]) == 0
    assert holds(store, range(5)) == [2, 3, 4]
    assert store.clear() == 3
    assert store.clear() == 0
    assert holds(store, range(5)) == []
    store.check_integrity()


def test_stores_of_other_block_sizes_do_not_meet(store: Any, options: dict[str, Any], open_one: Any) -> None:
    other = open_one(options, 512)
    store.save(key(1), block(1))
    other.save(key(1), block(1, 512))
    other.save(key(2), block(2, 512))
    assert loaded(other, 1, 512) == block(1, 512)
    assert other.clear() == 2
    assert loaded(store, 1) == block(1)
    assert (store.verify(), other.verify()) == ((1, 0), (0, 0))


def test_counters(store: Any) -> None:
    store.save(key(1), block(1))
    loaded(store, 1)
    loaded(store, 2)
    store.lookup([key(1), key(3)])
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.saves) == (1, 2, 1)
    assert (stats.bytes_loaded, stats.bytes_saved) == (BLOCK_BYTES, BLOCK_BYTES)
    assert (stats.errors, stats.timeouts, stats.corrupt, stats.evictions) == (0, 0, 0, 0)
    assert stats.load_seconds > 0
    assert stats.save_seconds > 0
    assert (stats.blocks, stats.bytes, stats.breaker) == (1, BLOCK_BYTES, "closed")


@pytest.mark.parametrize("bad", [b"", b"short", b"x" * 33, "x" * 32, None])
def test_wrong_keys_raise(store: Any, bad: Any) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for call in (
        lambda: store.lookup([key(1), bad]),
        lambda: store.load(bad, buffer),
        lambda: store.save(bad, buffer),
        lambda: store.delete([bad]),
    ):
        with pytest.raises(ValueError, match=r"key: found .* expected 32 bytes"):
            call()


def test_wrong_buffers_raise(store: Any) -> None:
    with pytest.raises(ValueError, match="into: found 4095 bytes, expected 4096"):
        store.load(key(1), memoryview(bytearray(BLOCK_BYTES - 1)))
    with pytest.raises(ValueError, match="block: found 4097 bytes, expected 4096"):
        store.save(key(1), memoryview(bytearray(BLOCK_BYTES + 1)))
    with pytest.raises(ValueError, match="into: found 4096 bytes, read-only, expected 4096"):
        store.load(key(1), memoryview(bytes(BLOCK_BYTES)))
    with pytest.raises(ValueError, match="not contiguous"):
        store.save(key(1), memoryview(bytearray(2 * BLOCK_BYTES))[::2])
    assert store.stats().saves == 0


def test_arrays_of_any_shape_are_blocks(store: Any) -> None:
    values = np.arange(1024, dtype=np.float32).reshape(2, 16, 32)
    into = np.zeros_like(values)
    assert store.save(key(1), memoryview(values))
    assert store.load(key(1), memoryview(into))
    assert (into == values).all()


def test_closed_store_raises(store: Any) -> None:
    store.close()
    store.close()
    for call in (lambda: store.lookup([key(1)]), lambda: store.save(key(1), block(1)), lambda: loaded(store, 1)):
        with pytest.raises(RuntimeError, match="store is closed"):
            call()
    assert store.stats().hits == 0


def test_no_thread_is_left_after_close(options: dict[str, Any], open_one: Any) -> None:
    """covers: C2"""
    before = set(threading.enumerate())
    one = open_one(options)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: one.save(key(number), block(number)), range(64)))
    one.close()
    assert set(threading.enumerate()) == before


def test_many_threads(store: Any) -> None:
    """Each thread saves, loads and deletes the same few keys as the others: never another block's bytes."""
    end = time.monotonic() + 1.5
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while time.monotonic() < end:
            number = int(rng.integers(12))
            if rng.random() < 0.4:
                store.save(key(number), block(number))
            elif rng.random() < 0.1:
                store.delete([key(number)])
            elif loaded(store, number) not in (None, block(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    store.check_integrity()
    stats = store.stats()
    assert (stats.errors, stats.timeouts, stats.corrupt) == (0, 0, 0)
    assert len(holds(store, range(12))) == store.verify()[0]
