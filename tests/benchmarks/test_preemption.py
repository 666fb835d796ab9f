"""The benchmark of preemption: where swapping begins to pay, and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import preemption


def test_large_blocks_favour_swapping() -> None:
    again = preemption.recompute_seconds(4096, "gaudi3")
    seconds = [preemption.swap_seconds(4096, size, 50e9, 100e-6) for size in preemption.BLOCK_SIZES]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > again > seconds[-1]
    size = preemption.crossing(4096, "gaudi3", 50e9, 100e-6)
    assert size is not None
    assert preemption.swap_seconds(4096, size, 50e9, 100e-6) < again
    assert preemption.crossing(4096, "gaudi3", 50e9, 1.0) is None


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    assert preemption.main(["--plot", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    assert "32,768" in capsys.readouterr().out
