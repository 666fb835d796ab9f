"""A private folder, as an engine makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_gaudi_ucm.observability.metrics_file import make_private


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "metrics"
    make_private(folder)
    return folder
