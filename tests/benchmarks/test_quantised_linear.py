"""The benchmark of quantised products, on a small layer of a CPU, where weights but those of W8A8 are plain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import quantised_linear
from vllm_gaudi_ucm.ops.quantised_linear.impl.cpu.int8 import CpuInt8
from vllm_gaudi_ucm.ops.quantised_linear.weight import dequantise


def test_every_kind_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(quantised_linear, "REPEATS", 1)
    written = tmp_path / "times.json"
    quantised_linear.main(["--shape", "128", "256", "--rows", "1", "3", "--json", str(written)])
    times = json.loads(written.read_text())
    plain = [time for time in times if time["side"] != "ours, integers"]
    assert [(time["kind"], time["rows"]) for time in plain] == [
        (kind, rows) for kind in quantised_linear.KINDS for rows in (1, 3)
    ]
    assert all(time["ms"] > 0 and not time["note"] for time in times)
    assert all(time["error"] < 1e-5 for time in plain)
    rounded = [time for time in times if time not in plain]
    assert all(time["kind"] == "W8A8" and 1e-4 < time["error"] < 0.05 for time in rounded)
    assert len(rounded) == (2 if _rounds() else 0)
    assert "W4A16" in capsys.readouterr().out


def _rounds() -> bool:
    return CpuInt8.covers(quantised_linear.make_weight("W8A8", 16, 32, "cpu", 0))


@pytest.mark.parametrize("kind", quantised_linear.KINDS)
def test_weights_keep_the_size_of_rows(kind: str) -> None:
    weight = quantised_linear.make_weight(kind, 256, 512, "cpu", 0)
    weight.check()
    rows = torch.randn(16, 512, dtype=torch.float64)
    found = rows @ dequantise(weight, torch.float32).double().T
    assert 0.5 < float(found.std()) < 2


def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_linear, "REPEATS", 1)
    zeros = [("zeros", False, [lambda x: x.new_zeros(len(x), 32)])]
    monkeypatch.setattr(quantised_linear, "sides", lambda *_: zeros)
    (found,) = quantised_linear.measure("W4A16", (32, 128), [2], "cpu", (1e9, 1e9))
    assert (found.note, found.error) == ("WRONG RESULT", 1.0)
