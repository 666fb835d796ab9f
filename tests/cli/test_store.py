"""`gaudi-ucm store`: stat, verify and clear on folders and on a real server, beside a store that is open."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.store.blocks import BLOCK_BYTES, block, holds, key
from tests.store.conftest import open_one, redis_server, redis_session
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.store.folder import Folder
from vllm_gaudi_ucm.store.medium import StoredBlock

__all__ = ["open_one", "redis_server", "redis_session"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(params=["file", "redis"])
def place(request: pytest.FixtureRequest, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Options of a store, and how the command is told of it."""
    if request.param == "file":
        return {"kind": "file", "path": str(path), "fsync": False, "deadline": 20.0}, ["--path", str(path)]
    url = request.getfixturevalue("redis_server").url
    return {"kind": "redis", "url": url, "deadline": 20.0}, ["--url", url]


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(["store", *arguments])
    written = capsys.readouterr()
    return code, written.out if code in (0, 1) else written.err


def test_stat_verify_and_clear(place: Any, open_one: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options, where = place
    store = open_one(options)
    small = open_one(options, 512)
    for number in range(3):
        store.save(key(number), block(number))
        small.save(key(number), block(number, 512))
    code, text = command(capsys, "stat", "--json", *where)
    found = json.loads(text)
    assert (code, found["blocks"], found["bytes"]) == (0, 6, 3 * (BLOCK_BYTES + 512))
    assert [(row["block_bytes"], row["blocks"]) for row in found["sizes"]] == [(512, 3), (BLOCK_BYTES, 3)]
    assert found["store"].startswith(f"{options['kind']} store ")
    code, text = command(capsys, "stat", *where)
    assert code == 0
    assert "4,096" in text
    assert "12 KiB" in text
    assert command(capsys, "verify", *where)[1].endswith(": 6 blocks intact, 0 corrupt ones removed\n")
    assert command(capsys, "clear", "--yes", *where)[1].endswith(": 6 blocks removed\n")
    assert holds(store, range(3)) == []
    assert json.loads(command(capsys, "clear", "--yes", "--json", *where)[1])["removed"] == 0


def test_verify_finds_and_removes_damage(path: Path, open_one: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """covers: D3"""
    store = open_one({"kind": "file", "path": str(path), "fsync": False, "deadline": 20.0})
    for number in range(4):
        store.save(key(number), block(number))
    for number, content in ((1, b"short"), (2, bytes(64 + BLOCK_BYTES))):
        Path(Folder(path).file(StoredBlock(key(number), BLOCK_BYTES))).write_bytes(content)
    code, text = command(capsys, "verify", "--json", "--path", str(path))
    assert (code, json.loads(text)["intact"], json.loads(text)["corrupt"]) == (1, 2, 2)
    assert command(capsys, "verify", "--path", str(path))[0] == 0
    assert holds(store, range(4)) == [0, 3]


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False)])
def test_clear_asks(
    path: Path,
    open_one: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    removed: bool,
) -> None:
    store = open_one({"kind": "file", "path": str(path), "fsync": False, "deadline": 20.0})
    store.save(key(1), block(1))
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    code = cli.main(["store", "clear", "--path", str(path)])
    asked = capsys.readouterr().err
    assert f"Remove 1 blocks, 4 KiB, from file store {path}?" in asked
    assert code == (0 if removed else 2)
    assert holds(store, [1]) == ([] if removed else [1])


def test_stat_never_evicts(path: Path, open_one: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A look with other options than the engine's must not cost blocks."""
    store = open_one({"kind": "file", "path": str(path), "fsync": False, "deadline": 20.0})
    for number in range(3):
        store.save(key(number), block(number))
    options = json.dumps({"kind": "file", "path": str(path), "capacity": 1})
    assert json.loads(command(capsys, "stat", "--json", "--store", options)[1])["blocks"] == 3
    assert holds(store, range(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stat", "--path", "/nowhere/at/all"], "store.path: found /nowhere/at/all (no folder)"),
        (["stat", "--path", "/usr"], "(not the folder of a store), expected the file gaudi-ucm-store.json in it"),
        (["clear", "--yes", "--path", "/usr"], "(not the folder of a store)"),
        (["verify", "--url", "redis://127.0.0.1:1/0"], "redis store redis://127.0.0.1:1/0: ConnectionError"),
        (["stat", "--url", "ftp://x"], "store.url: found 'ftp://x'"),
        (["stat", "--store", '{"kind": "memory"}'], "store.kind: found 'memory', expected file or redis"),
        (["stat", "--store", '{"kind": "file"'], "store: found malformed text (line 1, column 16"),
        (["stat", "--store", "/missing.yaml"], "store: found file '/missing.yaml' that cannot be read"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = command(capsys, *arguments)
    assert code == 2
    assert message in text
    assert len(text.splitlines()) == 1


def test_clear_without_a_terminal_needs_yes(path: Path, open_one: Any, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_one({"kind": "file", "path": str(path), "fsync": False, "deadline": 20.0})
    store.save(key(1), block(1))
    code, text = command(capsys, "clear", "--path", str(path))
    assert (code, "add --yes" in text) == (2, True)
    assert holds(store, [1]) == [1]


@pytest.mark.parametrize("arguments", [["stat"], ["stat", "--path", "/x", "--url", "redis://h"], []])
def test_exactly_one_store(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["store", *arguments])
    assert end.value.code == 2
    assert "usage: gaudi-ucm store" in capsys.readouterr().err
