"""The store `tiered`: blocks come nearer, the front is bounded, faults of the slower store, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, holds, key, loaded
from tests.store.conftest import Open, open_one
from tests.store.refusing_store import RefusingStore
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.store.factory import open_medium, resolve_store_options
from vllm_gaudi_ucm.store.memory import MemoryStore
from vllm_gaudi_ucm.store.tiered import TieredStore

__all__ = ["open_one"]


def tiered(path: Path, **front: Any) -> dict[str, Any]:
    behind = {"kind": "file", "path": str(path), "fsync": False, "deadline": 20.0}
    return {"kind": "tiered", "front": {"pin": False, **front}, "behind": behind}


def test_blocks_come_nearer_and_the_front_is_bounded(tmp_path: Path, open_one: Open) -> None:
    path = tmp_path / "store"
    first = open_one(tiered(path, capacity=3 * BLOCK_BYTES))
    for number in range(8):
        assert first.save(key(number), block(number))
    first.close()
    second = open_one(tiered(path, capacity=3 * BLOCK_BYTES))
    assert holds(second, range(8)) == [*range(8)]
    assert (second.stats().hits, second.stats().front_hits, second.stats().blocks) == (8, 0, 8)
    assert [loaded(second, number) is not None for number in (5, 6, 7)] == [True] * 3
    assert second.stats().front_hits == 3
    for loan in second.lend([key(0), key(7), key(99)]):
        if loan is not None:
            with loan as content:
                assert content in (block(0), block(7))
    assert second.stats().front_hits == 4
    assert loaded(second, 0) is not None
    assert second.stats().front_hits == 5
    shutil.rmtree(path)
    assert holds(second, range(8)) == [0, 6, 7]  # as a cache, it answers for what it has


def test_blocks_that_the_slower_store_refused_are_written_later(caplog: pytest.LogCaptureFixture) -> None:
    front, behind = MemoryStore(BLOCK_BYTES, 4 * BLOCK_BYTES), RefusingStore(BLOCK_BYTES, 1 << 20)
    store = TieredStore(front, behind, BLOCK_BYTES)
    behind.refuses = True
    assert all(store.save(key(number), block(number)) for number in range(6))
    assert "did not take a block, which stays in memory" in caplog.text
    assert caplog.text.count("tiered store") == 1
    assert holds(store, range(6)) == [2, 3, 4, 5]  # the front has no room for more, and says so
    behind.refuses = False
    assert store.save(key(6), block(6))
    assert store.save(key(7), block(7))
    assert sorted(number for number in range(8) if behind.lookup([key(number)]) == [True]) == [3, 4, 5, 6, 7]
    store.check_integrity()


def test_without_eviction_a_block_counts_only_behind() -> None:
    behind = RefusingStore(BLOCK_BYTES, 1 << 20)
    store = TieredStore(MemoryStore(BLOCK_BYTES, 4 * BLOCK_BYTES), behind, BLOCK_BYTES, evicts=False)
    behind.refuses = True
    assert not store.save(key(1), block(1))
    behind.refuses = False
    assert store.save(key(1), block(1))


def test_the_commands_see_the_store_behind(tmp_path: Path, open_one: Open) -> None:
    options = tiered(tmp_path / "store")
    open_one(options).save(key(1), block(1))
    medium = open_medium(resolve_store_options(options), create=False)
    assert [found.key for found in medium.blocks()] == [key(1)]
    medium.close()


@pytest.mark.parametrize(
    ("behind", "named"),
    [
        ({"kind": "memory"}, r"store\.behind\.kind: found 'memory', expected a store that outlasts the process"),
        ({"kind": "tiered", "behind": {"kind": "file", "path": "/x"}}, r"store\.behind\.kind: found 'tiered'"),
        ({"kind": "file"}, r"store\.behind\.path"),
        (None, r"store\.behind"),
    ],
)
def test_bad_options_are_named(behind: Any, named: str) -> None:
    with pytest.raises(UcmConfigError, match=named):
        resolve_store_options({"kind": "tiered", "behind": behind})
