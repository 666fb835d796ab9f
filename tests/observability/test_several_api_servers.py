"""With several API servers vLLM answers /metrics from the files in PROMETHEUS_MULTIPROC_DIR: the engine's are there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics

API_SERVER = (
    "from prometheus_client import Counter; Counter('requests', 'of an API server', ['engine']).labels('0').inc()"
)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as it is when engines start, and a temp folder that must stay empty."""
    folder, temp = tmp_path / "prometheus", tmp_path / "temp"
    folder.mkdir()
    temp.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(temp))
    return folder


def read(folder: Path) -> Mapping[tuple[str, str], float]:
    """Values by name and engine, summed over the other labels, as an API server reads them; no sample comes twice."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    found: dict[tuple[str, str], float] = {}
    for family in registry.collect():
        seen = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(seen) == len(set(seen)), family.name
        for sample in family.samples:
            key = (sample.name, sample.labels["engine"])
            found[key] = found.get(key, 0.0) + sample.value
    return found


def test_engines_stand_beside_the_api_servers(shared: Path) -> None:
    servers = [subprocess.Popen([sys.executable, "-c", API_SERVER], env=os.environ) for _ in range(2)]
    engines = [StepMetrics.of_engine(f"77_dp{rank}", rank) for rank in range(2)]
    for rank, metrics in enumerate(engines):
        for _ in range(rank + 1):
            metrics.step(Bucket("--u", 4, 0, 9, 4), Bucket("--u", 8, 0, 16, 8))
        metrics.warm_up(rank, 60, 2.5, None)
    assert [server.wait(60) for server in servers] == [0, 0]
    seen = read(shared)
    assert [seen["gaudi_ucm_steps_total", rank] for rank in "01"] == [1, 2]
    assert [seen["gaudi_ucm_warm_up_seconds", rank] for rank in "01"] == [2.5, 2.5]
    assert seen["requests_total", "0"] == 2, "one per API server"
    assert not any((shared.parent / "temp").iterdir())


def test_no_process_id_is_a_name_of_ours(shared: Path) -> None:
    """prometheus_client names the files of a process after its id, which may be any number."""
    StepMetrics.of_engine("77", 12)
    writers = [file.stem.rpartition("_")[2] for file in shared.iterdir()]
    assert len(writers) == 2
    assert not any(writer.isdecimal() for writer in writers)


def test_files_stay_when_an_engine_ends_and_are_replaced_by_the_next(shared: Path) -> None:
    """A file that vanished between listing and opening would fail /metrics; one more beside it would add up."""
    old = StepMetrics.of_engine("77", 0)
    old.recipe()
    old.close()
    assert read(shared)["gaudi_ucm_recipes_after_warm_up_total", "0"] == 1
    new = StepMetrics.of_engine("78", 0)
    old.recipe()
    assert read(shared)["gaudi_ucm_recipes_after_warm_up_total", "0"] == 0
    new.recipe()
    assert read(shared)["gaudi_ucm_recipes_after_warm_up_total", "0"] == 1
    assert {file.suffix for file in shared.iterdir()} == {".db"}


def test_a_folder_that_is_gone_costs_the_metrics_only(shared: Path) -> None:
    shared.rmdir()
    StepMetrics.of_engine("77", 0).recipe()
    assert not shared.exists()


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_the_folder_is_private(
    value: str | None, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    else:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", value)
    assert envs.multi_process_metrics() is None
    StepMetrics.of_engine("77", 0)
    assert not any(shared.iterdir())
