"""A built library as it lies in the cache: damaged, unfinished, built by two at once, or open to others."""

from __future__ import annotations

import ctypes
import logging
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_gaudi_ucm import private_folder
from vllm_gaudi_ucm.ops.cpu.native import build, library

REAL = next((found for name in build.COMPILERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(REAL is None, reason="no C++ compiler here")
SOURCE = 'extern "C" int answer() { return 42; }\n'
# Two of them, in processes of their own, as two servers that start on a new machine.
BUILD = """
import sys
from pathlib import Path
from vllm_gaudi_ucm import private_folder
from vllm_gaudi_ucm.ops.cpu.native import build
build.SOURCE = Path(sys.argv[1])
print(build.build(Path(sys.argv[2])))
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that is built in a moment."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCE", folder)
    return folder


@pytest.fixture
def umask_of_nothing() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def compiler_that(folder: Path, does: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a compiler on the path that does this first; returns the file that it can write to."""
    folder.mkdir(exist_ok=True)
    log = folder / "log"
    script = folder / "g++"
    script.write_text(f'#!/bin/sh\nlog={log}\ncase "$*" in *--version*) ;; *) {does} ;; esac\nexec {REAL} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


@pytest.mark.parametrize("left", [0, 1, 4096, -1, -50])
def test_a_damaged_library_is_built_anew(
    source: Path, cache: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A truncated one ends the process with SIGBUS, an empty one never loads."""
    path = build.build(cache)
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    with caplog.at_level(logging.WARNING):
        assert build.build(cache) == path
    assert path.read_bytes() == whole
    assert answer(path) == 42
    assert str(path) in caplog.text
    assert "rebuilding it" in caplog.text


def test_flipped_bits_are_found(source: Path, cache: Path) -> None:
    path = build.build(cache)
    whole = path.read_bytes()
    path.write_bytes(whole[:700] + bytes([whole[700] ^ 1]) + whole[701:])
    assert build.build(cache).read_bytes() == whole


def test_a_folder_or_a_link_in_its_place_is_replaced_or_named(source: Path, cache: Path, tmp_path: Path) -> None:
    path = build.build(cache)
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert build.build(cache) == path
    assert not path.is_symlink()
    path.unlink()
    path.mkdir()
    with pytest.raises(build.BuildError, match=path.name):
        build.build(cache)


def test_modes_do_not_depend_on_the_umask(source: Path, tmp_path: Path, umask_of_nothing: None) -> None:
    """covers: D6."""
    cache = tmp_path / "home" / "folder" / "native"
    path = build.build(cache)
    assert [folder.stat().st_mode & 0o777 for folder in (*path.parents[:3],)] == [0o700] * 3
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_library_that_others_may_write_is_not_loaded(
    source: Path, cache: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = build.build(cache)
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        build.build(cache)
    assert path.stat().st_mode & 0o777 == 0o600
    assert f"{mode:04o}" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("given", ["library", "folder", "above"])
def test_what_belongs_to_another_user_is_not_loaded(source: Path, tmp_path: Path, given: str) -> None:
    cache = tmp_path / "above" / "cache"
    path = build.build(cache)
    place = {"library": path, "folder": cache, "above": cache.parent}[given]
    os.chown(place, 65533, 65533)
    if given == "library":
        assert build.build(cache).stat().st_uid == 0
        return
    with pytest.raises(build.BuildError, match=rf"{place}: it belongs to another user \(65533"):
        build.build(cache)


def test_a_folder_above_that_everybody_may_write_to_is_refused(source: Path, tmp_path: Path) -> None:
    """Who may rename the cache may put another in its place. A folder like /tmp, where nobody may, is fine."""
    above = tmp_path / "above"
    build.build(above / "cache")
    above.chmod(0o777)
    with pytest.raises(build.BuildError, match=rf"{above}: .*0777.*chmod go-w {above}"):
        build.build(above / "cache")
    above.chmod(0o1777)
    build.build(above / "cache")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_in_a_user_namespace_a_folder_above_may_be_of_a_user_without_name_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `/` in Apptainer."""
    above = tmp_path / "above"
    above.mkdir()
    os.chown(above, int(private_folder._UNKNOWN_USER.read_text()), 0)
    for text, fits in (("0 0 4294967295", False), ("1000 1000 1", True)):
        (tmp_path / "map").write_text(text)
        monkeypatch.setattr(private_folder, "_UID_MAP", tmp_path / "map")
        if fits:
            build.build(above / "cache")
        else:
            with pytest.raises(build.BuildError, match=f"{above}: it belongs to another user"):
                build.build(above / "cache")


def test_two_at_once_build_once(source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = compiler_that(tmp_path / "bin", "echo called >> $log; sleep 0.5", monkeypatch)
    command = [sys.executable, "-c", BUILD, str(source), str(cache)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert len(paths) == 1
    assert answer(Path(paths.pop())) == 42
    assert len(log.read_text().splitlines()) == 2, "one compilation and one link"


def test_a_build_that_was_killed_leaves_nothing_for_long(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler_that(tmp_path / "bin", "echo called >> $log; exec sleep 60", monkeypatch)
    command = [sys.executable, "-c", BUILD, str(source), str(cache)]
    process = subprocess.Popen(command, start_new_session=True)
    while not log.exists():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (left,) = cache.iterdir()
    monkeypatch.undo()
    monkeypatch.setattr(build, "SOURCE", source)
    path = build.build(cache)  # does not wait for the dead
    assert set(cache.iterdir()) == {path, left}, "it may still be at work"
    os.utime(left, (0, 0))
    path.unlink()
    build.build(cache)
    assert list(cache.iterdir()) == [path]


def test_a_full_disk_leaves_nothing_and_is_named(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = 'echo "cc1plus: fatal error: error writing to x.s: No space left on device" >&2; exit 1'
    compiler_that(tmp_path / "bin", does, monkeypatch)
    with pytest.raises(build.CacheError, match=rf"{cache}: .*No space left on device"):
        build.build(cache)
    assert not list(cache.iterdir())


def test_a_mount_that_forbids_execution_is_named(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.statvfs(cache.parent)
    fields = [*found[:8], os.ST_NOEXEC, found[9]]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with pytest.raises(build.CacheError, match=rf"{cache}: .*noexec"):
        build.build(cache)


def test_a_cache_that_can_only_be_read_serves_what_is_in_it(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.build(cache)
    for name in ("mkdir", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, lambda *_, **__: pytest.fail("written to"))
    assert build.build(cache) == path


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HOME": None}, "HOME.*no home folder of this user"),
        ({"HOME": ""}, "HOME.*''"),
        ({"HOME": "here"}, "HOME.*'here'"),
        ({"XDG_CACHE_HOME": "here"}, "XDG_CACHE_HOME.*'here'"),
        ({"HOME": "/proc/no/home"}, "No such file or directory: '/proc/no'"),
    ],
)
def test_without_a_cache_the_kernels_are_built_for_this_process_alone(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str | None],
    words: str,
) -> None:
    """And a log line says why, and what to do."""
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])  # as of a container's user without a name
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(library.tempfile, "tempdir", None)
    monkeypatch.setattr(library, "_SIGNATURES", {"answer": (ctypes.c_int, ())})
    before = set(tmp_path.iterdir())
    with caplog.at_level(logging.WARNING):
        outcome = library._load()
    assert outcome.library is not None
    assert outcome.library.answer() == 42
    assert set(tmp_path.iterdir()) == before
    (record,) = caplog.records
    assert "every start" in record.getMessage()
    assert re.search(words, record.getMessage())
    assert record.getMessage().endswith(f"{outcome.not_kept}; {build.KEEP}")
