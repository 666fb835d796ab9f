"""`gaudi-ucm calibrate` before its engine: prompts, options, and errors that name the line or the option.

`tests/engine/test_measured_ranges.py` measures with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cli.sparse_report_model import tiny_model
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm_tools.calibration.calibrate import _read_prompts
from vllm_gaudi_ucm_tools.calibration.observer import LayerObserver


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), weights=False)


def test_prompts(model: Path, tmp_path: Path) -> None:
    """Texts and token ids; empty lines are skipped, long prompts are cut, and only so many are read."""
    file = tmp_path / "prompts"
    lines = [
        "a text",
        "",
        json.dumps({"prompt": "another"}),
        json.dumps({"prompt_token_ids": [5, 6, 7, 8, 9, 10]}),
        "4",
    ]
    file.write_text("\n".join(lines))
    found = _read_prompts(file, model, 3, 5)
    assert [len(prompt) for prompt in found] == [5, 5, 5]
    assert found[2] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("lines", "refused"),
    [
        ('text\n{"prompt": 5}', "prompts, line 2: found no prompt, expected `prompt` with a text"),
        ('{"prompt_token_ids": [1, -1]}', "prompts, line 1: found no prompt"),
        ('{"prompt": ', "prompts, line 1: it begins like JSON, but is none"),
        ("\n\n", "found no prompt, expected one on each line"),
    ],
)
def test_prompts_that_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, refused: str
) -> None:
    (tmp_path / "prompts").write_text(lines)
    output = str(tmp_path / "out")
    assert cli.main(["calibrate", str(model), "--prompts", str(tmp_path / "prompts"), "-o", output]) == 2
    error = capsys.readouterr().err
    assert refused in error
    assert len(error.splitlines()) == 1
    assert not Path(output).exists()


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["--max-tokens", "0"], "--max-tokens: found 0, expected at least 1"),
        (["--max-tokens", "512"], "--max-tokens: found 512, expected less than the model's 512 positions"),
        (["--max-prompts", "-1"], "--max-prompts: found -1, expected at least 1"),
        (["-o", "{file}"], "it is a file; expected a folder"),
        (["--prompts", "none"], "--prompts none: it is not a file"),
    ],
)
def test_options_that_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], refused: str
) -> None:
    (tmp_path / "prompts").write_text("text")
    given = [word.format(file=tmp_path / "prompts") for word in arguments]
    usual = ["--prompts", str(tmp_path / "prompts"), "-o", str(tmp_path / "out")]
    assert cli.main(["calibrate", str(model), *usual, *given]) == 2
    assert refused in capsys.readouterr().err


def test_a_model_that_is_quantised(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert cli.main(["calibrate", str(tmp_path), "--prompts", "none", "-o", "x"]) == 2
    assert "has quantised weights; expected plain ones" in capsys.readouterr().err


def test_a_variable_for_serving(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUANT_CONFIG", "maxabs.json")
    assert cli.main(["calibrate", str(model), "--prompts", "none", "-o", "x"]) == 2
    assert "QUANT_CONFIG is set, which is for serving; unset it to measure" in capsys.readouterr().err


class RowParallelLinear(nn.Linear):
    """Has the name by which layers are known."""


def test_the_largest_of_all_calls_is_kept() -> None:
    """Two outputs of a row-parallel layer; modules of other kinds, and layers without a call, are not observed."""
    model = nn.ModuleDict({"down": RowParallelLinear(4, 2, bias=False), "norm": nn.Linear(4, 4)})
    model["other"] = RowParallelLinear(4, 2)
    with torch.no_grad():
        model["down"].weight.fill_(0.5)
        with LayerObserver(model) as observer:
            for value in (1.0, -3.0, 2.0):
                model["down"](torch.full((3, 4), value))
                model["norm"](torch.ones(4))
        model["down"](torch.full((3, 4), 100.0))
        (found,) = observer.nodes().items()
        assert found == ("down", ((3.0,), (6.0, 6.0), 0.5))
        with observer:
            model["down"](torch.full((3, 4), float("inf")))
    with pytest.raises(ValueError, match="down has seen numbers that are not finite"):
        observer.nodes()
