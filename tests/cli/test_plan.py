"""`gaudi-ucm plan`: sums that agree with its parts, for a mix, a log, a bucket file and bare limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.graphs.model_figures import LLAMA_8B

SMALL_MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "agentic.jsonl"
    assert cli.main(["trace", "--mix", "agentic", "--steps", "500", "-o", str(path)]) == 0
    return path


def plan(capsys: pytest.CaptureFixture[str], *argv: str | Path | int) -> dict[str, Any]:
    capsys.readouterr()
    code = cli.main(["plan", "--json", *map(str, argv)])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if value["memory_bytes"]["fits"] else 1)
    return value


def test_bare_limits_fill_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys)
    memory = value["memory_bytes"]
    assert value["modelled"] is True
    assert value["strategy"] == "padding_aware"
    assert value["padding"] is None
    assert value["graphs"] == len(value["forward"]) + len(value["logits"]) <= 64
    assert memory["weights"] == LLAMA_8B.weight_bytes
    assert memory["kv_cache"] == value["limits"]["num_blocks"] * 128 * LLAMA_8B.kv_bytes_per_token
    assert memory["total"] == sum(memory[name] for name in ("weights", "kv_cache", "graphs", "activations"))
    assert 0.8 * memory["usable"] < memory["total"] <= memory["usable"]


def test_fewer_graphs_warm_sooner_and_take_less(capsys: pytest.CaptureFixture[str]) -> None:
    """covers: B7."""
    few, many = plan(capsys, "--max-graphs", 16), plan(capsys, "--max-graphs", 128)
    assert few["warmup_seconds"] < many["warmup_seconds"]
    assert few["memory_bytes"]["graphs"] < many["memory_bytes"]["graphs"]
    assert few["skeleton_seconds"] <= few["warmup_seconds"]


def test_a_log_is_planned_with_its_own_limits(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--log", log, "--max-graphs", 32)
    assert value["strategy"] == "trace"
    assert value["limits"]["max_num_seqs"] == 48
    blind = plan(capsys, "--log", log, "--max-graphs", 32, "--strategy", "exponential")
    assert 1.0 <= value["padding"]["cost_ratio"] < blind["padding"]["cost_ratio"]


def test_a_bucket_file_is_planned(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "buckets.yaml"
    assert cli.main(["tune", str(log), "--max-graphs", "20", "-o", str(file)]) == 0
    value = plan(capsys, "--log", log, "--buckets", file)
    assert value["graphs"] <= 20
    assert cli.main(["plan", "--log", str(log), "--buckets", str(file), "--max-num-seqs", "64"]) == 2
    assert "made for max_num_seqs 48, the server has 64" in capsys.readouterr().err


def test_a_model_and_a_device_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    arguments = ["plan", "--model", str(tmp_path), "--device", "cpu", "--block-size", "16", "--num-blocks", "2000"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "2,000 blocks of 16" in out
    assert "modelled" in out
    assert all(len(line.rstrip()) <= 80 for line in out.splitlines())


def test_a_mix_is_asked_of_a_server_with_the_limits_given(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--mix", "long-context", "--max-num-seqs", 8, "--max-graphs", 16)
    assert value["traffic"] == "long-context"
    assert value["limits"]["max_num_seqs"] == value["logits"][-1] == 8
    assert value["padding"]["maximum_steps"] == 0
    assert cli.main(["plan", "--mix", "agentic", "--num-blocks", "40"]) == 2
    assert "beside the prefixes of the mix" in capsys.readouterr().err


def test_what_does_not_fit_exits_with_1_or_says_why(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--num-blocks", 6000)
    assert value["memory_bytes"]["fits"] is False
    assert cli.main(["plan", "--device", "cpu"]) == 2
    assert "one device cannot serve this model" in capsys.readouterr().err
    assert cli.main(["plan", "--log", str(log), "--block-size", "16"]) == 2
    assert "leave the option out" in capsys.readouterr().err
    assert cli.main(["plan", "--strategy", "trace"]) == 2
    assert "needs --log or --mix" in capsys.readouterr().err
