"""Drafts that are right for a random while: a proposer that knows what its requests will say."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.speculation.proposer import SampledStep


class OracleProposer:
    """See DraftProposer.

    Args:
        texts: prompt -> the tokens that follow it.
        rng: decides how many drafts, and which of them are wrong.
        wrong: probability that some draft of a proposal is.
    """

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], rng: random.Random, wrong: float = 0.6) -> None:
        self._texts = texts
        self._rng = rng
        self._wrong = wrong

    def propose(self, step: SampledStep) -> list[list[int]]:
        drafts = []
        for request, most in zip(step.requests, step.wanted.tolist(), strict=True):
            text = self._texts[tuple(request.prompt_token_ids)]
            known = len(request.output_token_ids)
            proposed = list(text[known : known + self._rng.randint(0, most)])
            if proposed and self._rng.random() < self._wrong:
                place = self._rng.randrange(len(proposed))
                proposed[place] = (proposed[place] + self._rng.randrange(1, VOCAB)) % VOCAB
            drafts.append(proposed)
        return drafts
