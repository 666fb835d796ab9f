"""The folder of the file store is its owner's alone, and the one that was opened: nothing leads anywhere else."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, holds, key, loaded
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.store.folder import Folder
from vllm_gaudi_ucm.store.held_folder import MARKER
from vllm_gaudi_ucm.store.medium import StoredBlock

SOMEBODY = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_file(path: Path, open_one: Any) -> Any:
    """Opens the store in `path` with some options."""
    return lambda **options: open_one({"kind": "file", "path": str(path), "deadline": 20.0, "fsync": False, **options})


def file_of(path: Path, number: int) -> Path:
    return Path(Folder(path, create=False).file(StoredBlock(key(number), BLOCK_BYTES)))


def tree(path: Path) -> dict[str, bytes | None]:
    """Everything below a folder: files with their content."""
    return {str(entry): entry.read_bytes() if entry.is_file() else None for entry in path.rglob("*")}


STRANGERS: dict[str, Callable[[Path, Path], None]] = {
    "folder": lambda place, elsewhere: place.mkdir(),
    "full folder": lambda place, elsewhere: (place / "in it").mkdir(parents=True),
    "pipe": lambda place, elsewhere: os.mkfifo(place),
    "link to a block": lambda place, elsewhere: place.symlink_to(elsewhere),
    "link to itself": lambda place, elsewhere: place.symlink_to(place),
    "link to nothing": lambda place, elsewhere: place.symlink_to(place.parent / "nothing"),
}


def bind_socket(place: Path, elsewhere: Path) -> None:
    """By a short relative path: those of sockets are bounded."""
    before = os.getcwd()
    os.chdir(place.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(place.name)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("stranger", [*STRANGERS, "socket"])
def test_what_is_no_file_is_left_alone(
    path: Path, open_file: Any, stranger: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    """covers: D6. It is never opened, removed or replaced: a miss, said once, named by `verify`; all else goes on."""
    store = open_file(capacity=4 * BLOCK_BYTES, breaker={"failures": 1})
    for number in (1, 2):
        store.save(key(number), block(number))
    place = file_of(path, 1)
    place.rename(tmp_path / "elsewhere")
    {**STRANGERS, "socket": bind_socket}[stranger](place, tmp_path / "elsewhere")
    before = os.lstat(place)
    with caplog.at_level(logging.WARNING, logger="vllm.gaudi_ucm.store"):
        for _ in range(3):
            assert store.lookup([key(1), key(2)]) == [False, True]
            assert loaded(store, 1) is None
            assert not store.save(key(1), block(1))
            assert loaded(store, 2) == block(2)
        assert store.delete([key(1)]) == 0
        assert store.verify() == (1, 0)
        for number in range(10, 16):  # evicts what the index still takes for a block
            assert store.save(key(number), block(number))
        store._medium.upkeep()
        assert (store.stats().blocks, store.stats().breaker) == (4, "closed")
        assert store.clear() == 4
    assert len([entry for entry in caplog.records if "not touched" in entry.getMessage()]) == 1
    assert os.lstat(place) == before
    assert (tmp_path / "elsewhere").read_bytes()[64:] == block(1)
    assert cli.main(["store", "verify", "--path", str(path)]) == 0
    written = capsys.readouterr()
    assert "0 blocks intact, 0 corrupt ones removed" in written.out
    assert f"{place} (a {stranger.split()[-1] if 'link' not in stranger else 'link'})" in written.out
    assert cli.main(["store", "verify", "--path", str(path), "--json"]) == 0
    assert str(place) in capsys.readouterr().out
    store.check_integrity()


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_no_folder_between_is_left_alone(
    path: Path, open_file: Any, level: int, what: str, tmp_path: Path, capsys: Any
) -> None:
    """covers: D6. Nothing is written, evicted or counted behind a link."""
    store = open_file(capacity=4 * BLOCK_BYTES, breaker={"failures": 1})
    store.save(key(1), block(1))
    part = list(file_of(path, 1).parents)[3 - level]
    part.rename(tmp_path / "elsewhere")
    if what == "link":
        part.symlink_to(tmp_path / "elsewhere")
    else:
        part.write_bytes(b"")
    store._medium.upkeep()
    before = tree(tmp_path / "elsewhere")
    file_of(path, 1).unlink(missing_ok=True) if what == "link" else None
    before = tree(tmp_path / "elsewhere")
    assert not store.save(key(1), block(1))
    assert tree(tmp_path / "elsewhere") == before
    assert store.stats().blocks == 0
    assert store.stats().breaker == "closed"
    assert store.verify() == (0, 0)
    assert cli.main(["store", "verify", "--path", str(path)]) == 0
    assert f"{part} (a {what})" in capsys.readouterr().out


def test_leftovers_that_are_no_files(path: Path, open_file: Any) -> None:
    """A pipe among what dead writers left would hold whoever opens it."""
    open_file()
    os.mkfifo(path / "tmp" / "pipe")
    (path / "tmp" / "folder").mkdir()
    (path / "tmp" / "old").write_bytes(b"half")
    for entry in ("pipe", "folder", "old"):
        os.utime(path / "tmp" / entry, (1, 1))
    assert Folder(path).hold_or_make().sweep() == 1
    assert sorted(os.listdir(path / "tmp")) == ["folder", "pipe"]


@pytest.mark.parametrize("again", ["nothing", "folder", "link", "link to a store", "file", "store"])
def test_a_folder_that_is_removed_while_it_is_served(
    path: Path, open_file: Any, again: str, tmp_path: Path, open_one: Any
) -> None:
    """covers: D6. It is followed to no other place; a safe one is taken or made anew."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if again == "link to a store":
        open_one({"kind": "file", "path": str(elsewhere), "deadline": 20.0, "fsync": False}).save(key(2), block(2))
    store = open_file(breaker={"failures": 100})
    store.save(key(1), block(1))
    shutil.rmtree(path)
    {
        "nothing": lambda: None,
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(elsewhere),
        "link to a store": lambda: path.symlink_to(elsewhere),
        "file": lambda: path.write_text("x"),
        "store": lambda: Folder(path),
    }[again]()
    before = tree(elsewhere)
    assert holds(store, [1, 2]) == []
    taken = again in ("nothing", "folder", "store")
    assert store.save(key(3), block(3)) == taken
    assert loaded(store, 3) == (block(3) if taken else None)
    assert tree(elsewhere) == before
    assert (store.stats().errors == 0) == taken
    if not taken:
        path.unlink()
        assert store.save(key(3), block(3))
    assert holds(store, range(5)) == [3]
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in [path, *path.rglob("*")]} == {0o700, 0o600}
    store._medium.upkeep()
    assert store.stats().blocks == 1
    store.check_integrity()


def test_a_folder_that_does_not_come_back_opens_the_breaker(path: Path, open_file: Any) -> None:
    """covers: D4"""
    store = open_file(breaker={"failures": 2, "seconds": 1000.0})
    store.save(key(1), block(1))
    shutil.rmtree(path)
    path.symlink_to("/")
    for _ in range(2):
        assert loaded(store, 1) is None
    assert store.stats().breaker == "open"


def test_a_moved_folder_is_not_followed_either(path: Path, open_file: Any, tmp_path: Path) -> None:
    store = open_file()
    store.save(key(1), block(1))
    path.rename(tmp_path / "moved")
    before = tree(tmp_path / "moved")
    assert loaded(store, 1) is None
    assert store.save(key(2), block(2))
    assert tree(tmp_path / "moved") == before
    assert holds(store, range(3)) == [2]


def test_parts_of_the_folder_that_are_removed(path: Path, open_file: Any) -> None:
    store = open_file(breaker={"failures": 1})
    store.save(key(1), block(1))
    for part in ("tmp", "blocks"):
        shutil.rmtree(path / part)
        store._medium.upkeep()
        assert store.save(key(2), block(2)), part
    assert holds(store, range(3)) == [2]


def refusal(path: Path, create: bool = True) -> str:
    with pytest.raises(UcmConfigError) as error:
        Folder(path, create)
    (problem,) = error.value.problems
    assert problem.key == "store.path"
    return str(error.value)


@pytest.mark.parametrize("create", [True, False])
def test_links_are_refused(path: Path, tmp_path: Path, create: bool) -> None:
    """covers: D6. The folder itself, and its parts."""
    Folder(path).close()
    (tmp_path / "link").symlink_to(path)
    assert "link (a link, not a folder), expected a folder: name the one" in refusal(tmp_path / "link", create)
    for part in ("blocks", "tmp"):
        shutil.move(path / part, tmp_path / part)
        (path / part).symlink_to(tmp_path / part)
        if create:
            assert f"store/{part} (a link, not a folder)" in refusal(path, create)
        (path / part).unlink()
        shutil.move(tmp_path / part, path / part)
    (path / MARKER).rename(tmp_path / MARKER)
    (path / MARKER).symlink_to(tmp_path / MARKER)
    assert f"({MARKER} in it is a link)" in refusal(path, create)


def test_a_blocks_link_is_not_followed_by_the_command(path: Path, tmp_path: Path, capsys: Any) -> None:
    Folder(path).close()
    shutil.move(path / "blocks", tmp_path / "blocks")
    (path / "blocks").symlink_to(tmp_path / "blocks")
    assert cli.main(["store", "stat", "--path", str(path)]) == 2
    assert "blocks (a link, not a folder)" in capsys.readouterr().err


@needs_root
@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("part", [".", "blocks"])
def test_another_users_folder_is_refused(path: Path, create: bool, part: str, capsys: Any) -> None:
    """covers: D6. As root, too."""
    Folder(path).close()
    os.chown(path / part, SOMEBODY, -1)
    if create or part == ".":
        message = refusal(path, create)
        assert f"(owned by user {SOMEBODY}), expected a folder that this process's user (0) owns" in message
        assert "run as its owner" in message
    for action in ("stat", "verify"):
        assert cli.main(["store", action, "--path", str(path)]) == 2
        assert f"owned by user {SOMEBODY}" in capsys.readouterr().err


@needs_root
def test_an_empty_folder_of_another_user_is_refused(path: Path) -> None:
    path.mkdir()
    os.chown(path, SOMEBODY, -1)
    assert f"owned by user {SOMEBODY}" in refusal(path)
    assert os.listdir(path) == []


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_store_that_others_may_write_is_refused(path: Path, mode: int, create: bool) -> None:
    """covers: D6"""
    Folder(path).close()
    path.chmod(mode)
    assert f"(mode {mode:04o}), expected a folder that no other user may write" in refusal(path, create)
    path.chmod(0o700)
    Folder(path, create)


def test_an_empty_folder_becomes_private(path: Path) -> None:
    """Made by hand under any umask: nothing is in it yet that another could have put there."""
    path.mkdir()
    path.chmod(0o777)
    Folder(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_what_is_put_into_an_empty_folder_before_it_is_private(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()
    path.chmod(0o777)
    fchmod = os.fchmod

    def late(descriptor: int, mode: int) -> None:
        (path / "blocks").symlink_to("/tmp")
        fchmod(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", late)
    assert "not the folder of a store" in refusal(path)


def test_modes_do_not_depend_on_the_umask(path: Path, tmp_path: Path) -> None:
    """covers: D6. Everything that is made, by the store and by the command, folders above it included."""
    deep = tmp_path / "above" / "it" / "store"
    old = os.umask(0)
    try:
        from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options

        store = open_store(resolve_store_options({"kind": "file", "path": str(deep), "deadline": 20.0}), BLOCK_BYTES)
        store.save(key(1), block(1))
        assert cli.main(["store", "verify", "--path", str(deep)]) == 0
        shutil.rmtree(deep)
        store.save(key(2), block(2))
        store.close()
    finally:
        os.umask(old)
    for entry in (tmp_path / "above").rglob("*"):
        assert stat.S_IMODE(entry.lstat().st_mode) == (0o700 if entry.is_dir() else 0o600), entry
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o700
