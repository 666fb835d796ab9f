"""The file of a fitted cost model: valid for one device alone, and nothing else is believed.

covers: A18, D10.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_gaudi_ucm.ops.native import matrix_unit
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import NAMES, CostModel
from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import (
    MOST_BYTES,
    Facts,
    ModelFileError,
    default_path,
    load_model,
    save_model,
)

FACTS = Facts("a CPU", "2.13", "kernels-1", 2, "f")
MODEL = CostModel({"native": np.arange(len(NAMES)) * 1e-7}, {"native": np.full(len(NAMES), 5.0)})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cost.json"
    save_model(path, MODEL, FACTS, {"mean_regret": 0.01})
    assert load_model(path, FACTS).to_json() == MODEL.to_json()
    assert json.loads(path.read_text())["report"] == {"mean_regret": 0.01}
    assert [file.name for file in path.parent.iterdir()] == ["cost.json"]  # nothing half-written is left
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("name", ["device", "torch_version", "kernels", "threads", "features"])
def test_another_device_or_software_is_refused(tmp_path: Path, name: str) -> None:
    save_model(tmp_path / "cost.json", MODEL, FACTS, {})
    other = replace(FACTS, **{name: 7 if name == "threads" else "another"})
    with pytest.raises(ModelFileError, match=rf"cost.json: fitted for {name} .*, this is "):
        load_model(tmp_path / "cost.json", other)
    assert default_path(FACTS, tmp_path) != default_path(other, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"schema": 2}',
        b'{"schema": 1, "facts": 3}',
        b"[" * 100_000,
        json.dumps({"schema": 1, "facts": FACTS.to_json(), "model": {"coefficients": {}}}).encode(),
        json.dumps({"schema": 1, "facts": FACTS.to_json()}).encode(),
        b" " * (MOST_BYTES + 1),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(text)
    with pytest.raises(ModelFileError, match=r"cost\.json: "):
        load_model(path, FACTS)


def test_a_file_that_others_may_write(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    save_model(path, MODEL, FACTS, {})
    path.chmod(0o666)
    with pytest.raises(ModelFileError, match="everybody may write"):
        load_model(path, FACTS)
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        save_model(path, MODEL, FACTS, {})


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "cost.json", FACTS)
    with pytest.raises(ModelFileError):
        load_model(tmp_path, FACTS)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cost.json"
    save_model(path, MODEL, FACTS, {})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            save_model(path, CostModel({"cpu": np.ones(len(NAMES))}, {"cpu": np.ones(len(NAMES))}), FACTS, {})
    assert load_model(path, FACTS).to_json() == MODEL.to_json()
    assert len(list(tmp_path.iterdir())) == 1


def test_facts_of_this_process() -> None:
    facts = Facts.of(torch.device("cpu"))
    assert (facts.torch_version, facts.threads) == (torch.__version__, torch.get_num_threads())
    assert Facts.of(torch.device("cpu"), 77) == replace(facts, threads=77)


@pytest.mark.skipif(not matrix_unit.available(), reason=matrix_unit.why_not())
def test_a_fit_with_the_matrix_unit_is_none_without_it() -> None:
    device = torch.device("cpu")
    used = Facts.of(device)
    assert used.kernels.endswith("+matrix")
    with matrix_unit.using(False):
        assert Facts.of(device) == Facts.of(device, matrix=False)
    assert Facts.of(device, matrix=False) == replace(used, kernels=used.kernels.removesuffix("+matrix"))
