"""Drafts of a draft model, and their verification under full attention or a selection, in the same contexts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.sparse_rows import Policy, selecting

GROUP = 64


class Verification(NamedTuple):
    """certain: tokens of the context, its last one included, when `drafts` were verified. accepted: by dense rows."""

    certain: int
    drafts: list[int]
    accepted: float


@dataclass
class Continuation:
    """A prompt, its continuation by dense attention, and the verifications along it."""

    tokens: list[int]
    verifications: list[Verification]


class Rows:
    """A model of Hugging Face's with the K and V of a prefix, which rows are computed on top of."""

    @torch.inference_mode()
    def __init__(self, model: Any, prompt: Sequence[int]) -> None:
        from transformers import DynamicCache

        self._model, self._prompt = model, len(prompt) - 1
        self._cache = DynamicCache(config=model.config)
        model.model(input_ids=torch.tensor([prompt[:-1]]), past_key_values=self._cache, use_cache=True)

    def restart(self) -> None:
        """Back to the prompt, without its last token."""
        self._keep(self._prompt)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], first: int, policy: Policy | None = None, block_size: int = 1) -> Tensor:
        """Float32 `[rows, vocabulary]` of tokens at positions from `first` on; K and V from there on are replaced."""
        self._keep(first)
        with selecting(policy, block_size):
            out = self._model(input_ids=torch.tensor([list(tokens)]), past_key_values=self._cache, use_cache=True)
        return out.logits[0].float()

    def _keep(self, count: int) -> None:
        if self.computed > count:
            self._cache.crop(count - self.computed)

    @property
    def computed(self) -> int:
        """Tokens whose K and V are there."""
        return int(self._cache.get_seq_length())


def rounded(model: Any, bits: int = 4) -> Any:
    """A copy of a model with the weights of its layers rounded to this many bits, by groups of 64: a draft model that
    agrees with its target often, and not always.
    """
    draft, most = copy.deepcopy(model), 2 ** (bits - 1) - 1
    for name, weight in draft.named_parameters():
        if "proj" in name:
            groups = weight.data.unflatten(1, (-1, GROUP))
            step = groups.abs().amax(-1, keepdim=True) / most
            weight.data = ((groups / step).round().clamp(-most - 1, most) * step).flatten(1)
    return draft


def propose(draft: Rows, tokens: Sequence[int], count: int) -> list[int]:
    """The draft model's likeliest tokens after `tokens`."""
    found: list[int] = []
    first = min(draft.computed, len(tokens) - 1)
    rows = list(tokens[first:])
    for _ in range(count):
        found.append(int(draft.logits(rows, first)[-1].argmax()))
        first, rows = first + len(rows), found[-1:]
    # results of drafts may be wrong
    draft.logits(tokens[-1:], len(tokens) - 1)
    return found


def chances(logits: Tensor, drafts: Sequence[int], temperature: float) -> Tensor:
    """Float `[drafts]`: how likely each is to be accepted, given that those before it are; 0 or 1 at temperature 0."""
    index = torch.tensor(drafts)
    rows = logits[: len(drafts)]
    if temperature == 0:
        return (rows.argmax(-1) == index).float()
    return (rows / temperature).softmax(-1).gather(1, index[:, None])[:, 0]


def tokens_of_step(likely: Tensor) -> float:
    """Expected tokens of a verification: accepted drafts, and one more."""
    return 1 + float(likely.cumprod(0).sum())


def dense_continuation(
    target: Rows, draft: Rows, prompt: Sequence[int], count: int, num_drafts: int, temperature: float, seed: int
) -> Continuation:
    """Speculative decoding with full attention, of at least `count` tokens."""
    generator, tokens = torch.Generator().manual_seed(seed), list(prompt)
    found = Continuation(tokens, [])
    while len(tokens) < len(prompt) + count:
        drafts = propose(draft, tokens, num_drafts)
        logits = target.logits([tokens[-1], *drafts], len(tokens) - 1)
        likely = tokens_of_step(chances(logits, drafts, temperature))
        found.verifications.append(Verification(len(tokens), drafts, likely))
        sampled = _sample(logits, temperature, generator)
        accepted = next((i for i, token in enumerate(drafts) if sampled[i] != token), num_drafts)
        tokens += sampled[: accepted + 1]
    return found


def verify(target: Rows, done: Continuation, policy: Policy, block_size: int, temperature: float) -> list[float]:
    """Returns the tokens of each of the dense continuation's verifications under a policy.

    Each has the same context and drafts; only K and V after the prompt come from the policy.
    """
    target.restart()
    found = []
    for certain, drafts, _ in done.verifications:
        logits = target.logits([done.tokens[certain - 1], *drafts], certain - 1, policy, block_size)
        found.append(tokens_of_step(chances(logits, drafts, temperature)))
    return found


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    if temperature == 0:
        return [int(token) for token in logits.argmax(-1)]
    return [int(token) for token in torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]]
