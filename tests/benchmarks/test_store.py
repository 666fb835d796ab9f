"""The store tables: every contender moves every block, and rows say what they compare with."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import store, store_step
from benchmarks.store_bandwidth import measure_bandwidth


def test_every_contender_loads_every_block() -> None:
    """The benchmark compares what arrived with what was saved, so that a load of nothing would fail here."""
    done: list[float] = []
    rows = measure_bandwidth(4096, 5, 1, done.append)
    names = [row["contender"] for row in rows]
    assert {"plain copy", "pread", "memory load", "file load", "memory engine, 4 threads"} <= set(names)
    assert all(row["MiB/s"] > 0 for row in rows)
    peers = {row["contender"] for row in rows if row["of its peer"] is not None}
    assert peers == set(names) - {"plain copy", "pread", "redis get"}
    assert done == sorted(done)


def test_steps_with_and_without_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BLOCK_BYTES": 4096, "RESIDENT": 32, "STORED": 64}.items():
        monkeypatch.setattr(store_step, name, value)
    rows = store_step.measure_steps(3, lambda done: None)
    assert [row["predicted"] for row in rows] == ["all resident", *["0 %", "50 %", "80 %", "100 %"] * 2]
    resident, waiting, going_on = rows[0], rows[1:5], rows[5:]
    assert resident["against resident"] == 1
    assert resident["before computing, ms"] == 0 < waiting[0]["before computing, ms"]
    assert all(row["late, of the chosen"] == 0 for row in [resident, *waiting])
    assert all(0 <= row["late, of the chosen"] <= 12 / 32 for row in going_on)


def test_the_table_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["store", "--parts", "bandwidth", "--blocks", "2", "--block-bytes", "4096", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--json", str(file)])
    store.main()
    assert "plain copy" in capsys.readouterr().out
    assert '"bandwidth"' in file.read_text()


def test_first_token_needs_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["store"])
    monkeypatch.setattr(argparse.ArgumentParser, "exit", lambda self, status, message: pytest.fail(message))
    with pytest.raises(pytest.fail.Exception, match="--model"):
        store.main()
