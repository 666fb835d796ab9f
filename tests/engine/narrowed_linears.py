"""A model of Transformers whose linear layers multiply rows that are rounded to 8-bit floats, as a Gaudi's do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import NEAR_TIE, Answer
from vllm_gaudi_ucm.ops.narrow_floats import E4M3

# the form of experts and of this layer on a Gaudi: plain weights, and rows as they are
PLAIN = (".experts.", "kv_b_proj")
# How near to the middle of two 8-bit floats, relative to itself, a number is that may be rounded to either of them:
# engine and reference compute it by float32 sums of another order.
MIDDLE = 1e-4
MOST_TRIED = 64
"""Numbers in the middle that are rounded the other way on trial, the nearest ones first."""

SMALLER = 0.9
"""A number stays rounded the other way if the mean difference is then at most so many times as large."""


class Tie(NamedTuple):
    """Holds the call, the place and the distance of a number near the middle of two 8-bit floats."""

    call: int
    place: int
    distance: float


class NarrowedModel:
    """Rounds the rows of a model's linear layers whose names match.

    Engine and reference differ in the last digits before rows are rounded. A number in the middle of two 8-bit floats
    may become another one then, an eighth of itself away, and moves logprobs of its and later rows by up to 1. So the
    comparison follows the engine: it looks for the numbers that are to be rounded the other way.

    largest: the largest magnitude of the card's e4m3.
    """

    def __init__(self, reference: ReferenceModel, pattern: str, largest: float) -> None:
        self._reference, self._largest = reference, largest
        self._calls = 0
        self._last: tuple[Any, Any] = (None, None)
        self._others: set[tuple[int, int]] = set()
        self._ties: list[Tie] = []
        for name, layer in reference.model.named_modules():
            plain = any(part in name for part in PLAIN)
            if isinstance(layer, nn.Linear | Conv1D) and re.match(pattern, name) and not plain:
                layer.register_forward_pre_hook(self._round)

    def assert_greedy(self, prompts: Sequence[Any], answers: Sequence[Answer], near: float = NEAR_TIE) -> int:
        """Asserts greedy tokens and logprobs. Returns how many numbers were rounded the other way for that.

        near: what logprobs may differ by after that.
        """
        count = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            self._others = set()
            self._differences(prompt, answer)
            self._follow(prompt, answer, sorted(self._ties, key=lambda tie: tie.distance)[:MOST_TRIED])
            count += len(self._others)
            self._calls = 0
            self._reference.assert_greedy([prompt], [answer], near=near)
        return count

    def _follow(self, prompt: Any, answer: Answer, ties: Sequence[Tie]) -> None:
        """Rounds numbers the other way that make logprobs more alike, until they are, or none does."""
        found = self._differences(prompt, answer)
        while found.max() > NEAR_TIE:
            before = found
            for tie in ties:
                self._others ^= {tie[:2]}
                other = self._differences(prompt, answer)
                if other.mean() < SMALLER * found.mean():
                    found = other
                    if found.max() <= NEAR_TIE:
                        return
                else:
                    self._others ^= {tie[:2]}
            if found is before:
                return

    def _differences(self, prompt: Any, answer: Answer) -> Tensor:
        """Returns how far each logprob is from the reference's, and notes the numbers in the middle of two others."""
        self._calls, self._ties = 0, []
        expected = self._reference.after(prompt, answer.tokens)
        chosen = expected[torch.arange(len(answer.tokens)), answer.tokens]
        return (torch.tensor(answer.logprobs) - chosen).abs()

    def _round(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        (x,) = inputs
        # layers that an engine has as one matrix
        if x is not self._last[0]:
            self._last = (x, self._rounded(x))
        return (self._last[1],)

    def _rounded(self, x: Tensor) -> Tensor:
        self._calls += 1
        scale = x.abs().amax(-1, keepdim=True) / self._largest
        scale = torch.where(scale > 0, scale, 1)
        codes = x / scale
        found = codes.to(E4M3).float()
        low, high = ((codes * factor).to(E4M3).float() for factor in (1 - MIDDLE, 1 + MIDDLE))
        places = (low != high).flatten().nonzero().flatten()
        own, below, above = (one.flatten()[places] for one in (found, low, high))
        middle = (below + above) / 2
        distances = ((codes.flatten()[places] - middle) / middle).abs()
        for index, place in enumerate(places.tolist()):
            self._ties.append(Tie(self._calls, place, float(distances[index])))
            if (self._calls, place) in self._others:
                found.view(-1)[place] = below[index] + above[index] - own[index]
        return found * scale
