"""Turns an example into tokens of a given number, and says which of them are answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.quality.tasks import TASKS, Example


@dataclass(frozen=True)
class Sample:
    """tokens: int64 [n], the context, the question and its answers. first: the index of the first answer's token.

    answers: for each answer its tokens as indices [begin, end).
    """

    tokens: Tensor
    first: int
    answers: tuple[tuple[int, int], ...]


def make_sample(tokenizer: Any, task: str, length: int, seed: int, number: int) -> Sample:
    """Returns the sample of this number, at most `length` tokens long. Equal arguments give equal samples.

    Raises ValueError if what must be in the context does not fit.
    """
    name = sorted(TASKS).index(task)
    rng = np.random.default_rng((seed, name, length, number))
    example = TASKS[task](rng, length // 4)
    return _tokens(tokenizer, example, task, length, rng)


def _tokens(tokenizer: Any, example: Example, task: str, length: int, rng: np.random.Generator) -> Sample:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    question = encode(f"\n{example.question}")
    end, answers = [], []
    for number, answer in enumerate(example.answers):
        end += encode(example.separator) if number and example.separator else []
        for place, piece in enumerate(answer.split("\0")):
            ids = encode(piece if piece.startswith((" ", "\n")) else f" {piece}")
            if place % 2 == 0:  # odd pieces are text between answers
                spans = [(len(end), len(end) + len(ids))]
                # every token of prose is an answer of its own
                answers += [(t, t + 1) for t in range(*spans[0])] if task == "prose" else spans
            end += ids
    # a model whose tokenizer begins texts with a token of its own expects it
    start = list(tokenizer("")["input_ids"])
    start += encode(f"{example.introduction}\n") if example.introduction else []
    placed = [encode(f"{part} ") for part in example.placed]
    left = length - len(start) - len(question) - len(end) - sum(map(len, placed))
    if left < 0:
        raise ValueError(f"task {task}: found {-left} tokens too many for a length of {length}; expected a longer one")
    filler = []
    for part in example.filler:
        ids = encode(f"{part} ")
        if len(ids) > left:
            break
        left -= len(ids)
        filler.append(ids)
    if task == "prose":  # its question goes on where the filler ends
        filler = [encode(" ".join(example.filler))[-(length - len(start) - len(question) - len(end)) :]]
    order = np.sort(rng.integers(0, len(filler) + 1, len(placed)))
    if not example.ordered:
        rng.shuffle(placed)
    context, taken = list(start), 0
    for place, part in zip(order, placed, strict=True):
        for ids in filler[taken:place]:
            context += ids
        context, taken = context + part, int(place)
    for ids in filler[taken:]:
        context += ids
    context += question
    first = len(context)
    found = tuple((first + a, first + b) for a, b in answers)
    return Sample(torch.tensor(context + end, dtype=torch.int64), first, found)
