"""The plugin point: vLLM's own loader takes the class, and its metrics stand beside vLLM's in the registry."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.plugins import STAT_LOGGER_PLUGINS_GROUP
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

from tests.conftest import ROOT
from vllm_gaudi_ucm.observability.stat_logger import UcmStatLogger
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED: dict[str, str] = PROJECT["entry-points"][STAT_LOGGER_PLUGINS_GROUP]


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temp folder of the test's own, and the registry as it was."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    if UcmStatLogger._registered is not None:
        REGISTRY.unregister(UcmStatLogger._registered)
        UcmStatLogger._registered = None


def stat_logger(instance_id: str) -> UcmStatLogger:
    config: Any = SimpleNamespace(instance_id=instance_id)
    return UcmStatLogger(vllm_config=config, engine_indexes=[0])


def recipes(engine: int = 0) -> float | None:
    return REGISTRY.get_sample_value("gaudi_ucm_recipes_after_warm_up_total", {"engine": str(engine)})


def test_vllm_loads_what_the_project_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of the platform plugin, so that `VLLM_PLUGINS=gaudi_ucm` loads both."""
    declared = [EntryPoint(name, value, STAT_LOGGER_PLUGINS_GROUP) for name, value in DECLARED.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: declared)
    monkeypatch.setenv("VLLM_PLUGINS", "gaudi_ucm")
    assert load_stat_logger_plugin_factories() == [UcmStatLogger]
    assert DECLARED.keys() == PROJECT["entry-points"]["vllm.platform_plugins"].keys()


def test_metrics_of_the_engine_appear_and_leave() -> None:
    logger = stat_logger("77")
    assert recipes() is None, "the engine has not started"
    metrics = StepMetrics.of_engine("77", 0)
    metrics.recipe()
    assert recipes() == 1
    logger.record(None, None)
    metrics.recipe()
    assert recipes() == 2
    metrics.close()
    assert recipes() is None


def test_data_parallel_engines_are_told_apart() -> None:
    stat_logger("77")
    engines = [StepMetrics.of_engine(f"77_dp{rank}", rank) for rank in range(2)]
    engines[1].recipe()
    assert [recipes(0), recipes(1)] == [0, 1]


def test_the_newest_engine_of_a_process_is_the_one_on_metrics() -> None:
    """Two of them would print every metric twice, which Prometheus refuses as a whole."""
    old, new = StepMetrics.of_engine("1", 0), StepMetrics.of_engine("2", 0)
    new.recipe()
    stat_logger("1")
    stat_logger("2")
    assert recipes() == 1
    assert sum(family.name == "gaudi_ucm_steps" for family in REGISTRY.collect()) == 1
    old.close()
    new.close()


def test_an_installation_declares_the_same() -> None:
    installed = importlib.metadata.entry_points(group=STAT_LOGGER_PLUGINS_GROUP)
    ours = {entry.name: entry.value for entry in installed if entry.value.startswith("vllm_gaudi_ucm")}
    if not ours:
        pytest.skip("installed before the entry point was declared: `make setup` installs again")
    assert ours == DECLARED
