"""Rows that are decoded, or computed in chunks of a prompt, under a choice of blocks; attention that blocks get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.quality.budget import Budget
from benchmarks.quality.methods import compared
from benchmarks.quality.prompts import Place, choose_by_tile, sparse_prompts
from benchmarks.quality.scores import select
from benchmarks.retrieval.batch import make_batch
from benchmarks.retrieval.data import Task
from benchmarks.retrieval.model import MODEL
from benchmarks.sparse_rows import DecodedRows, Policy, load_causal
from benchmarks.sparse_step import Step
from benchmarks.sparse_text import find_text, read_text
from vllm_gaudi_ucm.sparse.budget import prompt_budget
from vllm_gaudi_ucm.sparse.options import BlockOptions

BLOCK = 16
TASK = Task(400, records=40, queries=2, answers=4)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_causal(MODEL)


def tokens_of(seed: int = 0) -> Tensor:
    return make_batch(TASK, 1, np.random.default_rng(seed)).tokens[0]


def everything(step: Step) -> None:
    return None


def a_step(tokens: int = 200, rows: int = 3) -> Step:
    generator = torch.Generator().manual_seed(tokens)
    query, keys = (torch.randn(*shape, generator=generator) for shape in ((rows, 4, 16), (tokens, 2, 16)))
    return Step(0, 3 * query, keys, torch.arange(tokens - rows + 1, tokens + 1), 0.25, BLOCK)


def test_mass_is_the_attention_of_each_block() -> None:
    """Grouped query heads, a tail block, and tokens after the row's own. covers: C15"""
    step = a_step()
    assert torch.allclose(step.mass.sum(1), torch.ones(3))
    row, context = 1, int(step.contexts[1])
    keys = step.keys[:context].double().repeat_interleave(2, dim=1)
    share = (torch.einsum("hd,thd->ht", step.query[row].double(), keys) * step.scale).softmax(-1).mean(0)
    expected = torch.nn.functional.pad(share, (0, 13 * BLOCK - context)).view(-1, BLOCK).sum(1)
    assert torch.allclose(step.mass[row].double(), expected, atol=1e-6)


def test_rows_are_decoded_as_the_model_does(model: Any) -> None:
    tokens = tokens_of()
    with torch.inference_mode():
        whole = model(input_ids=tokens[None]).logits[0]
    rows, later = DecodedRows(model, tokens, TASK.length - 12), DecodedRows(model, tokens, TASK.length - 20)
    later.advance(8)
    for one in (rows, later):
        assert torch.allclose(one.logits(everything, BLOCK), whole[-12:], atol=1e-3)


def test_layers_with_windows_see_their_windows(tmp_path: Path) -> None:
    """Prompts of several windows, chunks that begin within one, and rows that are decoded are Hugging Face's."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, sliding_window=24, layer_types=kinds,
    )  # fmt: skip
    whole = Gemma3ForCausalLM(config).eval()
    whole.save_pretrained(tmp_path)
    tokens = torch.randint(0, 64, (100,))
    with torch.inference_mode():
        expected = whole(input_ids=tokens[None]).logits[0, -30:]
    for chunk in (None, 31):
        found = DecodedRows(load_causal(tmp_path), tokens, 70, chunk).logits(everything, BLOCK)
        assert torch.allclose(found, expected, atol=1e-5)


def test_what_is_not_chosen_is_not_seen(model: Any) -> None:
    """Look-ups are right if the record's block is chosen, and not without; the whole budget is dense attention."""
    batch, methods = make_batch(TASK, 1, np.random.default_rng(1)), {one.name: one for one in compared()}
    first = TASK.length - TASK.question_tokens
    rows = DecodedRows(model, batch.tokens[0], first)
    dense = rows.logits(everything, BLOCK)

    def logits(name: str, ratio: float) -> Tensor:
        policy: Policy = lambda step: methods[name].choose(step, Budget(ratio), {})  # noqa: E731
        return rows.logits(policy, BLOCK)

    def right(found: Tensor) -> float:
        return float((found[batch.rows[0] - first].argmax(-1) == batch.answers[0]).float().mean())

    assert right(dense) == right(logits("exact", 0.3)) == 1
    assert right(logits("streaming", 0.2)) < 0.7
    for name in ("gsa", "quest_heads", "gsa_codes"):
        assert torch.allclose(logits(name, 1.0), dense, atol=1e-4), name


@pytest.mark.parametrize("method", sparse_prompts(), ids=lambda one: one.name)
def test_sparse_prompts_attend_to_what_their_tiles_choose(model: Any, method: Any) -> None:
    """The whole budget is a dense prompt, and a low one is not. The engine's budget counts."""
    tokens, first = tokens_of(), TASK.length - 12
    dense = DecodedRows(model, tokens, first).logits(everything, BLOCK)
    for ratio, equal in ((1.0, True), (0.1, False)):
        read: list[float] = []
        rows = method.decoded(model, tokens, first, Budget(ratio), Place(BLOCK, read))
        assert torch.allclose(rows.logits(everything, BLOCK), dense, atol=1e-3) == equal
        assert len(read) == 3 * model.config.num_hidden_layers, "all chunks but the first one choose"
    step, begin = a_step(tokens=900, rows=400), 500
    chosen = choose_by_tile(step, begin, method.scores, Budget(0.3))
    expected = prompt_budget(begin, BLOCK, BlockOptions(prompt_ratio=0.3, min_tokens=1))
    assert expected is not None
    between = chosen[:, expected.sink_blocks : expected.window_start]
    assert (between.sum(1) == expected.num_selected).all()
    assert chosen[:, : expected.sink_blocks].all()
    assert chosen[:, expected.window_start :].all()
    assert len(between.unique(dim=0)) == 2, "a choice for each tile"


def test_scores_do_not_see_later_tokens() -> None:
    """Tokens after a row's context do not change its choice. covers: C16"""
    step, budget = a_step(800, 4), Budget(0.3)
    shorter = Step(0, step.query[:1], step.keys[: step.contexts[0]], step.contexts[:1], step.scale, BLOCK)
    for method in sparse_prompts():
        both = [select(method.scores(one, budget), one, budget)[0] for one in (step, shorter)]
        assert torch.equal(both[0][: shorter.num_blocks], both[1]), method.name


def test_a_long_text_is_found() -> None:
    path = find_text()
    assert len(read_text(path)) > 32_000
    with pytest.raises(FileNotFoundError, match="--text"):
        find_text(2**40)
