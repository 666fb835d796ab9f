"""A missing, torn or foreign file never breaks /metrics, and never hides another engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.observability.exposition import scrape
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics

RECIPES = 'gaudi_ucm_recipes_after_warm_up_total{engine="%d"}'
WRITER = """
import os, sys
from pathlib import Path
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
metrics = StepMetrics(Path(sys.argv[1]))
for _ in range(5):
    metrics.recipe()
os._exit(9)
"""


def test_no_folder_no_metrics(tmp_path: Path) -> None:
    assert scrape(tmp_path / "absent") == {}


@given(st.integers(0, 3000))
@settings(max_examples=40)
def test_a_file_cut_anywhere(length: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        StepMetrics(folder, 0).recipe()
        StepMetrics(folder, 1).recipe()
        whole = (folder / "counter_1.db").read_bytes()
        (folder / "counter_1.db").unlink()  # a file of its own: the writer's mapping of the old one stays valid
        (folder / "counter_1.db").write_bytes(whole[:length])
        assert scrape(folder)[RECIPES % 0] == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 64, b"\x40\0\0\0\0\0\0\0\x04\0\0\0[1] " + bytes(64)])
@pytest.mark.parametrize("kind", ["counter", "gauge_mostrecent"])
def test_a_foreign_file(folder: Path, kind: str, content: bytes) -> None:
    metrics = StepMetrics(folder, 0)
    metrics.recipe()
    metrics.warm_up(1, 2, 3.0, None)
    (folder / f"{kind}_1.db").write_bytes(content)
    seen = scrape(folder)
    assert seen[RECIPES % 0] == 1
    assert seen['gaudi_ucm_warm_up_seconds{engine="0"}'] == 3.0


def test_a_folder_of_others_is_not_read(folder: Path) -> None:
    StepMetrics(folder).recipe()
    folder.chmod(0o755)
    assert scrape(folder) == {}


def test_figures_of_a_process_that_was_killed_are_complete(folder: Path) -> None:
    """Every count is in the file the moment it is made: nothing waits to be flushed."""
    done = subprocess.run([sys.executable, "-c", WRITER, str(folder)], timeout=120)
    assert done.returncode == 9
    assert scrape(folder)[RECIPES % 0] == 5
