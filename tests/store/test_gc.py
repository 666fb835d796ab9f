"""Garbage collection of a folder: by bytes, by age, in the background, and while another process reads and writes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, holds, key
from tests.store.conftest import Open, open_one
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.store.factory import open_medium, resolve_store_options

__all__ = ["open_one"]


def options(path: Path, **more: Any) -> dict[str, Any]:
    return {"kind": "file", "path": str(path), "fsync": False, "deadline": 20.0, **more}


def age(path: Path, number: int, seconds: float) -> None:
    (file,) = path.rglob(f"{key(number).hex()}.kv")
    used = time.time() - seconds
    os.utime(file, (used, used))


@pytest.fixture
def path(tmp_path: Path, open_one: Open) -> Path:
    """A folder with blocks 0 to 7, last used 800, 700, ... 100 seconds ago."""
    path = tmp_path / "store"
    store = open_one(options(path))
    for number in range(8):
        assert store.save(key(number), block(number))
        age(path, number, 100 * (8 - number))
    return path


def test_by_bytes_and_by_age(path: Path, open_one: Open, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["store", "gc", "--path", str(path), "--max-age", "650s"]) == 0
    assert capsys.readouterr().out.endswith(": 2 blocks removed, 8 KiB\n")
    assert cli.main(["store", "gc", "--path", str(path), "--capacity", str(3 * BLOCK_BYTES), "--json"]) == 0
    assert '"removed": 3' in capsys.readouterr().out
    assert holds(open_one(options(path)), range(8)) == [5, 6, 7]


def test_a_block_that_is_used_in_the_meantime_stays(path: Path, open_one: Open) -> None:
    medium: Any = open_medium(resolve_store_options(options(path)), create=False)
    medium.upkeep()
    assert holds(open_one(options(path)), [0, 1]) == [0, 1]  # by another engine, after the listing
    assert medium._shrink(4 * BLOCK_BYTES, None) == (4, 4 * BLOCK_BYTES)
    medium.check_integrity()
    medium.close()
    assert holds(open_one(options(path)), range(8)) == [0, 1, 6, 7]


def test_in_the_background(path: Path, open_one: Open) -> None:
    store = open_one(options(path, max_age=350))
    assert store.stats().evictions == 5
    assert holds(store, range(8)) == [5, 6, 7]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], "gc needs --capacity, --max-age or both"),
        (["--max-age", "7"], "--max-age: found '7'"),
        (["--capacity", "lots"], "--capacity: found 'lots'"),
    ],
)
def test_bad_options_are_named(path: Path, capsys: pytest.CaptureFixture[str], given: list[str], named: str) -> None:
    assert cli.main(["store", "gc", "--path", str(path), *given]) == 2
    assert named in capsys.readouterr().err


OTHER = """
import os, random, sys
from tests.store.blocks import block, key, loaded
from vllm_gaudi_ucm.store.factory import open_store, resolve_store_options
store = open_store(resolve_store_options({"kind": "file", "path": sys.argv[1], "fsync": False, "deadline": 20.0}), 4096)
print("ready", flush=True)
hits, draws = 0, random.Random(0)
while not os.path.exists(sys.argv[2]):
    number = draws.randrange(40)
    assert store.save(key(number), block(number))
    found = loaded(store, draws.randrange(40))
    hits += found is not None
    number = draws.randrange(40)
    found = loaded(store, number)
    assert found is None or found == block(number)
stats = store.stats()
print(hits, stats.errors + stats.timeouts + stats.corrupt, flush=True)
"""


def test_while_another_process_reads_and_writes(path: Path, tmp_path: Path) -> None:
    """covers: C5"""
    end = tmp_path / "end"
    command = [sys.executable, "-c", OTHER, str(path), str(end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        medium = open_medium(resolve_store_options(options(path)), create=False)
        removed = 0
        deadline = time.monotonic() + 60
        while removed <= 30 and other.poll() is None and time.monotonic() < deadline:
            removed += medium.collect(10 * BLOCK_BYTES, None).blocks
        end.touch()
        hits, faults = map(int, other.stdout.read().split())
    assert other.returncode == 0
    assert removed > 30
    assert hits > 0
    assert faults == 0
    medium.collect(0, None)
    assert list(medium.blocks()) == []
    medium.close()
