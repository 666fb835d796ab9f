"""Notes what heads propose in an engine, and compares it with a plain computation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import pytest
import torch

from tests.engine.serving import NEAR_TIE, Engine
from vllm_gaudi_ucm.speculation.draft_model import DraftModelProposer
from vllm_gaudi_ucm.speculation.proposer import SampledStep


class Plain(Protocol):
    """A plain computation of a head."""

    def drafts(self, tokens: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
        """Returns the drafts after a text, and the logits of each, float32 [count, vocabulary of the head]."""


class Proposals:
    """Notes the text and the drafts of every request that gets some, and the logits that they were chosen from."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[list[int], list[int]]] = []
        self.logits: list[torch.Tensor] = []
        self.yielded = 0
        proposer: Any = engine.runner.parts.drafts.proposer  # type: ignore[attr-defined]
        assert isinstance(proposer, DraftModelProposer)
        propose, likeliest, table = proposer.propose, proposer.choice.likeliest, engine.runner.parts.requests

        def noted(step: SampledStep) -> list[list[int]]:
            texts = [table.token_ids[one.row, : table.num_tokens[one.row]].tolist() for one in step.requests]
            drafts = propose(step)
            # with async scheduling, places on the device
            ahead = getattr(engine.runner.parts.drafts, "ahead", None)
            named = {str(index): some for index, some in enumerate(drafts)}
            known = named if ahead is None else ahead.read(named, early=True)
            self.yielded += int(step.yields.sum())
            self.found += [(text, list(some)) for text, some in zip(texts, known.values(), strict=True) if some]
            return drafts

        def scored(logits: torch.Tensor) -> torch.Tensor:
            self.logits.append(logits.clone())
            return likeliest(logits)

        patch.setattr(proposer, "propose", noted)
        patch.setattr(proposer.choice, "likeliest", scored)


def check_proposals(proposals: Proposals, plain: Plain, num_drafts: int, near: float = NEAR_TIE) -> None:
    """Every draft is the plain computation's, unless its logits are nearer than `near`."""
    drafts = cache(lambda text: plain.drafts(text, num_drafts))
    assert proposals.found
    for text, found in proposals.found:
        wanted, logits = drafts(tuple(text))
        for place, (one, other) in enumerate(zip(found, wanted, strict=False)):
            if one != other:
                best = logits[place].topk(2).values
                assert best[0] - best[1] < near, (text, found, wanted)
                break
