"""Every command with input that it cannot use: one line that names the option or file, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.observability.records import mixed_steps, write_log
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.observability.phase_log import PhaseLog

LIMITS = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "max_model_len": 1024, "block_size": 16, "num_blocks": 99}
HUGE = "9" * 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of every wrong kind, in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_log(Path("log.jsonl"), mixed_steps(20))
    Path("empty").write_text("")
    Path("binary").write_bytes(bytes(range(128, 256)))
    Path("deep.json").write_text("[" * 100_000)
    Path("digits.json").write_text('{"hidden_size": ' + "9" * 5000 + "}")
    Path("huge.json").write_text(json.dumps({"hidden_size": 10**400, "num_attention_heads": 8}))
    Path("array.json").write_text("[1]\n")
    Path("folder").mkdir()
    log = PhaseLog(Path("steps.jsonl"), LIMITS)
    for step in mixed_steps(3):
        log.append(step)
    log.close()
    PhaseLog(Path("header.jsonl"), LIMITS).close()
    for name, values in (("text", {"max_shared_blocks": "x"}), ("negative", {"block_size": -1})):
        PhaseLog(Path(f"{name}.jsonl"), {**LIMITS, **values}).close()
        Path(f"{name}.jsonl").write_text(
            Path(f"{name}.jsonl").read_text() + Path("steps.jsonl").read_text().split("\n", 1)[1]
        )
    return tmp_path


FILES = ("missing", "empty", "binary", "deep.json", "array.json", "folder")
OF_FILES = {
    "phases": "phases {}",
    "tune": "tune {}",
    "plot": "plot {} -o x.html",
    "plot --buckets": "plot steps.jsonl --buckets {} -o x.html",
    "plan --log": "plan --log {}",
    "plan --buckets": "plan --buckets {}",
    "plan --model": "plan --model {}",
    "plan --sparse": "plan --sparse {}",
    "trace --model": "trace --mix chat --steps 2 --model {} -o x.jsonl",
    "op-cost --model": "op-cost --batch decode --model {}",
    "op-cost --buckets": "op-cost --buckets {}",
    "store --store": "store stat --store {}",
    "demo": "demo --model {}",
    "sparse-report": "sparse-report {} empty",
    "config --check": "config --check {}",
    "calibrate": "calibrate {} --prompts empty -o x",
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", OF_FILES)
def test_files(folder: Path, capsys: pytest.CaptureFixture[str], name: str, file: str) -> None:
    code = cli.main(OF_FILES[name].format(file).split())
    if (name, file) == ("config --check", "empty"):
        assert code == 0  # an empty file has all defaults
        return
    assert code == (1 if name == "config --check" else 2)
    error = one_error(capsys)
    assert file in error or name.split()[-1] in error or "store.kind: found no value" in error or ": found [1]" in error
    assert not Path("x.jsonl").exists()


CASES: list[tuple[str, str]] = [
    ("tune header.jsonl", "header.jsonl: holds no steps"),
    ("tune text.jsonl", "the first line of text.jsonl has max_shared_blocks 'x'"),
    ("plan --log text.jsonl", "the first line of text.jsonl has max_shared_blocks 'x'"),
    ("tune negative.jsonl", "limits of the first line of negative.jsonl: limit block_size is -1"),
    (f"plan --max-num-seqs {HUGE}", "limits of the defaults, and --max-num-seqs: limit max_num_seqs is 1e+30"),
    (f"plan --max-num-batched-tokens {HUGE}", "--max-num-batched-tokens: limit max_num_batched_tokens is 1e+30"),
    (f"plan --max-selected-blocks {HUGE}", "--max-selected-blocks: limit max_selected_blocks is 1e+30"),
    (f"trace --mix chat --steps 2 -o x --block-size {HUGE}", "the mix chat, and --block-size: limit block_size is"),
    (f"tune steps.jsonl --max-graphs {HUGE}", f"--max-graphs is {HUGE}, expected at most 4096"),
    ("plan --max-graphs 1", "max_graphs is 1, expected at least 2"),
    ("tune steps.jsonl --margin nan", "--margin is nan"),
    ("tune steps.jsonl --gap nan", "--gap is nan"),
    ("plan --model huge.json", "--model huge.json: model config: hidden_size is '1000"),
    ("plan --model digits.json", "value has 5000 digits"),
    ("plan --model deep.json", "nested too deeply"),
    ("store stat --url x", "store.url: found 'x'"),
    ("store stat --store {", "store: found malformed text"),
    ("config --check digits.json", "value has 5000 digits"),
]


@pytest.mark.parametrize(("command", "message"), CASES, ids=[command[:40] for command, _ in CASES])
def test_values(folder: Path, capsys: pytest.CaptureFixture[str], command: str, message: str) -> None:
    assert cli.main(command.split()) in (1, 2)
    assert message in one_error(capsys)


def one_error(capsys: Any) -> str:
    """What was printed on stderr: one line beside bars of progress."""
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    lines = [line for line in captured.err.splitlines() if line.strip() and " 0:00:0" not in line]
    assert len(lines) == 1, captured.err
    assert len(lines[0]) < 1000
    return str(lines[0])


def test_one_expert_is_a_dense_model(folder: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
    Path("config.json").write_text(json.dumps({**sizes, "intermediate_size": 128, "num_experts": 1}))
    assert cli.main(["plan", "--model", "config.json", "--max-graphs", "4"]) == 0
