"""The quality benchmark: recall, oracle and budget are what they are called; rows are decoded under a selection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import sparse_quality
from benchmarks.retrieval.batch import make_batch
from benchmarks.retrieval.data import Task
from benchmarks.retrieval.model import MODEL
from benchmarks.sparse_agreement import Questions, divergence, everything, policy_of
from benchmarks.sparse_budget import Budget
from benchmarks.sparse_methods import all_methods, history, oracle, recency, select
from benchmarks.sparse_plot import plot
from benchmarks.sparse_recall import measure_recall, recall
from benchmarks.sparse_result import DENSE, Result, goals, table
from benchmarks.sparse_rows import DecodedRows, load_causal
from benchmarks.sparse_step import Step
from benchmarks.sparse_text import find_text, read_text

BLOCK = 16
TASK = Task(400, records=40, queries=2, answers=4)
NAMES = [method.name for method in all_methods()]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_causal(MODEL)


@pytest.fixture(scope="module")
def rows(model: Any) -> DecodedRows:
    return DecodedRows(model, make_batch(TASK, 1, np.random.default_rng(0)).tokens[0], TASK.length - 12)


def a_step(tokens: int = 200, rows: int = 3) -> Step:
    generator = torch.Generator().manual_seed(tokens)
    query, keys = (torch.randn(*shape, generator=generator) for shape in ((rows, 4, 16), (tokens, 2, 16)))
    return Step(0, 3 * query, keys, torch.arange(tokens - rows + 1, tokens + 1), 0.25, BLOCK)


@given(st.integers(1, 300), st.floats(0.01, 1.0), st.integers(0, 3), st.integers(1, 4), st.integers(0, 6))
def test_a_budget_counts_as_gsa_does(total: int, ratio: float, sinks: int, window: int, least: int) -> None:
    """Seed 000, 5.1, plainly; a context shorter than the windows selects nothing. covers: C12 C13"""
    budget, blocks = Budget(ratio, sinks, window, least), torch.tensor([total])
    required = set(range(min(sinks, total))) | set(range(max(0, total - window), total))
    live = budget.live(blocks, 300)[0].nonzero()[:, 0].tolist()
    assert set(live) == required
    assert set(budget.candidates(blocks, 300)[0].nonzero()[:, 0].tolist()) == set(range(total)) - required
    wanted = min(max(least, int(torch.tensor(total) * ratio)), total) - len(required)
    assert int(budget.num_selected(blocks, 300)) == max(0, wanted)


def test_a_budget_of_nothing_is_refused() -> None:
    for wrong in ({"ratio": 0.0}, {"ratio": 1.1}, {"ratio": 0.5, "window": 0}, {"ratio": 0.5, "sinks": -1}):
        with pytest.raises(ValueError, match="expected a ratio"):
            Budget(**wrong)


def test_mass_is_the_attention_of_each_block() -> None:
    """Grouped query heads, a tail block, and tokens after the row's own. covers: C15"""
    step = a_step()
    assert torch.allclose(step.mass.sum(1), torch.ones(3))
    row, context = 1, int(step.contexts[1])
    keys = step.keys[:context].double().repeat_interleave(2, dim=1)
    share = (torch.einsum("hd,thd->ht", step.query[row].double(), keys) * step.scale).softmax(-1).mean(0)
    expected = torch.nn.functional.pad(share, (0, 13 * BLOCK - context)).view(-1, BLOCK).sum(1)
    assert torch.allclose(step.mass[row].double(), expected, atol=1e-6)


@pytest.mark.parametrize("method", all_methods(), ids=NAMES)
def test_no_method_recalls_more_than_the_oracle(method: Any) -> None:
    """And every one attends to live blocks and as many others as the budget says. covers: C12 C16"""
    step, budget = a_step(800, 4), Budget(0.3)
    attended = select(method.scores(step, budget), step, budget)
    live = budget.live(step.row_blocks, step.num_blocks)
    assert (attended | ~live).all()
    assert torch.equal((attended & ~live).sum(1), budget.num_selected(step.row_blocks, step.num_blocks))
    assert recall(step, attended) <= recall(step, select(oracle(step, budget), step, budget)) + 1e-6


def test_scores_do_not_see_later_tokens() -> None:
    """What comes after a row's context changes no choice of it. covers: C16"""
    step, budget = a_step(800, 4), Budget(0.3)
    shorter = Step(0, step.query[:1], step.keys[: step.contexts[0]], step.contexts[:1], step.scale, BLOCK)
    for method in all_methods():
        both = [select(method.scores(one, budget), one, budget)[0] for one in (step, shorter)]
        assert torch.equal(both[0][: shorter.num_blocks], both[1]), method.name


def test_history_locks_what_was_recent() -> None:
    """The seed's score: the first row takes the newest blocks, and half a point for each use keeps them. covers: C14"""
    step, budget = a_step(800, 4), Budget(0.3)
    scores = history(step, budget)
    first = select(recency(step, budget), step, budget)[0]
    assert torch.equal(select(scores, step, budget)[0], first)
    blocks = int(step.row_blocks[1])
    assert torch.allclose(scores[1, :blocks], 0.5 * first[:blocks] + torch.linspace(0.1, 1.0, blocks))


def test_a_budget_of_all_blocks_is_dense(rows: DecodedRows) -> None:
    dense = rows.logits(everything, BLOCK)
    for method in all_methods():
        assert torch.equal(rows.logits(policy_of(method, Budget(1.0)), BLOCK), dense), method.name
    assert divergence(dense, dense) == (0.0, 1.0)


def test_rows_are_decoded_as_the_model_does(model: Any, rows: DecodedRows) -> None:
    tokens = make_batch(TASK, 1, np.random.default_rng(0)).tokens
    with torch.inference_mode():
        whole = model(input_ids=tokens).logits[0]
    assert torch.allclose(rows.logits(everything, BLOCK), whole[-12:], atol=1e-3)
    later = DecodedRows(model, tokens[0], TASK.length - 20)
    later.advance(8)
    assert torch.allclose(later.logits(everything, BLOCK), whole[-12:], atol=1e-3)


def test_what_is_not_selected_is_not_seen(model: Any) -> None:
    """Look-ups are right when the record's block is selected, and not without."""
    questions = Questions.make(model, TASK, 2, seed=0)
    assert questions.accuracy(everything, BLOCK) == 1.0
    by_name = {method.name: method for method in all_methods()}
    assert questions.accuracy(policy_of(by_name["oracle"], Budget(0.3)), BLOCK) == 1.0
    assert questions.accuracy(policy_of(by_name["recency"], Budget(0.2)), BLOCK) < 0.7


def test_recall_is_measured_of_the_sampled_rows(rows: DecodedRows) -> None:
    seen: list[Step] = []
    rows.logits(seen.append, BLOCK)  # type: ignore[arg-type]
    sampled, budget = torch.tensor([3, 7]), Budget(0.3)
    found = measure_recall(rows, sampled, all_methods(), [Budget(0.2), budget], BLOCK)
    assert {name for name, _ in found} == set(NAMES)
    assert all(len(layers) == 2 for layers in found.values())
    step = seen[0]
    few = Step(0, step.query[sampled], step.keys, step.contexts[sampled], step.scale, BLOCK)
    for method in all_methods():
        expected = recall(few, select(method.scores(few, budget), few, budget))
        assert found[method.name, 0.3][0] == pytest.approx(expected)


def some_results() -> list[Result]:
    rights = {"mean": (0.5, 0.98), "hash": (0.97, 0.99), "oracle": (0.985, 0.99)}
    found = [Result(16, DENSE, 1.0, 1.0, [], 0.0, 1.0, 0.995)]
    for method, pair in rights.items():
        for ratio, right in zip((0.05, 0.3), pair, strict=True):
            found.append(Result(16, method, ratio, 0.8, [0.7, 0.9], 0.01, 0.95, right))
    return found


def test_goals_are_against_dense_and_the_oracle() -> None:
    lines = [line.split() for line in goals(some_results())]
    assert [line[0] for line in lines] == ["mean", "hash"]
    assert "98.5 % of dense at 30% (not met) 48.5 points behind the oracle at 5% (not met)" in " ".join(lines[0])
    assert "99.5 % of dense at 30% (met) 1.5 points behind the oracle at 5% (met)" in " ".join(lines[1])


def test_a_table_has_a_line_for_each_method(tmp_path: Path) -> None:
    lines = table(some_results()).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [DENSE, "mean", "hash", "oracle"]
    assert lines[3].split()[1:] == ["80.0", "80.0", "10.0", "10.0", "95.0", "95.0", "50.0", "98.0"]
    pytest.importorskip("matplotlib")
    plot(some_results(), tmp_path / "picture.png", "title")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_a_long_text_is_found() -> None:
    path = find_text()
    assert len(read_text(path)) > 32_000
    with pytest.raises(FileNotFoundError, match="--text"):
        find_text(2**40)


def test_the_command_measures_and_writes(
    rows: DecodedRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the small model in the place of the one that reads text."""
    pytest.importorskip("matplotlib")

    def recalls(*args: Any) -> Any:
        return {16: measure_recall(rows, torch.arange(4), all_methods(), args[5], 16)}, rows

    monkeypatch.setattr(sparse_quality, "text_recalls", recalls)
    picture, figures = tmp_path / "picture.png", tmp_path / "figures.json"
    command = "sparse_quality --context 600 --block-sizes 16 --budgets 0.2 0.3 --sequences 1"
    monkeypatch.setattr("sys.argv", [*command.split(), "--json", str(figures), "--plot", str(picture)])
    sparse_quality.main()
    assert "points behind the oracle at 20%" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert len(found) == 1 + 2 * len(NAMES)
    assert picture.exists()
    assert found[0]["method"] == DENSE
    assert found[0]["right"] == 1.0
