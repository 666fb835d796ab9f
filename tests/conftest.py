"""Fixtures that several rooms use, and the order of all tests."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.import_heap import freeze_imports, thaw_imports
from tests.work_order import RoomScheduling, rank
from vllm_gaudi_ucm.cli.model import DEFAULT_OUTPUT, fetch_demo_model

ROOT = Path(__file__).resolve().parent.parent

# A shared machine stalls for seconds: how long an example takes says nothing about the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the tests, and with them vLLM."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze_imports()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.nodeid))


def pytest_unconfigure() -> None:
    thaw_imports()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RoomScheduling | None:
    return RoomScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the demo model, fetched and converted unless it is there."""
    return fetch_demo_model(ROOT / DEFAULT_OUTPUT)
