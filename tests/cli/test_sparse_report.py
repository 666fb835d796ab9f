"""`gaudi-ucm sparse-report` around its engines: cases, errors before anything is loaded, tables, JSON and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.sparse_report_model import tiny_model
from vllm_gaudi_ucm.cli import main
from vllm_gaudi_ucm_tools.sparse_report import sparse_report
from vllm_gaudi_ucm_tools.sparse_report.cases import Case, check_length, make_cases
from vllm_gaudi_ucm_tools.sparse_report.measurement import Agreement, Measurement


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", weights=False)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "long.txt"
    path.write_text("A sentence of a long text, one of many. " * 20)
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, int, int]]:
    """Puts figures in the place of engines; what would have been measured: case, tokens of prompt and of answer."""
    seen: list[tuple[Case, int, int]] = []

    def measure(case: Case, settings: Any, prompt: list[int], max_tokens: int, on_step: Any) -> Measurement:
        seen.append((case, len(prompt), max_tokens))
        on_step()
        if case.options is None:
            return Measurement(case, [5, 6], 900.0, 10.0, 10.0, recall=[1.0, 1.0], best=[1.0, 1.0])
        share = 0.5 + case.ratio / 2
        agreement = Agreement(0.25, 0.5, 0.75)
        return Measurement(case, [5, 7], 900.0, 25.0, 10.0, agreement, [share, 0.9], [share, 0.95], case.ratio)

    monkeypatch.setattr(sparse_report, "measure", measure)
    return seen


SHORT = ("--min-tokens", "64", "--block-size", "16", "--max-tokens", "8")


def run(*arguments: str | Path) -> int:
    return main.main(["sparse-report", *map(str, arguments)])


def test_tables_json_and_picture(
    model: Path, text: Path, tmp_path: Path, measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, figures = tmp_path / "report", tmp_path / "report.json"
    assert run(model, text, *SHORT, "--ratios", "0.3", "0.1", "-o", prefix, "--json", figures) == 0
    cases = [case for case, *_ in measured]
    assert [(case.method, case.ratio) for case in cases] == [
        ("dense", 1.0),
        *[(method, ratio) for method in ("GSA", "ESA", "KVStar") for ratio in (0.1, 0.3)],
    ]
    out = capsys.readouterr().out
    assert "2.50x" in out
    assert "80.0%" in out, "the best choice, on average"
    lines = (tmp_path / "report.txt").read_text().splitlines()
    assert max(map(len, lines)) <= 120
    assert not any("…" in line for line in lines), "nothing is cut off"
    assert all(line.rstrip() in out for line in lines)
    assert (tmp_path / "report.png").stat().st_size > 20_000
    value = json.loads(figures.read_text())
    assert value["prompt_tokens"] == measured[0][1]
    assert [row["method"] for row in value["rows"]] == [case.method for case in cases]
    assert value["rows"][1]["options"]["min_tokens"] == 64
    assert value["rows"][1]["recall"] == [0.55, 0.9]
    assert value["rows"][1]["equal_tokens"] == {"prefix": 0.25, "everywhere": 0.5, "followed": 0.75}


def test_a_text_is_cut_to_what_the_model_takes(model: Path, text: Path, measured: list[Any]) -> None:
    assert run(model, text, *SHORT, "--methods", "ESA", "--ratios", "0.5") == 0
    assert run(model, text, *SHORT, "--methods", "ESA", "--ratios", "0.5", "--max-model-len", "200") == 0
    assert [tokens for _, tokens, _ in measured] == [512 - 8, 512 - 8, 200 - 8, 200 - 8]


def test_several_summaries_are_cases_of_their_own(
    model: Path, text: Path, measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--methods", "KVStar", "--summaries", "minmax", "hash", "--ratios", "0.5")
    assert run(model, text, *SHORT, *arguments) == 0
    assert [case.summary for case, *_ in measured] == ["", "minmax", "hash"]
    assert "KVStar hash" in capsys.readouterr().out


def test_a_file_gives_the_other_options(tmp_path: Path) -> None:
    config = tmp_path / "sparse.yaml"
    config.write_text("GSA: {reuse_steps: 4, sparse_ratio: 0.9}\nKVStar: {lock_duration: 5, base_method: ESA}\n")
    _, gsa, kvstar = make_cases(["GSA", "KVStar"], [0.2], config=config)
    assert gsa.options is not None
    assert gsa.options.model_dump()["reuse_steps"] == 4
    assert gsa.ratio == kvstar.ratio == 0.2
    assert kvstar.ucm["ucm_sparse_config"]["KVStar"] == {
        "lock_duration": 5,
        "base_method": "ESA",
        "sparse_ratio": 0.2,
        "sparse_steps": "always",
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--methods", "GSX"), "'GSX', expected one of GSA, ESA, KVStar; the nearest is GSA"),
        (("--ratios", "1.5"), "--ratios: found 1.5"),
        (("--max-tokens", "1"), "--max-tokens: found 1, expected at least 3"),
        (("--max-model-len", "4096"), "--max-model-len: found 4096, expected at most the model's 512"),
        (("-o", "absent/folder/report"), "-o absent/folder/report.txt: the folder absent/folder does not exist"),
        (("--min-tokens", "0"), "min_tokens: found 0"),
        ((), "found 504 tokens, expected at least 2,048, the shortest sparse context of GSA in blocks of 16"),
    ],
)
def test_what_cannot_work_is_one_clear_error_before_any_engine(
    model: Path,
    text: Path,
    measured: list[Any],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    """covers: C4 C24"""
    assert run(model, text, "--block-size", "16", "--max-tokens", "8", *arguments) == 2
    assert not measured
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_missing_files_are_named(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, tmp_path / "none.txt") == 2
    assert "PROMPT_FILE" in capsys.readouterr().err
    assert run(tmp_path, text) == 2
    assert "fetch-model" in capsys.readouterr().err
    assert run(model, text, "--config", tmp_path / "none.yaml") == 2
    assert "none.yaml" in capsys.readouterr().err


def test_a_context_that_the_windows_fill_asks_for_a_longer_text() -> None:
    (_, case) = make_cases(["ESA"], [0.3], min_tokens=1)
    check_length([case], 64, 16, "text")
    with pytest.raises(ValueError, match=r"text: found 63 tokens, expected at least 64.* a longer text, or a smaller"):
        check_length([case], 63, 16, "text")


def test_agreement_counts_decoded_tokens() -> None:
    found = Agreement.from_tokens([9, 1, 2, 3, 4], [9, 1, 2, 0, 4], [8, 1, 0, 3, 4])
    assert found == Agreement(prefix=0.5, everywhere=0.75, followed=0.75)
    assert Agreement.from_tokens([9, 1], [9, 1], [9, 1]) == Agreement()
