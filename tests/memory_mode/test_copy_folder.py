"""One folder under several engines: each has a place of its own, and nobody keeps that of a dead one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.memory_mode.copies import block, wait_for
from tests.memory_mode.prefetch import config_of
from tests.open_files import open_files
from tests.warm_process import WarmProcess
from vllm_gaudi_ucm.memory_mode import copies as copy_folder
from vllm_gaudi_ucm.memory_mode.copies import CopyFolder, CopyStore
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.prefetch.engine import host_memory
from vllm_gaudi_ucm.start.sparse_setup import open_copies

BLOCK_BYTES = 64
ROWS = 4


def is_killed(path: Path) -> None:
    (CopyFolder(path).path / "copy").write_bytes(b"1")
    os._exit(9)


def copies_in(folder: Path) -> CopyStore:
    """Of an engine with room for four copies."""
    files = {"kind": "file", "path": str(folder), "capacity": ROWS * BLOCK_BYTES, "fsync": False, "deadline": 10.0}
    blocks: Any = SimpleNamespace(block_bytes=BLOCK_BYTES, allocate=host_memory)
    return open_copies(config_of(store=files), ROWS, blocks)


def places(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "engines").iterdir())


def save_all(copies: CopyStore, first: int) -> None:
    for number in range(ROWS):
        copies.save((1, number), block(first + number))
    saved: dict[object, object] = {}
    while len(saved) < ROWS:
        found = wait_for(copies.finished_saves)
        assert found
        saved.update(found)
    assert all(saved.values())


def load_all(copies: CopyStore) -> list[int | None]:
    found: dict[Any, Any] = {}
    for number in range(ROWS):
        copies.load((1, number))
    while len(found) < ROWS:
        ended = wait_for(copies.finished_loads)
        assert ended
        found.update(ended)
    return [None if (data := found[1, number]) is None else data[0] for number in range(ROWS)]


def test_engines_with_one_folder_keep_what_is_theirs(tmp_path: Path) -> None:
    """covers: D9. Each has room for all of its copies, whatever the other one does, clears or leaves."""
    one = copies_in(tmp_path / "kv")
    save_all(one, 10)
    two = copies_in(tmp_path / "kv")
    save_all(two, 20)
    two.store.stats()
    assert load_all(one) == [10, 11, 12, 13]
    assert load_all(two) == [20, 21, 22, 23]
    two.store.clear()
    two.close()
    assert load_all(one) == [10, 11, 12, 13]
    one.close()
    assert places(tmp_path / "kv") == []


def test_what_a_killed_engine_has_left_is_removed(tmp_path: Path) -> None:
    """The next engine does it, and leaves alone what is of a living one."""
    folder = tmp_path / "kv"
    living = copies_in(folder)
    save_all(living, 10)
    killed = WarmProcess(is_killed, (folder,), log=tmp_path / "log.txt", env=os.environ, cwd=tmp_path)
    assert killed.wait(120) == 9
    assert len(places(folder)) == 4, "two folders and their locks"
    (folder / "engines" / "0123456789abcdef").mkdir()
    (folder / "engines" / "not ours").mkdir()
    other = copies_in(folder)
    assert len(places(folder)) == 5
    assert load_all(living) == [10, 11, 12, 13]
    other.close()
    living.close()
    assert places(folder) == ["not ours"]


def test_an_engine_that_starts_while_another_one_tidies_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making its lock and holding it, it looks like one that was killed."""
    create, tidied = copy_folder.create_file, []

    def slow(path: str) -> int:
        descriptor = create(path)
        if not tidied:
            tidied.append(path)
            copy_folder._sweep(tmp_path / "engines")
        return descriptor

    monkeypatch.setattr(copy_folder, "create_file", slow)
    folder = CopyFolder(tmp_path)
    assert not Path(tidied[0]).exists()
    assert places(tmp_path) == [folder.path.name, f"{folder.path.name}.lock"]
    copy_folder._sweep(tmp_path / "engines")
    assert folder.path.is_dir()
    folder.remove()
    folder.remove()
    assert places(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("no store")
    with pytest.raises(UcmConfigError, match=r"ucm\.memory_mode\.store\.path: found .*not the folder of a store"):
        copies_in(tmp_path)
    (tmp_path / "kv").mkdir()
    copies_in(tmp_path / "kv").close()
    (tmp_path / "kv" / "engines").rmdir()
    (tmp_path / "kv" / "engines").write_text("")
    with pytest.raises(UcmConfigError, match=r"ucm\.memory_mode\.store\.path: found .*Not a directory"):
        copies_in(tmp_path / "kv")


def test_nothing_is_left_of_an_engine_that_did_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: F7"""

    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("no threads")

    monkeypatch.setattr("vllm_gaudi_ucm.start.sparse_setup.CopyStore", broken)
    with pytest.raises(OSError, match="no threads"):
        copies_in(tmp_path / "kv")
    assert places(tmp_path / "kv") == []
    assert not open_files(tmp_path)
