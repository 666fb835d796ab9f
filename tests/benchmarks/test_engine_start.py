"""A first and a second start, as the benchmark shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_start


def test_both_starts_by_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The second finds the kernels of the first; what no stage says is vLLM's own."""
    folders: list[Path] = []

    def serve(options: Any, kernels: Path) -> dict[str, Any]:
        assert kernels.is_dir()
        folders.append(kernels)
        stages = {"model": 3.0, "kernels": 12.0} if len(folders) == 1 else {"model": 3.0, "kernels": 0.5}
        seconds = 4.0 + sum(stages.values())
        return {"device": "a GPU", "graphs": 48, "start_seconds": seconds, "import_seconds": 2.5, "stages": stages}

    monkeypatch.setattr(engine_start, "serve", serve)
    written = tmp_path / "starts.json"
    engine_start.main(["--device", "cuda", "--json", str(written)])
    assert folders[0] == folders[1]
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    for row in (["imports", "2.5", "2.5"], ["kernels", "12.0", "0.5"], ["other", "1.5", "1.5"], ["all", "19.0", "7.5"]):
        assert row in lines
    assert len(json.loads(written.read_text())["starts"]) == 2


def test_layers_of_a_shape_can_be_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def serve(options: Any, kernels: Path) -> dict[str, Any]:
        seen.append(engine_start.asked_of(options))
        return {"device": "a GPU", "graphs": 8, "start_seconds": 9.0, "import_seconds": 2.0, "stages": {}}

    monkeypatch.setattr(engine_start, "serve", serve)
    engine_start.main(["--device", "cuda", "--layers", "8", "--max-graphs", "8", "--starts", "1"])
    assert (seen[0]["config"]["num_hidden_layers"], seen[0]["max_graphs"], seen[0]["mode"]) == (8, 8, "capture")
    engine_start.main(["--device", "cuda", "--starts", "1"])
    assert seen[1]["config"]["num_hidden_layers"] == 32, "a shape is not changed for others"
