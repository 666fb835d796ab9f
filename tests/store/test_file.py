"""The file store: bounded, private, whole after a killed process, shared by several engines."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, holds, key, loaded
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.store.file import FileMedium
from vllm_gaudi_ucm.store.folder import MARKER, Folder
from vllm_gaudi_ucm.store.medium import StoredBlock

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys
from tests.store.blocks import block, key
from vllm_gaudi_ucm.store.factory import open_store
from vllm_gaudi_ucm.store.factory import resolve_store_options
path, first, last, size, capacity = sys.argv[1], *map(int, sys.argv[2:])
options = {"kind": "file", "path": path, "capacity": capacity, "fsync": False, "deadline": 60.0}
store = open_store(resolve_store_options(options), size)
print("open", flush=True)
sys.stdin.readline()
for number in range(first, last):
    assert store.save(key(number), block(number, size))
    print(number, flush=True)
store.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "store"


@pytest.fixture
def open_file(path: Path, open_one: Any) -> Any:
    """Opens the store in `path` with some options."""
    return lambda **options: open_one({"kind": "file", "path": str(path), "deadline": 20.0, "fsync": False, **options})


def file_of(path: Path, number: int) -> Path:
    return Path(Folder(path).file(StoredBlock(key(number), BLOCK_BYTES)))


def start_writer(path: Path, first: int, last: int, size: int = BLOCK_BYTES, capacity: int = 1 << 30) -> Any:
    """A process that saves blocks, once it reads a line."""
    command = [sys.executable, "-c", WRITER, str(path), *map(str, (first, last, size, capacity))]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "open\n"
    return writer


def let_go(writer: Any) -> None:
    writer.stdin.write("go\n")
    writer.stdin.flush()


@pytest.mark.parametrize("fsync", [False, True])
def test_blocks_outlast_the_process(path: Path, open_file: Any, fsync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: D3. Option fsync: each block is on the disk before it counts as saved."""
    synced: list[str] = []
    fsync_of_os = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync_of_os(descriptor)

    first = open_file(fsync=fsync)
    monkeypatch.setattr(os, "fsync", recorded)
    for number in range(5):
        first.save(key(number), block(number))
    assert len([name for name in synced if Path(name).parent == path / "tmp"]) == (5 if fsync else 0)
    leaves = {str(file_of(path, number).parent) for number in range(5)}
    assert leaves.intersection(synced) == (leaves if fsync else set())
    assert fsync or not synced
    first.close()
    second = open_file()
    assert holds(second, range(6)) == [0, 1, 2, 3, 4]
    stats = second.stats()
    assert (stats.blocks, stats.bytes, stats.capacity) == (5, 5 * BLOCK_BYTES, 32 << 30)


def test_nobody_else_may_read(path: Path, open_file: Any) -> None:
    """covers: D6"""
    old = os.umask(0)
    try:
        open_file().save(key(1), block(1))
    finally:
        os.umask(old)
    for folder, _, files in os.walk(path.parent):
        if folder != str(path.parent.parent):
            assert os.stat(folder).st_mode & 0o777 == 0o700, folder
        assert all(os.stat(os.path.join(folder, file)).st_mode & 0o077 == 0 for file in files)


def test_an_existing_store_becomes_private(path: Path, open_file: Any) -> None:
    """covers: D6"""
    open_file().close()
    path.chmod(0o755)
    open_file()
    assert path.stat().st_mode & 0o777 == 0o700


def test_folders_that_are_no_store_are_refused(tmp_path: Path, open_one: Any) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / MARKER).write_text('{"format": 0}')
    for name, message in (("home", "not the folder of a store"), ("file", "not a folder"), ("old", "another version")):
        with pytest.raises(UcmConfigError, match=message):
            open_one({"kind": "file", "path": str(tmp_path / name)})
    with pytest.raises(UcmConfigError, match=r"store\.path: found .*Not a directory.*expected a folder"):
        open_one({"kind": "file", "path": str(tmp_path / "file" / "below")})
    assert (tmp_path / "home").stat().st_mode & 0o077 != 0
    assert os.listdir(tmp_path / "home") == ["letter.txt"]


def test_capacity_evicts_the_least_recently_used(open_file: Any) -> None:
    """Option capacity."""
    store = open_file(capacity=4 * BLOCK_BYTES + 1)
    for number in range(4):
        store.save(key(number), block(number))
    assert loaded(store, 0) == block(0)
    assert store.save(key(1), block(1))  # saved again: used
    store.save(key(4), block(4))
    assert holds(store, range(5)) == [0, 1, 3, 4]
    stats = store.stats()
    assert (stats.blocks, stats.bytes, stats.evictions) == (4, 4 * BLOCK_BYTES, 1)
    store.check_integrity()


def test_a_restart_keeps_the_order_of_use_and_the_bound(open_file: Any) -> None:
    store = open_file()
    for number in range(6):
        store.save(key(number), block(number))
    loaded(store, 0)
    store.close()
    smaller = open_file(capacity=3 * BLOCK_BYTES)
    assert holds(smaller, range(6)) == [0, 4, 5]
    assert smaller.stats().evictions == 3


def test_a_block_larger_than_the_store_is_refused(open_file: Any) -> None:
    with pytest.raises(ValueError, match=r"store\.capacity: found 100 bytes, expected room for one block of 4096"):
        open_file(capacity=100)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "grow", "folder"])
def test_damaged_files_are_misses(path: Path, open_file: Any, damage: str) -> None:
    """covers: D3"""
    store = open_file()
    store.save(key(1), block(1))
    file = file_of(path, 1)
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-1] ^= 0x10
    file.unlink()
    if damage == "folder":
        file.mkdir()
        assert loaded(store, 1) is None
        assert store.stats().breaker == "closed"
        return
    file.write_bytes({"truncate": content[:-7], "flip": content, "empty": b"", "grow": content + b"x"}[damage])
    assert store.lookup([key(1)]) == [damage == "flip"]
    assert loaded(store, 1) is None
    assert not file.exists()
    assert (store.stats().corrupt, store.stats().blocks) == (1, 0)
    assert store.save(key(1), block(1))
    assert loaded(store, 1) == block(1)


def test_a_link_in_a_blocks_place_is_not_followed(path: Path, open_file: Any, tmp_path: Path) -> None:
    """covers: D6"""
    store = open_file()
    store.save(key(1), block(1))
    file = file_of(path, 1)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert loaded(store, 1) is None
    assert store.stats().errors == 1


def test_a_full_disk_loses_saves_only(path: Path, open_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a record is written when there is no room left: nothing of it stays, and loads go on."""
    store = open_file()
    store.save(key(1), block(1))
    write = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) > BLOCK_BYTES // 2:
            return write(descriptor, data[: BLOCK_BYTES // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for number in range(2, 8):
        assert not store.save(key(number), block(number))
    stats = store.stats()
    assert (stats.errors, stats.breaker, stats.blocks) == (6, "closed", 1)
    assert list((path / "tmp").iterdir()) == []
    assert loaded(store, 1) == block(1)
    store.check_integrity()
    monkeypatch.undo()
    assert store.save(key(2), block(2))


def test_a_limit_of_the_system_on_file_sizes(path: Path, open_file: Any) -> None:
    """The kernel itself refuses the write, in the middle of a record."""
    store = open_file()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 2, hard))
    try:
        assert not store.save(key(1), block(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.stats().errors == 1
    assert list((path / "tmp").iterdir()) == []
    assert store.save(key(1), block(1))


def test_a_folder_that_is_removed_meanwhile(path: Path, open_file: Any) -> None:
    store = open_file()
    store.save(key(1), block(1))
    subprocess.run(["rm", "-r", str(path)], check=True)
    assert loaded(store, 1) is None
    assert store.save(key(2), block(2))
    assert holds(store, range(3)) == [2]


def test_a_process_killed_while_it_writes(path: Path, open_file: Any) -> None:
    """covers: D3. What it had saved is there and whole; what it was writing is not, and leaves nothing behind."""
    size = 8 << 20  # long enough to be in the middle of one
    writer = start_writer(path, 0, 1000, size)
    let_go(writer)
    saved = [int(writer.stdout.readline()) for _ in range(3)]
    end = time.monotonic() + 60
    while not (parts := list((path / "tmp").iterdir())):
        assert time.monotonic() < end
    writer.send_signal(signal.SIGKILL)
    saved += [int(line) for line in writer.communicate()[0].split()]
    for part in (path / "tmp").iterdir():
        os.utime(part, (1, 1))  # past the grace of a writer that has not locked its file yet
    (path / "tmp" / "old-part").write_bytes(b"half")
    os.utime(path / "tmp" / "old-part", (1, 1))
    from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options

    store = open_store(resolve_store_options({"kind": "file", "path": str(path), "deadline": 20.0}), size)
    assert parts
    assert list((path / "tmp").iterdir()) == []
    intact, corrupt = store.verify()
    assert intact in (len(saved), len(saved) + 1)  # one may have been moved into place just before
    assert corrupt == 0
    assert [loaded(store, number, size) == block(number, size) for number in saved] == [True] * len(saved)
    store.close()


def test_a_living_writers_file_is_not_swept(path: Path) -> None:
    folder = Folder(path)
    part = path / "tmp" / "1-2-3"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl;f=open({str(part)!r},'w');fcntl.flock(f,2);print(1,flush=True);input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    os.utime(part, (1, 1))
    assert folder.hold_or_make().sweep() == 0
    holder.communicate(b"\n")
    os.utime(part, (1, 1))
    assert folder.hold_or_make().sweep() == 1


def test_two_engines_on_one_folder(path: Path, open_file: Any) -> None:
    """covers: D9. Both write the same and other blocks at once, and each finds the other's."""
    store = open_file()
    writers = [start_writer(path, 0, 60), start_writer(path, 30, 90)]
    for writer in writers:
        let_go(writer)
    for number in range(20, 70):
        assert store.save(key(number), block(number))
    for writer in writers:
        assert len(writer.communicate()[0].split()) == 60
        assert writer.returncode == 0
    assert holds(store, range(91)) == list(range(90))
    assert store.verify() == (90, 0)
    assert list((path / "tmp").iterdir()) == []
    assert (store.stats().errors, store.stats().corrupt) == (0, 0)


@pytest.fixture
def two_media(path: Path) -> tuple[FileMedium, FileMedium]:
    """Two engines' views of one folder, four blocks large."""
    return FileMedium(Folder(path), 4 * BLOCK_BYTES, False), FileMedium(Folder(path), 4 * BLOCK_BYTES, False)


def put(medium: FileMedium, number: int) -> None:
    medium.write(key(number), memoryview(bytes(64) + bytes(block(number))))


def there(medium: FileMedium) -> list[bool]:
    return medium.lookup([key(number) for number in range(8)], BLOCK_BYTES)


def test_engines_keep_one_bound_together(two_media: tuple[FileMedium, FileMedium]) -> None:
    one, two = two_media
    for number in range(4):
        put(one if number % 2 else two, number)
    one.upkeep()
    assert one.usage(BLOCK_BYTES) == (4, 4 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    put(one, 4)
    assert sum(there(one)) == 4
    two.upkeep()
    assert two.usage(BLOCK_BYTES).blocks == 4
    for number in range(5, 8):
        put(two, number)
    one.upkeep()
    assert one.usage(BLOCK_BYTES) == two.usage(BLOCK_BYTES) == (4, 4 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    assert sum(there(one)) == 4
    one.check_integrity()
    two.check_integrity()


def test_no_engine_evicts_what_another_has_just_used(two_media: tuple[FileMedium, FileMedium]) -> None:
    one, two = two_media
    for number in range(4):
        put(one, number)
    record = memoryview(bytearray(64 + BLOCK_BYTES))
    assert two.read(key(0), BLOCK_BYTES, record) == len(record)
    put(one, 4)
    assert there(one) == [True, False, True, True, True, False, False, False]


def test_upkeep_finds_what_others_removed(two_media: tuple[FileMedium, FileMedium]) -> None:
    one, two = two_media
    for number in range(3):
        put(one, number)
    one.upkeep()
    assert two.delete([StoredBlock(key(0), BLOCK_BYTES), StoredBlock(key(7), BLOCK_BYTES)]) == 1
    one.upkeep()
    assert one.usage(BLOCK_BYTES).blocks == 2


def test_stray_files_are_left_alone(path: Path, open_file: Any) -> None:
    store = open_file()
    store.save(key(1), block(1))
    leaf = file_of(path, 1).parent
    (leaf / "notes.txt").write_text("x")
    (leaf / ("z" * 64 + ".kv")).write_text("no hexadecimal")
    (path / "blocks" / "other").mkdir()
    assert store.verify() == (1, 0)
    assert store.clear() == 1
    assert len(list(leaf.iterdir())) == 2


def test_verify_leaves_the_order_of_use(path: Path, open_file: Any) -> None:
    """Who only looks makes no block the newest: neither on the disk, nor for this engine, nor by the command."""
    store = open_file(capacity=4 * BLOCK_BYTES)
    for number in range(4):
        store.save(key(number), block(number))
    for number in (2, 0):
        loaded(store, number)
    before = [file_of(path, number).stat().st_mtime_ns for number in range(4)]
    assert store.verify() == (4, 0)
    assert cli.main(["store", "verify", "--path", str(path)]) == 0
    assert [file_of(path, number).stat().st_mtime_ns for number in range(4)] == before
    for number in (10, 11):
        store.save(key(number), block(number))
    assert store.lookup([key(number) for number in range(4)]) == [True, False, True, False]
