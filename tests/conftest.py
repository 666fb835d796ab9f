"""Fixtures that several rooms use, and the order of all tests."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.import_heap import freeze_imports, freeze_rest
from tests.log_capture import find_loggers_once
from tests.work_order import RoomScheduling, rank
from vllm_gaudi_ucm.device.detect import has_cuda
from vllm_gaudi_ucm.envs import DEVICE
from vllm_gaudi_ucm_tools.demo.model import DEFAULT_OUTPUT, fetch_demo_model

ROOT = Path(__file__).resolve().parent.parent
CHILDREN = str(ROOT / "tests/children")

# A shared machine stalls for seconds: how long an example takes says nothing about the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

find_loggers_once()

if CHILDREN not in os.environ.get("PYTHONPATH", ""):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (CHILDREN, os.environ.get("PYTHONPATH"))))
    runpy.run_path(f"{CHILDREN}/sitecustomize.py")

# Where there is an NVIDIA GPU vLLM has a platform of its own, and ours stays away unless it is asked for.
if DEVICE not in os.environ and Path("/dev/nvidiactl").exists() and has_cuda():
    os.environ[DEVICE] = "cuda"

# A shell's background job ignores SIGINT, and so do its children: tests that interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        freeze_rest()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RoomScheduling | None:
    return RoomScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def _deepseek_v3_keeps_its_name() -> Generator[None]:
    """vLLM reads DeepSeek V3.2 with Transformers' class of V3, and writes its own name on it for the whole process."""
    yield
    module = sys.modules.get("transformers.models.deepseek_v3.configuration_deepseek_v3")
    if module is not None:
        module.DeepseekV3Config.model_type = "deepseek_v3"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the demo model, fetched and converted unless it is there."""
    return fetch_demo_model(ROOT / DEFAULT_OUTPUT)


@pytest.fixture(scope="session")
def tiny_text_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the most frequent tokens of the demo model: it takes a fraction of the time."""
    # not imported by rooms that need no model
    from tests.text_model import make_text_model

    return make_text_model(smollm2, tmp_path_factory.mktemp("models") / "text")
