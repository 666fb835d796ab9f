"""`gaudi-ucm sparse-report` with its engines, on a tiny model; its recall against the weights of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging

from tests.cli.sparse_report_model import tiny_model
from vllm_gaudi_ucm.cli import main
from vllm_gaudi_ucm.sparse.budget import block_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions

PROMPT, ANSWER, BLOCK = 300, 20, 16
WINDOWS = {"sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """The command asks for silence of the whole process, in which other tests look for warnings."""
    yield
    configure_logging(LoggingConfig())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_recall_agreement_and_speed_of_real_engines(model: Path, tmp_path: Path) -> None:
    """With all blocks nothing is lost; with fewer, what is attended and the best choice are those of the weights."""
    rng = random.Random(3)
    text, config, figures = tmp_path / "text", tmp_path / "sparse.json", tmp_path / "figures.json"
    text.write_text("".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(PROMPT)))
    config.write_text(json.dumps({"ESA": WINDOWS}))
    arguments = ["--methods", "ESA", "--ratios", "0.3", "1.0", "--config", str(config), "--json", str(figures)]
    sizes = ["--block-size", str(BLOCK), "--max-tokens", str(ANSWER)]
    assert main.main(["--traceback", "sparse-report", str(model), str(text), *arguments, *sizes]) == 0
    report = json.loads(figures.read_text())
    dense, few, everything = report["rows"]
    assert report["prompt_tokens"] == PROMPT
    assert all(row["prefill_tokens_per_s"] > 0 and row["speedup"] > 0 for row in report["rows"])
    assert everything["tokens"] == dense["tokens"]
    assert everything["recall"] == everything["best_recall"] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert everything["attended"] == 1.0
    assert everything["equal_tokens"] == {"prefix": 1.0, "everywhere": 1.0, "followed": 1.0}
    assert all(0.2 < found <= best + 1e-6 < 1.0 for found, best in zip(few["recall"], few["best_recall"], strict=True))
    assert 0.3 < few["attended"] < 0.4
    assert few["equal_tokens"]["prefix"] <= few["equal_tokens"]["everywhere"]
    # the queries of the first layer do not depend on what was attended
    assert few["best_recall"][0] == pytest.approx(best_recall(model, text, dense["tokens"]), abs=1e-4)


def best_recall(model: Path, text: Path, answer: list[int]) -> float:
    """Of the first layer along the dense answer: live blocks, and the candidates that get the most attention."""
    from transformers import AutoTokenizer

    prompt = AutoTokenizer.from_pretrained(model)(text.read_text())["input_ids"]
    decoder = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    with torch.no_grad():
        weights = decoder(torch.tensor([prompt + answer[:-1]]), output_attentions=True).attentions[0][0].mean(0)
    found = []
    for row in range(PROMPT, PROMPT + ANSWER - 1):
        budget = block_budget(row + 1, BLOCK, BlockOptions(**WINDOWS, sparse_ratio=0.3))
        assert budget is not None
        mass = torch.stack([block.sum() for block in weights[row, : row + 1].split(BLOCK)])
        candidates = mass[budget.sink_blocks : budget.window_start]
        live = 1 - candidates.sum()
        found.append(float(live + candidates.topk(budget.num_selected).values.sum()))
    return sum(found) / len(found)
