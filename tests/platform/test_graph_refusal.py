"""Graphs that the device lacks, or that another option excludes, are refused in the caller's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.platform.features import save_config, start


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (
            "ucm.attention.implementation: 'native' reads a step's shape on the host, which ucm.graphs.mode 'eager'",
            {"attention": {"implementation": "native"}, "graphs": {"mode": "eager"}},
        ),
        ("ucm.graphs.mode: 'capture' has no graphs to capture on cpu", {"graphs": {"mode": "capture"}}),
    ],
)
def test_graphs_are_refused_before_workers_start(tmp_path: Path, message: str, options: dict[str, Any]) -> None:
    """A worker's error would be in its log alone."""
    model = save_config(tmp_path, "LlamaForCausalLM", "llama")
    with pytest.raises(ValueError, match=message):
        start(model, additional_config={"ucm": options})
