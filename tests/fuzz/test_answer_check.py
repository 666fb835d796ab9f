"""The check finds what is wrong with an answer: one wrong token, logprob or end is enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams

from tests.fuzz.answer_check import Answer, AnswerCheck

VOCABULARY, END, MAX_LENGTH = 12, 2, 20
PROMPT = [5, 6, 7]


class Score(NamedTuple):
    logprob: float


def logits(tokens: Sequence[int]) -> torch.Tensor:
    """After token t the best is t + 1, then t + 2, and so on."""
    distance = (torch.arange(VOCABULARY)[None] - torch.tensor(list(tokens))[:, None] - 1) % VOCABULARY
    return -distance.float()


class Even:
    """A grammar of even tokens."""

    def allowed(self) -> torch.Tensor:
        return torch.arange(VOCABULARY) % 2 == 0

    def accept(self, token: int) -> bool:
        return token % 2 == 0


def asked(**options: Any) -> SamplingParams:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, "ignore_eos": False, **options})
    params.update_from_generation_config({}, END)
    return params


def answer(tokens: Sequence[int] = (8, 9, 10), reason: str | None = "length", **options: Any) -> Answer:
    given = {name: options.pop(name) for name in ("text", "scores", "prompt_scores", "is_cut") if name in options}
    return Answer("r1", PROMPT, asked(**options), tokens, reason, **given)


def found(one: Answer, **options: Any) -> list[str]:
    return list(AnswerCheck(logits, MAX_LENGTH, **options).problems(one))


RIGHT = torch.log_softmax(logits([7])[0], 0)
RIGHT_ANSWERS = {
    "greedy": answer(),
    "one": answer([8], max_tokens=1),
    "longest context": answer([(8 + index) % VOCABULARY for index in range(6)], reason="stop", max_tokens=50),
    "stopped": answer([8, 9], "stop", stop_token_ids=[9]),
    "cut": answer([8], None, is_cut=True),
    "biased": answer([11, 0, 1], logit_bias={11: 20.0}, max_tokens=1, is_cut=True),
    "allowed": answer([3, 4, 3], allowed_token_ids=[3, 4]),
    "stops later": answer([8, 10, 11], "stop", stop_token_ids=[9, 11], min_tokens=2),
    "random": answer([8, 10, 11], temperature=1.0, top_k=2),
    "logprobs": answer([8], max_tokens=1, logprobs=0, scores=[{8: Score(float(RIGHT[8]))}]),
    "penalised": answer([9, 10, 11], frequency_penalty=0.1, repetition_penalty=1.0, logit_bias={8: -3.0}),
}
RIGHT_ANSWERS["longest context"].tokens = [8, 9, 10, 11, 0, 1, 2]
# a bias holds in every step
RIGHT_ANSWERS["biased"].tokens = [11, 11]


@pytest.mark.parametrize("name", RIGHT_ANSWERS)
def test_a_right_answer_passes(name: str) -> None:
    assert found(RIGHT_ANSWERS[name]) == []


WRONG_ANSWERS = {
    "wrong token": (answer([8, 9, 11]), "token 2 of 3: 11, wanted 10"),
    "forbidden token": (answer([8, 9, 10], allowed_token_ids=[3, 4]), "token 0 of 3: 8, wanted 3, which is forbidden"),
    "too unlikely": (answer([8, 9, 1], temperature=1.0, top_k=2), "token 2 of 3: 1, wanted 10"),
    "missing end": (answer([8, 9], None), "no end after 2 tokens"),
    "too short": (answer([8, 9]), "ends at length 2, wanted 3"),
    "too long": (answer([8, 9, 10, 11], None, is_cut=False), "4 tokens, wanted at most 3"),
    "past its stop": (answer([8, 9, 10], stop_token_ids=[9]), "goes on after token 1"),
    "no stop": (answer([8, 9], "stop"), "none of them a stop"),
    "before its minimum": (answer([8, 9], "stop", stop_token_ids=[9], min_tokens=3), "stops after 2 tokens, wanted 3"),
    "past its text": (answer(text="abc", stop=["b"]), "text goes on after"),
    "wrong logprob": (answer([8], max_tokens=1, logprobs=0, scores=[{8: Score(-9.0)}]), "logprob of 8: -9.0000"),
    "no logprob": (answer([8], max_tokens=1, logprobs=0, scores=[{9: Score(-1.0)}]), "no logprob of 8"),
    "lost logprobs": (answer(logprobs=0, scores=[]), "0 logprobs for 3 tokens"),
    "not the best": (
        answer([8], max_tokens=1, logprobs=1, scores=[{token: Score(float(RIGHT[token])) for token in (8, 10, 11)}]),
        "best logprobs",
    ),
    "lost prompt logprobs": (answer(prompt_logprobs=0), "no prompt logprobs, wanted 3"),
    "wrong prompt logprob": (
        answer(prompt_logprobs=0, prompt_scores=[None, {6: Score(-9.0)}, {7: Score(-9.0)}]),
        "prompt token 1 of 3: logprob of 6",
    ),
}


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_a_wrong_answer_is_reported(name: str) -> None:
    one, problem = WRONG_ANSWERS[name]
    assert [text for text in found(one) if text.startswith("r1: ") and problem in text]


def test_a_grammar_decides_what_is_best() -> None:
    assert found(answer([8, 10, 0]), grammar=lambda params: Even()) == []
    assert "grammar does not allow" in found(answer([8, 9, 10]), grammar=lambda params: Even())[0]
    assert "wanted 10" in found(answer([8, 0, 2], "stop"), grammar=lambda params: Even())[0]


def test_tokens_of_sparse_attention_are_not_compared() -> None:
    one = answer([8, 3, 4])
    one.is_exact = False
    assert found(one) == []
    one.tokens = [8]
    assert "ends at length" in found(one)[0]
