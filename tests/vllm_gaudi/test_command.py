"""`gaudi-ucm tune --for vllm-gaudi` and `plan --for vllm-gaudi`, as a stranger runs them, and what they refuse."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.vllm_gaudi.servers import server
from tests.vllm_versions import make_arg_parser
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm_tools.buckets import other_servers
from vllm_gaudi_ucm_tools.vllm_gaudi.bucket_file import parse_bucket_file
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import prepare_from_file

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "vllm-gaudi.md"
LIMITS = ("--max-num-batched-tokens=2048", "--max-num-seqs=32", "--max-model-len=4096", "--num-blocks=1000")
DESCRIPTION = {"requests": 60, "rate": 10, "prompt": {"median": 150, "sigma": 0.8, "high": 2000}, "output": 30}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps(DESCRIPTION))
    return path


def run(*argv: str | Path) -> int:
    return cli.main([str(word) for word in argv])


def tune_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    assert run("tune", *argv, "--for", "vllm-gaudi", "--json") == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_tune_writes_a_file_and_a_command(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "buckets.txt", tmp_path / "buckets.svg"
    more = ("--max-graphs", "40", "-o", file, "--picture", picture, "--holdout", "0.25")
    value = tune_json(capsys, log, *LIMITS, *more)
    sets = value["sets"]
    assert set(sets) == {"exp", "lin", "pad", "tuned"}
    assert sets["tuned"]["graphs"] <= 40 < sets["exp"]["graphs"]
    assert sets["tuned"]["compiled_while_serving"] == []
    assert sets["exp"]["warm_up_seconds"] == [
        pytest.approx(103 * 49 / 72, abs=0.1),
        pytest.approx(103 * 1740 / 126, abs=0.1),
    ]
    prepared = prepare_from_file(parse_bucket_file(file), server(2048, 32, 4096, 1000))
    assert prepared.num_graphs == sets["tuned"]["graphs"]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    words = shlex.split(value["command"])
    assert words[0] == f"VLLM_BUCKETING_FROM_FILE={file}"
    make_arg_parser(FlexibleArgumentParser()).parse_args(words[words.index("serve") + 1 :])


def test_tune_prints_the_comparison(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pad = ("--set", "VLLM_BUCKETING_STRATEGY=pad")
    assert run("tune", log, "--for", "vllm-gaudi", *LIMITS, *pad, "-o", tmp_path / "buckets.txt") == 0
    output = capsys.readouterr().out
    assert "pad (in use)" in output
    assert "tuned to this traffic" in output
    assert "modelled" in output
    assert "vllm serve MODEL" in output


def test_the_page_shows_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    log = tmp_path / "traffic.json"
    log.write_text(page.split("```json\n")[1].split("```")[0])
    limits = [word for word in page.split("gaudi-ucm tune traffic.json")[1].split("-o ")[0].split() if word != "\\"]
    sets = tune_json(capsys, log, *limits[2:])["sets"]
    rows = {row.split()[0]: row for row in page.split("```text\n")[1].split("```")[0].splitlines()[1:]}
    for name, found in sets.items():
        numbers = [word.replace(",", "") for word in rows[name].split()]
        # which phase gets a graph that hardly matters is not shown to be the same on every machine
        keys = ("graphs",) if name == "tuned" else ("graphs", "prompt_graphs", "decode_graphs")
        assert all(str(found[key]) in numbers for key in keys), rows[name]
        # rounded, because a float may differ in its last digit on another machine
        assert float(numbers[-2][:-1]) == pytest.approx(found["cost_ratio"], abs=0.002)
        assert float(numbers[-1][:-1]) == pytest.approx(found["size_ratios"]["decode blocks"], abs=0.02)


def test_plan_compares_with_and_without_traffic(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("(1, [512, 2048], [0, 32])\n([8, 32], 1, [64, 1024])\n(1, 4096, 0)\n")
    assert run("plan", "--for", "vllm-gaudi", "--buckets", file, *LIMITS, "--json") == 0
    plain = json.loads(capsys.readouterr().out)["sets"]["mine.txt"]
    assert plain["graphs"] == 8
    assert plain["omitted"] == [[1, 4096, 0]]
    assert "cost_ratio" not in plain
    assert (
        run("plan", "--for", "vllm-gaudi", "--buckets", file, "--log", log, *LIMITS, "--num-speculative-tokens", "1")
        == 0
    )
    output = capsys.readouterr().out
    assert "mine.txt: the server leaves out (1, 4096, 0)" in output
    assert "cost" in output


def test_memory_of_graphs_bounds_their_number(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_json(capsys, log, *LIMITS, "--graph-memory", "2")["sets"]["tuned"]["graphs"] <= 25


def test_requests_that_are_too_long_are_dropped_if_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "trace.jsonl"
    rows = [{"prompt_tokens": size, "completion_tokens": 5, "time": 0} for size in (100, 5000, 300)]
    log.write_text("\n".join(map(json.dumps, rows)))
    assert run("tune", log, "--for", "vllm-gaudi", *LIMITS) == 2
    assert "request 2 has 5000 prompt" in capsys.readouterr().err
    assert "1 request longer" in str(tune_json(capsys, log, *LIMITS, "--drop-longer")["assumptions"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--max-num-batched-tokens, --max-num-seqs, --max-model-len, --num-blocks are missing"),
        ((*LIMITS, "--gap", "0.5"), "--gap is an option of our own server"),
        ((*LIMITS, "--contiguous"), "--contiguous is an option of our own server"),
        ((*LIMITS, "--set", "VLLM_BUCKETING_STRATEGY"), "expected NAME=VALUE"),
        ((*LIMITS, "--set", "VLLM_USE_V1=1"), "VLLM_USE_V1 is not a variable"),
        ((*LIMITS, "--max-graphs", "1"), "expected at least 2"),
        ((*LIMITS, "--device", "cpu"), "expected one of gaudi2, gaudi3"),
        ((*LIMITS, "--picture", "x.gif"), ".png, .svg, .pdf"),
        ((*LIMITS, "--acceptance", "2"), "--acceptance is 2.0"),
        ((*LIMITS, "--most-requests", "0"), "--most-requests is 0"),
        ((*LIMITS, "--graph-memory", "0"), "--graph-memory is 0"),
    ],
)
def test_options_that_cannot_be_used_are_named(
    log: Path, argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tune", log, "--for", "vllm-gaudi", *argv) == 2
    assert message in capsys.readouterr().err


def test_options_of_the_other_server_need_its_name(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune", log, "--set", "VLLM_BUCKETING_STRATEGY=pad") == 2
    assert "--set needs --for vllm-gaudi" in capsys.readouterr().err
    assert run("plan", "--for", "vllm-gaudi", "--mix", "chat") == 2
    assert "--mix is an option of our own server" in capsys.readouterr().err


def test_the_folder_may_be_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(other_servers, "SERVERS", {"vllm-gaudi": "vllm_gaudi_ucm_tools.not_there"})
    assert run("plan", "--json") in (0, 1)
    assert "graphs" in json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        run("plan", "--for", "vllm-gaudi")
