"""Several engines that start on one new folder of the file store at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from vllm_gaudi_ucm.store import folder as module
from vllm_gaudi_ucm.store.folder import Folder
from vllm_gaudi_ucm.store.held_folder import MARKER


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("moment", ["before the mark", "an empty mark", "after the mark"])
def test_another_engine_makes_the_folder_at_the_same_time(
    path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Between two looks at the folder the other one puts its mark, or all of it, in place."""
    path.mkdir()
    listdir, write_mark = os.listdir, module.write_mark

    def listing(folder: int) -> list[str]:
        monkeypatch.setattr(os, "listdir", listdir)
        if moment == "an empty mark":
            (path / MARKER).touch()
        else:
            Folder(path)
        return listdir(folder)

    def marking(folder: int) -> None:
        monkeypatch.setattr(module, "write_mark", write_mark)
        Folder(path)
        write_mark(folder)

    if moment == "after the mark":
        monkeypatch.setattr(module, "write_mark", marking)
    else:
        monkeypatch.setattr(os, "listdir", listing)
    folder = Folder(path)
    assert folder.hold() is not None
    assert (path / MARKER).read_text() == '{"format": 1}\n'
    assert sorted(os.listdir(path)) == ["blocks", MARKER, "tmp"]


def test_a_mark_that_a_power_cut_left_empty_is_written_again(path: Path) -> None:
    Folder(path).close()
    (path / MARKER).write_bytes(b"")
    Folder(path)
    assert (path / MARKER).read_text() == '{"format": 1}\n'


def test_many_engines_start_on_one_new_folder(path: Path) -> None:
    """In threads and in processes, each of which saves at once."""
    program = (
        "import sys\n"
        "from tests.store.blocks import block, key\n"
        "from vllm_gaudi_ucm.store.factory import open_store\n"
        "from vllm_gaudi_ucm.store.factory import resolve_store_options\n"
        "sys.stdin.readline()\n"
        "options = {'kind': 'file', 'path': sys.argv[1], 'fsync': False, 'deadline': 60.0}\n"
        "store = open_store(resolve_store_options(options), 4096)\n"
        "assert store.save(key(int(sys.argv[2])), block(int(sys.argv[2])))\n"
        "store.close()\n"
    )
    engines = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(n)], stdin=subprocess.PIPE, cwd=ROOT)
        for n in range(4)
    ]
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write(b"\n")
        engine.stdin.flush()
    for engine in engines:
        engine.communicate(timeout=60)
        assert engine.returncode == 0
    for round_number in range(30):
        new, errors, gate = path.parent / f"new {round_number}", [], threading.Barrier(4)

        def start(new: Path = new, gate: threading.Barrier = gate, errors: list[Any] = errors) -> None:
            gate.wait()
            try:
                assert Folder(new).hold() is not None
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
