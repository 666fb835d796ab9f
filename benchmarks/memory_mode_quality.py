"""Measures the effect of memory mode on answers: real text, followed token by token, and look-ups, against the method
alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams

from benchmarks.retrieval.data import Task, make_sequence
from vllm_gaudi_ucm_tools.sparse_report.forced_tokens import FORCED


def follow(engine: LLM, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Nats per token of the answers, and the model's own choice at each of their places."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=len(answer),
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            extra_args={FORCED: list(answer)},
        )
        for answer in answers
    ]
    outputs = engine.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    nats, likeliest = [], []
    for output, answer in zip(outputs, answers, strict=True):
        places = output.outputs[0].logprobs
        assert places is not None
        nats += [-place[token].logprob for place, token in zip(places, answer, strict=True)]
        likeliest.append([next(token for token, found in place.items() if found.rank == 1) for place in places])
    return {"nats": math.fsum(nats) / len(nats), "likeliest": likeliest}


def look_ups(length: int, answers: int, sequences: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts of the retrieval task that end with one question, and its answers: one look-up per answered
    token.
    """
    rng = np.random.default_rng(seed)
    task = Task(length=length, records=min(384, length // 6), queries=1, answers=answers)
    found = [make_sequence(task, rng).tokens.tolist() for _ in range(sequences)]
    return [tokens[:-answers] for tokens in found], [tokens[-answers:] for tokens in found]


def equal_share(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Share of tokens that are equal place by place."""
    pairs = [a == b for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)]
    return sum(pairs) / len(pairs)
