"""Fixtures that several rooms use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from vllm_gaudi_ucm.cli.model import DEFAULT_OUTPUT, fetch_demo_model

ROOT = Path(__file__).resolve().parent.parent

# A shared machine stalls for seconds: how long an example takes says nothing about the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the demo model, fetched and converted unless it is there."""
    return fetch_demo_model(ROOT / DEFAULT_OUTPUT)
