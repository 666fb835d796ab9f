"""Proposes as many drafts as are wanted, some of them wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.speculation.proposer import SampledStep


class SpoiledProposer:
    """See DraftProposer.

    Args:
        texts: prompt -> the tokens that follow it; token 5 stands for tokens beyond it.
        rng: decides which draft of a proposal is wrong, if any is.
    """

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], rng: random.Random) -> None:
        self._texts = texts
        self._rng = rng

    def propose(self, step: SampledStep) -> list[list[int]]:
        drafts = []
        for request, most in zip(step.requests, step.wanted.tolist(), strict=True):
            known = len(request.output_token_ids)
            proposed = [*self._texts.get(tuple(request.prompt_token_ids), ())[known:], *[5] * most][:most]
            place = self._rng.randrange(2 * most + 1)
            if place < most:
                proposed[place] = (proposed[place] + self._rng.randrange(1, VOCAB)) % VOCAB
            drafts.append(proposed)
        return drafts
