"""Heads and draft models that draw their drafts: the distribution of the tokens, and that greedy ones stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from tests.chi_square import assert_distributed
from tests.engine.draft_load import MAX_TOKENS, OPTIONS, PROMPTS, STATIC
from tests.engine.head_models import Pair, make_pair
from tests.engine.serving import Engine, assert_same
from tests.engine.tensor_parallel import CHECKED
from tests.engine.tiny_models import VOCAB
from tests.engine.worker_processes import EngineOfWorkers
from vllm_gaudi_ucm.speculation.draft_choice import RandomDrafts
from vllm_gaudi_ucm.speculation.proposer import SampledStep

pytestmark = pytest.mark.slow  # starts engines

NUM_DRAFTS = 3
BUCKETS = {"graphs": {**STATIC["graphs"], "max_graphs": 8, "max_shared_blocks": 16}}
TOP_K, TEMPERATURE = 3, 0.5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A head that is often right."""
    return make_pair(tmp_path_factory.mktemp("pair"), "eagle", quiet=True)


def speculation(pair: Pair, method: str) -> dict[str, Any]:
    drawn = {"draft_sample_method": "probabilistic"}
    if method == "draft_model":
        return {"method": method, "model": str(pair.target), "num_speculative_tokens": NUM_DRAFTS, **drawn}
    return {**pair.speculation(NUM_DRAFTS), **drawn}


@torch.inference_mode()
def probabilities_after(target: Path, text: list[int]) -> torch.Tensor:
    """Returns the distribution of the next two tokens, [vocabulary, vocabulary], of Transformers' model."""
    model: Any = AutoModelForCausalLM.from_pretrained(target).eval()

    def after(tokens: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([tokens])).logits[0, -1].double() / TEMPERATURE
        return logits.masked_fill(logits < logits.topk(TOP_K).values[-1], -torch.inf).softmax(-1)

    joint, first = torch.zeros(VOCAB, VOCAB, dtype=torch.float64), after(text)
    for token in first.nonzero()[:, 0].tolist():
        joint[token] = first[token] * after([*text, token])
    return joint


@pytest.mark.parametrize(
    ("method", "ucm", "ahead"),
    [("eagle", BUCKETS, True), ("draft_model", {}, False)],
)
def test_random_drafts(pair: Pair, method: str, ucm: dict[str, Any], ahead: bool) -> None:
    """The second and third token of many requests together, the same tokens for the same seeds, and greedy requests
    among random ones. Of a draft model that is the model, every draft is accepted."""
    with Engine(pair.target, **OPTIONS) as engine:
        expected = engine.greedy(PROMPTS[:3], MAX_TOKENS)
    options = {**OPTIONS, "async_scheduling": ahead, "enable_prefix_caching": False}
    ucm = {**ucm, "scheduler": {"async_scheduling": ahead}}
    with Engine(pair.target, ucm, **options, speculative_config=speculation(pair, method)) as engine:
        proposer: Any = engine.runner.parts.drafts.proposer  # type: ignore[attr-defined]
        assert isinstance(proposer.choice, RandomDrafts)
        text = [*PROMPTS[4], expected[0].tokens[0]]
        found = torch.zeros(VOCAB, VOCAB)
        propose, taken = proposer.propose, []

        def noted(step: SampledStep) -> list[list[int]]:
            taken.append(int(step.yields.sum()))
            drafts: list[list[int]] = propose(step)
            return drafts

        proposer.propose = noted
        many = [
            SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed, max_tokens=5, ignore_eos=True)
            for seed in range(160)
        ]
        answers = [list(one.outputs[0].token_ids) for one in engine.generate([text] * len(many), many)]
        for answer in answers:
            found[answer[0], answer[1]] += 1
        assert_distributed(found.flatten(), probabilities_after(pair.target, text).flatten())
        assert sum(taken) < 0.8 * 5 * len(many)
        assert [list(one.outputs[0].token_ids) for one in engine.generate([text] * len(many), many)] == answers
        mixed = SamplingParams(temperature=0.9, max_tokens=MAX_TOKENS, ignore_eos=True)
        greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        together = engine.generate(PROMPTS[:3] + PROMPTS[:3], [greedy] * 3 + [mixed] * 3)
        assert [list(one.outputs[0].token_ids) for one in together[:3]] == [answer.tokens for answer in expected]
        assert_same(engine.greedy(PROMPTS[:3], MAX_TOKENS), expected)
        if engine.runner.static is not None:
            assert engine.runner.static.stages.new_recipes == 0
        engine.check_idle()


def test_workers_draw_the_same_drafts(pair: Pair) -> None:
    """Each rank draws and verifies by itself, from the same noise: tokens equal one worker's."""
    params = [
        SamplingParams(temperature=TEMPERATURE * (number % 3), seed=number, max_tokens=6, ignore_eos=True)
        for number in range(6)
    ]
    options = {**OPTIONS, "speculative_config": speculation(pair, "eagle")}
    with Engine(pair.target, **options) as engine:
        wanted = [list(one.outputs[0].token_ids) for one in engine.generate(PROMPTS[:6], params)]
    with EngineOfWorkers(pair.target, CHECKED, **options, tensor_parallel_size=2) as engine:
        assert [list(one.outputs[0].token_ids) for one in engine.generate(PROMPTS[:6], params)] == wanted
        engine.check_idle()
