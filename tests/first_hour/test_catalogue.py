"""The catalogue of probes: numbers, functions, questions; and what `--list` loads."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from vllm_gaudi_ucm.cli.main import main
from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER, PROBES, QUESTIONS
from vllm_gaudi_ucm_tools.first_hour.probe import MODES, Probe, units

# What has a meaning without a Gaudi.
ANYWHERE = {2, 3, 5, 9, 11, 12, 14, 16, 17, 18, 19, 23, 25, 26, 27, 28, 29}


def test_numbers_are_in_order() -> None:
    assert [probe.number for probe in PROBES] == list(range(1, 33))
    assert {probe.number for probe in PROBES if "cpu" in probe.devices} == ANYWHERE
    assert {probe.number for probe in PROBES if "cuda" in probe.devices} == ANYWHERE


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: str(probe.number))
def test_every_probe_has_a_function(probe: Probe) -> None:
    module, _, name = probe.function.partition(":")
    loaded = importlib.import_module(f"vllm_gaudi_ucm_tools.first_hour.probes.{module}")
    assert callable(vars(loaded)[name])
    assert f"Probe {probe.number}" in (vars(loaded)[name].__doc__ or loaded.__doc__), "its docstring names it"


def test_every_question_has_a_probe() -> None:
    assert {number for probe in PROBES for number in probe.questions} == set(QUESTIONS)


def test_lazy_mode_is_a_gaudis() -> None:
    probe = BY_NUMBER[5]
    assert [unit.mode for unit in units([probe], "hpu", MODES)] == ["eager", "compile", "lazy"]
    assert [unit.mode for unit in units([probe], "cuda", MODES)] == ["eager", "compile"]
    assert [unit.mode for unit in units([probe], "hpu", ["compile"])] == ["compile"]


def test_a_probe_that_does_not_apply_is_one_row() -> None:
    assert len(list(units([BY_NUMBER[6]], "cpu", MODES))) == 1
    assert len(list(units([BY_NUMBER[6]], "hpu", MODES))) == 9


def test_list_loads_nothing_heavy() -> None:
    code = """
import contextlib, io, sys
from vllm_gaudi_ucm.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["first-hour", "--list"]) == 0
print(*(name for name in ("torch", "vllm", "numpy", "matplotlib") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["first-hour", "--list", "--json", "--only", "9,4"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["number"] for row in rows] == [9, 4]
    assert rows[0]["questions"] == [2, 6]
    assert "unknown: questions 2, 6" in rows[0]["expected"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "4,x"], "--only 4,x: expected numbers of 1 to 32"),
        (["--only", "33"], "--only 33"),
        (["--modes", "fast"], "--modes fast: found 'fast'"),
        (["--time-limit", "0"], "--time-limit 0.0"),
        (["--serve-minutes", "-1"], "--serve-minutes -1.0"),
        (["--model", "/nowhere"], "--model /nowhere: holds no config.json"),
        (["--output", "/dev/null/x"], "--output /dev/null/x"),
    ],
)
def test_wrong_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["first-hour", *arguments]) == 2
    assert words in capsys.readouterr().err
