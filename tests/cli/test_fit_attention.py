"""`gaudi-ucm fit-attention` on a grid of two steps: file, report, and what it refuses; the doctor's row on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.cli.doctor.attention_cost import attention_cost_checks
from vllm_gaudi_ucm.config.ucm_config import AttentionConfig, CpuConfig, UcmConfig
from vllm_gaudi_ucm.ops.unified_attention.cost import fit
from vllm_gaudi_ucm.ops.unified_attention.cost.grid import GEOMETRIES, Geometry, Step
from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import Facts, default_path, load_model
from vllm_gaudi_ucm.ops.unified_attention.cost.way import candidates

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps of one geometry, and a home folder of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def steps(geometry: Geometry, *, slices: bool) -> list[Step]:
        return [Step(2, 0, 0, 2, 20), Step(1, 1, 8, 1, 20)]

    monkeypatch.setattr(fit, "steps_of", steps)
    monkeypatch.setattr(fit.measure, "__defaults__", (lambda done: None, GEOMETRIES[:1], 2))
    return tmp_path


def test_the_fit_is_left_in_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit-attention", "--repeats", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    facts = Facts.of(CPU)
    path = default_path(facts)
    assert set(load_model(path, facts).coefficients) == set(candidates("cpu"))
    assert "2 decodes, 2 shared blocks, 20 own tokens" in printed
    assert "regret" in printed
    assert str(path) in printed.replace(" ", "")


def test_json_and_a_fit_that_is_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    assert cli.main(["fit-attention", "--json", "-o", str(path), "--repeats", "1"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["file"], len(made["steps"])) == (str(path), 2)
    assert all(step["regret"] >= 0 and step["chosen"] in step["measured"] for step in made["steps"])
    before = path.stat().st_mtime_ns
    assert cli.main(["fit-attention", "-o", str(path)]) == 0
    assert f"there is a fit for this device in {path}; --force measures again" in capsys.readouterr().out
    assert path.stat().st_mtime_ns == before
    assert cli.main(["fit-attention", "-o", str(path), "--force", "--repeats", "1"]) == 0
    assert path.stat().st_mtime_ns > before


def test_threads_are_part_of_the_fit(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        assert cli.main(["fit-attention", "--threads", str(threads + 1), "--repeats", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert default_path(Facts.of(CPU, threads + 1)).is_file()
    assert not default_path(Facts.of(CPU)).is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "0"], "--threads is 0, expected at least 1"),
        (["--repeats", "0"], "--repeats is 0, expected at least 1"),
        (["--device", "cuda", "--threads", "2"], "--threads is 2: only with --device cpu"),
    ],
)
def test_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """covers: A18"""
    assert cli.main(["fit-attention", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_doctor_tells_whether_there_is_a_fit(tmp_path: Path) -> None:
    def row(device: str = "cpu", **attention: object) -> tuple[str, str]:
        config = UcmConfig(attention=AttentionConfig(**attention), cpu=CpuConfig())  # type: ignore[arg-type]
        (check,) = attention_cost_checks(config, device)
        return check.status, f"{check.found} {check.advice}"

    assert row()[0] == "info"
    assert "fit-attention" in row()[1]
    assert row(cost_model="off") == ("info", "'off'; fixed rules ")
    assert row("hpu")[0] == "info"
    assert row(cost_model=str(tmp_path / "none.json"))[0] == "fail"
    path = default_path(Facts.of(CPU))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert row()[0] == "warn"
    assert cli.main(["fit-attention", "--repeats", "1"]) == 0
    assert row()[0] == "ok"
